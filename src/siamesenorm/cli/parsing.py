"""The arguments of a command as its dataclass. tyro reads them; what it refuses in a box is told here in one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from siamesenorm.errors import UserError, unknown

HELP = {"-h", "--help"}
# Wide enough that tyro breaks no message, and so no path in it.
COLUMNS = "10000"
KINDS = {"FLOAT": "a number", "INT": "a whole number"}


def parse(kind: Any, arguments: Sequence[str], name: str) -> Any:
    """Return the arguments of the command `name`; raises UserError in one line for bad ones."""
    import tyro

    # tyro has no nearest name for --optoin=value.
    words = [part for word in arguments for part in (word.split("=", 1) if re.match(r"--[\w.-]+=", word) else [word])]
    registry = None
    if hasattr(kind, "prepare"):
        kind, words, registry = kind.prepare(words)
    said = io.StringIO()
    asked = bool(HELP & set(arguments))
    try:
        with contextlib.redirect_stderr(said), contextlib.nullcontext() if asked else _wide_terminal():
            return tyro.cli(kind, args=words, prog=f"siamesenorm {name}", registry=registry)
    except SystemExit as exit:
        if exit.code == 0:
            raise
        raise refusal(said.getvalue(), name) from None


def refusal(box: str, name: str) -> UserError:
    """Return in one line what tyro's box says about the arguments of the command `name`."""
    message, *details = _sections(box)
    text = " ".join(line.strip() for line in message)
    if of_the_dataclass := re.match(r"Error parsing (?!-)\S*[a-z]\S*: (.*)", text):
        return UserError(of_the_dataclass[1])
    told = (
        _missing_recipe(text)
        or _missing_options(message)
        or _unknown_options(message, details)
        or _unknown_choice(text)
        or _unreadable_value(text, details)
        or text
        or "bad arguments"
    )
    return UserError(f"{told} (siamesenorm {name} --help shows the options)")


def _missing_recipe(text: str) -> str | None:
    recipes = re.match(r"Expected one of \{(.*)\}", text)
    return f"no recipe given: choose from {recipes[1]}" if recipes else None


def _missing_options(message: list[str]) -> str | None:
    if not message[0].startswith("Missing from "):
        return None
    entries = [line.strip() for line in message if re.match(r" {4}\S", line)]
    if len(entries) > 1:
        return f"missing {', '.join(entries)}"
    explained = " ".join(line.strip() for line in message if re.match(r" {8}\S", line))
    return f"missing {entries[0]}: {explained.replace(' (required)', '').rstrip('.')}"


def _unknown_options(message: list[str], details: list[list[str]]) -> str | None:
    if not message[0].startswith("Unrecognized"):
        return None
    listed = " ".join(message[: message.index("")] if "" in message else message).partition(":")[2]
    words = re.sub(r"\(applied to [^)]*\)", "", listed).replace(",", " ").split()
    recipes = next((line for (line, *_) in details if line.startswith("Available subcommands: ")), None)
    if recipes is not None:
        choices = recipes.partition(": ")[2].split(", ")
        if words[0].startswith("-"):
            return f"no recipe before {words[0]}: choose from {', '.join(choices)}"
        return str(unknown("recipe", words[0], choices))
    options = [word for word in words if word.startswith("--")]
    if not options:
        return f"unexpected argument {words[0]!r}: remove it, or name its option before it"
    suggested = [match[1] for section in details for line in section if (match := re.match(r" {4}(--[\w.-]+)", line))]
    remedy = f": did you mean {' or '.join(dict.fromkeys(suggested))}?" if suggested else ""
    return f"unknown option {', '.join(options)}{remedy}"


def _unknown_choice(text: str) -> str | None:
    choice = re.match(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", text)
    if choice is None:
        return None
    return str(unknown(choice[2], choice[1], re.findall(r"'([^']*)'", choice[3])))


def _unreadable_value(text: str, details: list[list[str]]) -> str | None:
    """Name the option, the value and what is expected, in the words of the option's entry in the help."""
    if absent := re.match(r"Missing value for argument '([^']*)'", text):
        return f"{absent[1]} has no value: write {absent[1]} VALUE"
    failed, values = re.match(r"Error parsing (\S+): ", text), re.findall(r"\['([^']*)'|: '([^']*)'", text)
    entry = next((line for section in details for line in section if re.match(r" {4}\S", line)), "")
    expected = next((words for kind, words in KINDS.items() if kind in entry), entry.rpartition(" ")[2])
    if not (failed and values and expected):
        return None
    return f"{failed[1]} is {''.join(values[0])!r}: write {expected}"


def _sections(box: str) -> list[list[str]]:
    """Return the lines between the rules of a box, without title and frame, their indentation kept.

    A line is framed by two characters, "│ " or blanks: not every output can show the frame.
    """
    sections: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]:
        text = line[2:].rstrip("│ ")
        if text and set(text) <= set("─-╯"):
            sections.append([])
        else:
            sections[-1].append(text)
    return [section for section in sections if any(section)] or [[""]]


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
