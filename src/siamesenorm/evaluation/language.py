"""Evaluations of language models: what the trained model of a run, and any other model, is scored with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from siamesenorm.errors import UserError
from siamesenorm.evaluation.causal_models import NativeCausalModel, model_digest
from siamesenorm.evaluation.evaluation import (
    RAW,
    Evaluation,
    ItemDirectory,
    Record,
    Subject,
    evaluate_each,
    keep_records,
)
from siamesenorm.evaluation.scorer import LanguageScorer
from siamesenorm.models.language import LanguageModel
from siamesenorm.progress import Progress
from siamesenorm.tasks.language import LanguageTask
from siamesenorm.tasks.task import Task
from siamesenorm.training.run_directory import RunDirectory


class LanguageEvaluation(Evaluation, Protocol):
    """An evaluation that needs nothing but a model and its tokenizer, so that models without a run have it, too."""

    def measure(self, scorer: LanguageScorer, keep: ItemDirectory | None, on_progress: Progress) -> Mapping[str, Any]:
        """Return the results by name, and write the scores of items to the directory that `keep` gives for them."""


def require_language(task: Task, option: str) -> None:
    """Raise UserError for a task other than language modelling."""
    if not isinstance(task, LanguageTask):
        raise UserError(f"{option} scores texts: evaluate a run of a language model")


def scorer_of(subject: Subject) -> LanguageScorer:
    """Return the scorer of a run's model, with the tokenizer of its data; its cache is kept with the run."""
    tokenizer = cast(LanguageTask, subject.task).data.tokenizer

    def encode(texts: Sequence[str]) -> list[Sequence[int]]:
        return [ids.tolist() for ids in tokenizer.encode_batch(texts)]

    settings = {"precision": subject.config.precision, "device": subject.device.type, "torch": torch.__version__}
    return LanguageScorer(
        model=NativeCausalModel(cast(LanguageModel, subject.model)),
        encode=encode,
        start=tokenizer.end_of_text,
        identity="" if subject.scores is None else model_digest(subject.model, **settings),
        device=subject.device,
        cache=subject.scores,
    )


class OtherModel:
    """A language model without a run: its scorer, and a directory whose files have the names of a run's."""

    def __init__(self, scorer: LanguageScorer, path: Path) -> None:
        self.directory = RunDirectory(path)
        self.scorer = dataclasses.replace(scorer, cache=self.directory.scores)
        self.kinds = (RAW,)
        self.step = 0

    @property
    def identity(self) -> str:
        """The digest of the model."""
        return self.scorer.identity

    def evaluate(
        self, evaluations: Sequence[LanguageEvaluation], on_progress: Progress = lambda done, what: None
    ) -> list[Record]:
        """Return a record of each evaluation, and keep them; `on_progress` as in `TrainedRun.evaluate`."""
        items = functools.partial(self.directory.item_scores_of, self.step, RAW)
        return evaluate_each(
            evaluations,
            lambda evaluation, show: evaluation.measure(self.scorer, items, show),
            on_progress,
            step=self.step,
            weights=RAW,
            keep=functools.partial(keep_records, self.directory.evaluations_file),
        )
