"""The contract of an evaluation, and `evaluate`, which applies some to a trained run and keeps the results beside it.

Results are records in the run's `evaluations.jsonl`, one for each evaluation and each kind of weights: those that were
trained, and their average where the run has one. The record of training is not changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from siamesenorm.files import decode_json, disk_errors, encode_json, exclusive, write_atomically
from siamesenorm.progress import Progress
from siamesenorm.tasks.task import Task
from siamesenorm.training import execution
from siamesenorm.training.config import RunConfig
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import read_metrics
from siamesenorm.world import World

RAW, AVERAGE, NONE = "raw", "ema", "none"
KEY = ("step", "weights", "evaluation", "options")
"""The fields of a record that say what was evaluated: a repeated evaluation replaces the record."""

MADE_BY = ("siamesenorm", "commit", "torch")
"""What a record says of the code that made it."""

Record = dict[str, Any]
ItemDirectory = Callable[[str], Path]
"""Gives the directory of the scores of items by their digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated: a run's task, its model with one kind of weights in evaluation mode, and how many at once."""

    config: RunConfig
    task: Task
    model: nn.Module
    device: torch.device
    directory: RunDirectory | None = None
    """The run, whose record and caches may be used; None inside training."""
    step: int = 0
    weights: str = RAW
    on_progress: Progress = lambda part, text: None
    """Is called with the part of the evaluation that is done, and a text."""

    @property
    def scores(self) -> Path | None:
        """The directory of log-probabilities that were computed before."""
        return None if self.directory is None else self.directory.scores

    @property
    def item_scores(self) -> ItemDirectory | None:
        """The directory of the scores of items by these weights, by the digest of the items."""
        if self.directory is None:
            return None
        return functools.partial(self.directory.item_scores_of, self.step, self.weights)


