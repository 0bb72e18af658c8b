"""The arguments of a command as its dataclass, read by tyro; each of its parse errors becomes one line."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from siamesenorm.errors import UserError, unknown
from siamesenorm.options import REMEDIES, alternatives
from siamesenorm.training.presets import PRESETS

HELP = ("-h", "--help")


def check_preset(arguments: Sequence[str]) -> None:
    """Raise UserError unless the first argument is the name of a preset."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"no preset given: choose from {', '.join(PRESETS)}")
    if arguments[0] not in PRESETS:
        raise unknown("preset", arguments[0], PRESETS)


def parse(kind: Any, arguments: Sequence[str], name: str) -> Any:
    """Return the arguments of the command `name`; raises UserError in one line for bad ones.

    `kind` is a dataclass, or an object whose `prepare(words)` returns the type to read, the words and a tyro registry.
    """
    import tyro
    from tyro import _errors

    words, registry = list(arguments), None
    if hasattr(kind, "prepare"):
        kind, words, registry = kind.prepare(words)
    hint = f"(siamesenorm {name} --help shows the options)"

    def reject(event: _errors.ParseErrorEvent) -> NoReturn:
        cause = getattr(sys.exc_info()[1], "__context__", None)
        if isinstance(cause, UserError):  # of a dataclass or of a value that is read from text
            raise cause
        raise UserError(f"{_describe(event, kind, words)} {hint}")

    try:
        with _errors.on_parse_error(reject):
            asked = any(word in HELP for word in words)
            prog = f"siamesenorm {name.partition(' ')[0]}"  # tyro adds the preset
            return tyro.cli(kind, args=words, prog=prog, registry=registry, console_outputs=asked)
    except SystemExit as exit:
        if exit.code == 0:  # help was shown
            raise
        raise UserError(f"bad arguments {' '.join(words)} {hint}") from None


def _describe(event: Any, kind: Any, words: Sequence[str]) -> str:
    """Return what is wrong and the remedy."""
    from tyro import _errors

    match event:
        case _errors.MissingArgs(missing_arguments=missing):
            return _missing([each.arg for each in missing])
        case _errors.UnrecognizedArgs(tokens=tokens):
            return _unrecognized(tokens, kind, words)
        case _errors.InvalidChoice(argument=argument, value=value, choices=choices):
            return str(unknown(_name(argument), value, choices))
        case _errors.BadValue(argument=argument, offending_value=None):
            return f"{_name(argument)} has no value: write {_name(argument)} VALUE"
        case _errors.InstantiationFailure(argument=argument) if argument is not None:
            value = " ".join(_values(_name(argument), words))
            return f"{_name(argument)} is {value!r}: write {_remedy(argument.field.type_stripped)}"
        case _errors.InstantiationFailure(message=message):
            return message
        case _:
            return f"bad arguments {' '.join(words)}"


def _missing(arguments: Sequence[Any]) -> str:
    names = [f"{_name(each)} {each.lowered.metavar}" for each in arguments]
    if len(names) > 1:
        return f"missing {', '.join(names)}"
    text = arguments[0].field.helptext
    explained = (text() if callable(text) else text) or ""
    return f"missing {names[0]}: {' '.join(explained.split()).rstrip('.')}".rstrip(": ")


def _unrecognized(tokens: Sequence[str], kind: Any, words: Sequence[str]) -> str:
    given = [token.partition("=")[0] for token in tokens if token.startswith("--")]
    if not given:
        return f"unexpected argument {tokens[0]!r}: remove it, or name its option before it"
    named = [each for each in get_args(kind) if words[0] in _names_of(each)]
    known = sorted({option for each in named or [kind] for option in options_of(each)})
    nearest = [match for each in given for match in difflib.get_close_matches(each, known, n=1, cutoff=0.7)]
    remedy = f": did you mean {' or '.join(dict.fromkeys(nearest))}?" if nearest else ""
    return f"unknown option {', '.join(given)}{remedy}"


def _names_of(subcommand: Any) -> list[str]:
    return [getattr(each, "name", "") for each in getattr(subcommand, "__metadata__", ())]


def _name(argument: Any) -> str:
    """Return the flag of an option, or the name of a positional argument."""
    return str(argument.field.extern_name if argument.is_positional() else argument.lowered.name_or_flags[-1])


def _values(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values given for a flag."""
    found: list[str] = []
    inside = False
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            inside = name.replace("_", "-") == flag
            found = ([value] if equals else []) if inside else found
        elif inside:
            found.append(word)
    return found


def _remedy(hint: object) -> str:
    """Return what to write for an annotation."""
    if get_origin(hint) is tuple:
        return _remedy(get_args(hint)[0])
    kinds = [kind for kind in alternatives(hint) if kind is not type(None)]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    known = {**REMEDIES, Path: "a path"}
    return " or ".join([*(known[kind] for kind in kinds if kind in known), *words]) or "another value"


def options_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the flags of a dataclass, those of nested ones with their names before them, as tyro spells them.

    `kind` is a type or an instance, whose fields may hold instances of other types than their annotations.
    """
    from siamesenorm.norms import NormSpec
    from siamesenorm.topologies import Topology

    if get_origin(kind) is Annotated:
        default = next((each.default for each in kind.__metadata__ if hasattr(each, "prefix_name")), None)
        kind = default if dataclasses.is_dataclass(default) else get_args(kind)[0]
    if not dataclasses.is_dataclass(kind):
        for member in get_args(kind):
            yield from options_of(member, prefix)
        return
    hints = get_type_hints(kind if isinstance(kind, type) else type(kind), include_extras=True)
    for field in dataclasses.fields(kind):
        settings = [each for each in getattr(hints[field.name], "__metadata__", ()) if hasattr(each, "prefix_name")]
        renamed = next((each.name for each in settings if each.name is not None), None)
        name = field.name.replace("_", "-") if renamed is None else renamed
        flag = ".".join(filter(None, (prefix, name)))
        value = None if isinstance(kind, type) else getattr(kind, field.name)
        inner = value if dataclasses.is_dataclass(value) else hints[field.name]
        nested = [] if isinstance(inner, (Topology, NormSpec)) else list(options_of(inner, flag))
        yield from nested or [f"--{flag}"]
