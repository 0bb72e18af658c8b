"""The items of multiple-choice tasks: files of JSON lines, datasets of the Hub, or generated arithmetic."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.data.builtin import builtin_equations, equation
from siamesenorm.data.sources import read_json_lines
from siamesenorm.errors import UserError, optional, reason, unknown
from siamesenorm.evaluation.choice_tasks import GENERATED, TASKS, ChoiceItem, ChoiceTask
from siamesenorm.files import disk_errors, encode_json

SUFFIXES = (".jsonl", ".jsonl.gz")
HUB = "hf"
"""In place of a directory: the datasets of the Hub."""
GENERATED_ITEMS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskItems:
    """The items of one split of a task."""

    task: ChoiceTask
    split: str
    items: tuple[ChoiceItem, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the items."""
        found = hashlib.sha256(self.task.name.encode())
        for item in self.items:
            found.update(encode_json(item.to_json()).encode() + b"\n")
        return found.hexdigest()


def read_tasks(
    source: str | Path | None, *, names: Sequence[str] = (), split: str = "validation", limit: int = 0
) -> tuple[TaskItems, ...]:
    """Return the items of tasks, in the order of `names`, or of the table.

    `source` is a directory of files NAME_SPLIT.jsonl, gzipped or not, or "hf" for the datasets of the Hub; the
    generated task needs none. Without names these are all tasks that the source has. `limit` takes the first items of
    each, 0 all. Raises UserError for an unknown task, one that is not there, and a line that is no item.
    """
    for name in names:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    if limit < 0:
        raise UserError(f"limit is {limit}: choose a number of items, or 0 for all")
    available = list(_available(source, split))
    if source is None and not names:
        raise UserError("no tasks given: name their directory with --tasks, or generated_arithmetic")
    if not (names or available):
        raise UserError(f"{source} has no task: add files such as arc_easy_{split}.jsonl, or choose another split")
    found = []
    for name in dict.fromkeys(names or available):
        if name != GENERATED and name not in available:
            where = "name a directory with --tasks" if source is None else f"add {name}_{split}.jsonl to {source}"
            raise UserError(f"the items of {name} are not there: {where}")
        items = tuple(_items(TASKS[name], source, split))[: limit or None]
        found.append(TaskItems(task=TASKS[name], split=split, items=items))
    return tuple(found)


def _available(source: str | Path | None, split: str) -> Iterator[str]:
    if source is None:
        return
    if source == HUB:
        yield from (name for name, task in TASKS.items() if task.repository)
    elif not Path(source).is_dir():
        raise UserError(f"{source}: no such directory: give one of files TASK_{split}.jsonl, or {HUB}")
    else:
        yield from (name for name in TASKS if _file(Path(source), name, split))


def _file(directory: Path, name: str, split: str) -> Path | None:
    files = (directory / f"{name}_{split}{suffix}" for suffix in SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _items(task: ChoiceTask, source: str | Path | None, split: str) -> Iterator[ChoiceItem]:
    if task.name == GENERATED:
        yield from generate_arithmetic()
        return
    file = None if source in (HUB, None) else _file(Path(str(source)), task.name, split)
    rows = _hub_rows(task, split) if file is None else _file_rows(file)
    number = 0
    for number, (place, row) in enumerate(rows, 1):
        yield read_item(task, row, place, str(number))
    if not number:
        raise UserError(f"{file or task.repository} holds no item: give lines with question, choices and label")


def _file_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with disk_errors(file):
        yield from ((place, row) for place, row, _ in read_json_lines(file))


def _hub_rows(task: ChoiceTask, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    datasets = optional("datasets", "data", task.repository)
    try:
        rows: Iterable[Any] = datasets.load_dataset(
            task.repository, task.configuration, split=split, revision=task.revision
        )
    except Exception as error:  # the network and the Hub raise anything
        raise UserError(
            f"{task.repository}, split {split}, cannot be fetched ({reason(error)}): check the connection, or give "
            "a directory with --tasks"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{task.repository}: row {number}", dict(row)


def read_item(task: ChoiceTask, row: dict[str, Any], place: str, number: str) -> ChoiceItem:
    """Return the item of a row, of the uniform form (question, choices, label) or of the task's original one.

    Raises UserError, naming the place, for a row that is no item.
    """
    uniform = isinstance(row.get("choices"), list)
    try:
        question, choices, label = (row["question"], row["choices"], row.get("label")) if uniform else task.read(row)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{place}: no item of {task.name} ({type(error).__name__}: {error}): give question, choices and label"
        ) from error
    if not (isinstance(question, str) and question.strip()):
        raise UserError(f"{place}: question is {question!r}: give a text")
    if len(choices) < 2 or not all(isinstance(each, str) and each.strip() for each in choices):
        raise UserError(f"{place}: choices are {choices!r}: give at least two texts")
    if type(label) is not int or not 0 <= label < len(choices):
        raise UserError(f"{place}: label is {label!r}: give the index of the right one of {len(choices)} choices")
    item = ChoiceItem(id=str(row.get("id", number)), question=question, choices=tuple(choices), label=label)
    if not all(continuation.strip() for _, continuation in task.requests(item) or [("", "")]):
        raise UserError(f"{place}: {question!r} has no _ with text behind it: mark the place of the choices")
    return item


def generate_arithmetic(count: int = GENERATED_ITEMS, seed: int = 0) -> Iterator[ChoiceItem]:
    """Yield items such as `Calculate 85 - 56 =`, with near misses v - d, v + d and v + 10 d of the result v.

    The questions are of the kind of those in the built-in corpus, so that its models can learn them; none is in it, and
    none occurs twice.
    """
    generator = random.Random(f"items {seed}")
    left_out = set(builtin_equations())
    for number in range(count):
        while (line := equation(generator)) in left_out:
            pass
        left_out.add(line)
        question, _, answer = line.rpartition(" ")
        result, step = int(answer), 10 ** max(0, len(answer.lstrip("-")) - 3)
        choices = [str(result + miss) for miss in (0, -step, step, 10 * step)]
        generator.shuffle(choices)
        yield ChoiceItem(id=str(number), question=question, choices=tuple(choices), label=choices.index(answer))