class Evaluation(Protocol):
    """One kind of evaluation with its options; a frozen dataclass.

    `name` is that of its records, `options` are what its results depend on besides the run.
    """

    @property
    def name(self) -> str:
        """The name in records."""

    @property
    def uses_model(self) -> bool:
        """Whether the results depend on the model's weights."""

    def options(self) -> Mapping[str, Any]:
        """Return the options as JSON values."""

    def require(self, task: Task) -> None:
        """Raise UserError, with the reason, for a task that cannot be evaluated so, before anything is computed."""

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the results by name."""


@dataclass(frozen=True, slots=True)
class TaskMetrics:
    """The metrics of the run's own task on its held-out data, as during training."""

    name = "held-out"
    uses_model = True

    def options(self) -> Mapping[str, Any]:
        """Return no options."""
        return {}

    def require(self, task: Task) -> None:
        """Every task has metrics."""

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the metrics and the number of items."""
        at_once = subject.config.samples_at_once
        return subject.task.evaluate(subject.model, at_once, World(device=subject.device))


Kind = TypeVar("Kind", bound=Evaluation)


class TrainedRun:
    """The newest whole checkpoint of a run, with its task on the run's data, or on `data` where they were moved.

    Raises UserError for a directory without a run or without a checkpoint.
    """

    def __init__(self, path: Path, *, device: str = "cpu", data: str | None = None) -> None:
        self.directory = RunDirectory(path)
        self.config = self.directory.read_config()
        if data is not None:
            task = dataclasses.replace(self.config.task, data=self.config.task.data_type(data))
            self.config = dataclasses.replace(self.config, task=task)
        self.device = execution.find_device(device)
        self.checkpoint = self.directory.newest_checkpoint(("model", AVERAGE))

    @cached_property
    def task(self) -> Task:
        """The task, with its data."""
        return self.config.task.build(self.config.seed)

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.checkpoint.step

    @property
    def identity(self) -> str:
        """The identity of the run."""
        return self.config.identity

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of weights there are."""
        return (RAW, AVERAGE) if AVERAGE in self.checkpoint.tensors else (RAW,)

    def build_model(self, kind: str = RAW) -> nn.Module:
        """Return the model with one kind of weights, in evaluation mode."""
        choices = execution.choose(self.config.execution, 0.0, next(iter(self.directory.read_environments()), None))
        kernels = choices.kernels if self.device.type == "cuda" else "plain"
        model = self.task.build_model(self.device, kernels)
        model.load_state_dict(self.checkpoint.tensors["model"])
        if kind == AVERAGE:
            model.load_state_dict(self.checkpoint.tensors[AVERAGE], strict=False)  # of trained weights alone
        return model.eval()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute without gradients, in the precision of the run."""
        with torch.no_grad(), execution.autocast(self.config.precision, self.device):
            yield

    def evaluate(
        self, evaluations: Sequence[Evaluation], on_progress: Progress = lambda done, what: None
    ) -> list[Record]:
        """Return a record of each evaluation with each kind of weights that it uses; each is kept when it is made.

        `on_progress` is called with how many are done, and parts of one. Raises UserError before anything is computed
        where the task does not have what an evaluation needs, or the run's records cannot be read or written.
        """
        for evaluation in evaluations:
            evaluation.require(self.task)
        self.keep([])
        records: list[Record] = []
        for kind in self.kinds:
            subject = self.subject(kind)

            def results_of(evaluation: Evaluation, show: Progress, subject: Subject = subject) -> Mapping[str, Any]:
                with self.computing():
                    return evaluation.run(dataclasses.replace(subject, on_progress=show))

            def show(done: float, what: str, kind: str = kind, before: int = len(records)) -> None:
                on_progress(before + done, f"{kind} weights, {what}")

            chosen = [each for each in evaluations if each.uses_model or kind == RAW]
            records += evaluate_each(chosen, results_of, show, step=self.step, weights=kind, keep=self.keep)
        return records

    def subject(self, kind: str = RAW) -> Subject:
        """Return what is evaluated: the model with one kind of weights."""
        return Subject(
            config=self.config,
            task=self.task,
            model=self.build_model(kind),
            device=self.device,
            directory=self.directory,
            step=self.step,
            weights=kind,
        )

    def keep(self, records: Sequence[Record]) -> None:
        """Write records to those of the run; see `keep_records`."""
        keep_records(self.directory.evaluations_file, records)


def evaluate_each(
    evaluations: Sequence[Kind],
    results_of: Callable[[Kind, Progress], Mapping[str, Any]],
    on_progress: Progress,
    *,
    step: int,
    weights: str,
    keep: Callable[[Sequence[Record]], None] = lambda records: None,
) -> list[Record]:
    """Return the record of each evaluation, with the environment; `keep` is called with each when it is made.

    `on_progress` is called with how many are done, and parts of one.
    """
    environment = execution.describe_environment("")
    made_by = {name: environment[name] for name in MADE_BY}
    records: list[Record] = []
    for evaluation in evaluations:

        def show(part: float, text: str, what: str = evaluation.name) -> None:
            on_progress(len(records) + part, f"{what} {text}".rstrip())

        show(0, "")
        results = results_of(evaluation, show)
        records.append({**make_record(evaluation, results, step=step, weights=weights), "environment": made_by})
        keep(records[-1:])
    return records


def make_record(evaluation: Evaluation, results: Mapping[str, Any], *, step: int, weights: str) -> Record:
    """Return the record of an evaluation."""
    return {
        "kind": "evaluation",
        "step": step,
        "weights": weights if evaluation.uses_model else NONE,
        "evaluation": evaluation.name,
        "options": dict(evaluation.options()),
        "results": dict(results),
    }


def keep_records(file: Path, records: Sequence[Record]) -> None:
    """Write records behind the earlier ones of a file, in the place of those of the same evaluation."""
    new = {_key(record) for record in records}
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        held = exclusive(file.with_name(f".{file.name}.lock"), wait=True)  # other evaluations of the run write it, too
    with held, disk_errors(file):
        earlier = [record for record in read_metrics(file) if _key(record) not in new] if file.exists() else []
        write_atomically(file, "".join(f"{encode_json(record)}\n" for record in [*earlier, *records]).encode())


def _key(record: Record) -> str:
    return encode_json(decode_json(encode_json([record.get(name) for name in KEY])))
