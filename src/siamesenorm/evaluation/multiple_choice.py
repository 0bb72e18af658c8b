"""Multiple-choice tasks by the log-probabilities of the choices: accuracies and bits per byte, item by item."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.errors import UserError
from siamesenorm.evaluation.choice_items import TaskItems, read_tasks
from siamesenorm.evaluation.choice_tasks import ChoiceItem, ChoiceTask
from siamesenorm.evaluation.evaluation import ItemDirectory, Subject
from siamesenorm.evaluation.language import require_language, scorer_of
from siamesenorm.evaluation.scorer import LanguageScorer
from siamesenorm.files import disk_errors, encode_json, write_atomically
from siamesenorm.progress import Progress
from siamesenorm.tasks.task import Task
from siamesenorm.training.run_record import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScore:
    """The log-probability of each choice in nats, and the size of its continuation without the leading blank."""

    id: str
    label: int
    log_probabilities: tuple[float, ...]
    characters: tuple[int, ...]
    bytes: tuple[int, ...]

    @classmethod
    def of(cls, task: ChoiceTask, item: ChoiceItem, log_probabilities: Sequence[float]) -> ItemScore:
        """Return the score of an item."""
        texts = [continuation[1:] for _, continuation in task.requests(item)]
        return cls(
            id=item.id,
            label=item.label,
            log_probabilities=tuple(log_probabilities),
            characters=tuple(map(len, texts)),
            bytes=tuple(len(text.encode()) for text in texts),
        )

    @property
    def acc(self) -> float:
        """1 where the right choice is the likeliest, the first of equal ones, and 0 elsewhere and for NaN."""
        return self._is_right(self.log_probabilities)

    @property
    def acc_per_char(self) -> float:
        """The same by log-probability per character."""
        sizes = zip(self.log_probabilities, self.characters, strict=True)
        return self._is_right([value / count for value, count in sizes])

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the right choice."""
        return -self.log_probabilities[self.label] / math.log(2) / self.bytes[self.label]

    def _is_right(self, values: Sequence[float]) -> float:
        return float(not any(map(math.isnan, values)) and int(np.argmax(values)) == self.label)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ItemScore:
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = dict(record)
        fields |= {name: tuple(fields[name]) for name in ("log_probabilities", "characters", "bytes")}
        return cls(**fields)


MEAN, MEAN_STDERR = "average", "average_stderr"
"""Beside the results of the tasks: the plain mean of their primary accuracies, and its standard error."""
METRICS = ("acc", "acc_per_char", "bits_per_byte")


def summarise(task: ChoiceTask, scores: Sequence[ItemScore]) -> dict[str, Any]:
    """Return the mean of each metric over the items with its standard error, which one item does not have."""
    found: dict[str, Any] = {}
    for metric in METRICS:
        values = np.array([getattr(score, metric) for score in scores])
        found[metric] = float(values.mean())
        with np.errstate(invalid="ignore"):  # infinite bits have no deviation
            error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
        found[f"{metric}_stderr"] = error
    return {**found, "items": len(scores), "primary": task.primary}


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipleChoice:
    """Scores the choices of tasks by their log-probabilities, zero-shot, with OLMo's rules.

    Context and continuation are encoded apart and joined, without a token before them; the context is cut at its left
    where both do not fit. Each task has `acc` (the largest sum of log-probabilities), `acc_per_char` (per character of
    the choice), `bits_per_byte` (of the right choice), and their standard errors; "average" is the plain mean of the
    tasks' primary accuracies, "average_stderr" its standard error.
    """

    tasks: tuple[TaskItems, ...]

    name = "multiple-choice"
    uses_model = True

    @property
    def digest(self) -> str:
        """SHA-256 of the items of all tasks."""
        return hashlib.sha256("".join(each.digest for each in self.tasks).encode()).hexdigest()

    def options(self) -> Mapping[str, Any]:
        """Return names, split and digest of the items."""
        return {
            "tasks": [each.task.name for each in self.tasks],
            "split": self.tasks[0].split,
            "digest": self.digest,
        }

    def require(self, task: Task) -> None:
        """Raise UserError for a task other than language modelling."""
        require_language(task, "--tasks")

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the results of each task, and keep the scores of the items beside the records."""
        return self.measure(scorer_of(subject), subject.item_scores, subject.on_progress)

    def measure(
        self, scorer: LanguageScorer, keep: ItemDirectory | None, on_progress: Progress = lambda part, text: None
    ) -> dict[str, Any]:
        """Return the results of each task, and write the scores of its items to `keep(digest)`/TASK_SPLIT.jsonl."""
        directory = keep(self.digest) if keep else None
        results: dict[str, Any] = {}
        weights = [sum(len(item.choices) for item in each.items) for each in self.tasks]
        for number, each in enumerate(self.tasks):
            before, share = sum(weights[:number]) / sum(weights), weights[number] / sum(weights)
            name = each.task.name
            scores = score_items(
                scorer,
                each,
                lambda part, _, b=before, s=share, n=name: on_progress(b + s * part, n),  # type: ignore[misc]
            )
            if directory is not None:
                write_item_scores(directory / f"{name}_{each.split}.jsonl", scores)
            results[name] = summarise(each.task, scores)
        mean, error = mean_of_tasks(
            [(each[each["primary"]], each[f"{each['primary']}_stderr"]) for each in results.values()]
        )
        return {**results, MEAN: mean, MEAN_STDERR: error}


@dataclass(frozen=True, kw_only=True)
class TaskSelection:
    """Which multiple-choice tasks are scored, and how many items of each."""

    tasks: str | None = None
    """Multiple-choice tasks: directory of files TASK_SPLIT.jsonl, or hf for the datasets of the Hub."""
    task_names: tuple[str, ...] = ()
    """Names of the tasks; all that there are if not given. generated_arithmetic needs no directory."""
    split: str = "validation"
    """Split of the items of tasks."""
    limit: int = 0
    """First items of each task; 0 is all."""

    def read(self) -> MultipleChoice:
        """Return the evaluation by these tasks; raises UserError for tasks that are not there."""
        return MultipleChoice(tasks=read_tasks(self.tasks, names=self.task_names, split=self.split, limit=self.limit))


def mean_of_tasks(values: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
    """Return the plain mean of tasks' values with standard errors, and its own, of independent tasks.

    It is None where a task has none.
    """
    mean = sum(value for value, _ in values) / len(values)
    errors = [error for _, error in values if error is not None]
    return mean, math.hypot(*errors) / len(values) if len(errors) == len(values) else None


def score_items(
    scorer: LanguageScorer, tasks: TaskItems, on_progress: Progress = lambda part, text: None
) -> list[ItemScore]:
    """Return the scores of the items of a task."""
    pairs = [tasks.task.requests(item) for item in tasks.items]
    requests = iter(scorer.requests([pair for group in pairs for pair in group]))
    found = scorer.score([[next(requests) for _ in group] for group in pairs], on_progress)
    return [ItemScore.of(tasks.task, item, values) for item, values in zip(tasks.items, found, strict=True)]


def write_item_scores(file: Path, scores: Sequence[ItemScore]) -> None:
    """Write a line for each item."""
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "".join(f"{encode_json(score.to_json())}\n" for score in scores).encode())


def read_item_scores(directory: Path) -> dict[str, tuple[ItemScore, ...]]:
    """Return the scores of the items by task and split; raises UserError for a directory without any."""
    found = {}
    for file in sorted(directory.glob("*.jsonl")):
        found[file.stem] = tuple(map(ItemScore.from_json, read_metrics(file)))
    if not found:
        raise UserError(f"{directory} has no scores of items: evaluate with --tasks first")
    return found
