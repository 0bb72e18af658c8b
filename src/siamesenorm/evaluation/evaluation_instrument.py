"""Multiple-choice tasks inside training: `siamesenorm train ... --evaluation.every 500 --evaluation.tasks DIR`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation import AVERAGE, RAW, Subject, make_record
from siamesenorm.evaluation.multiple_choice import MultipleChoice, TaskSelection
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import RunConfig
from siamesenorm.training.execution import autocast
from siamesenorm.training.loop import Instrument, TrainingLoop


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(TaskSelection):
    """Which tasks to score during training; no part of the identity, for the run is the same without it.

    Scoring reads the weights alone: no random numbers, no gradients, and compiled blocks run eagerly meanwhile.
    """

    every: int = 0
    """Score the tasks every so many steps and at the last; 0 for never."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError(f"evaluation.every is {self.every}: give 0 for never, or a number of steps")
        if not self.every and (self.tasks or self.task_names):
            raise UserError("evaluation.tasks without an interval: add --evaluation.every")

    def instruments(self, config: RunConfig) -> tuple[Instrument, ...]:
        """Return the instruments that score the tasks; raises UserError for tasks or a run that cannot be scored."""
        if not self.every:
            return ()
        if not isinstance(config.task, LanguageTaskConfig):
            raise UserError(f"evaluation.every scores texts: leave it out of a run of the task {config.task.tag}")
        return (EvaluationInstrument(self.read(), self.every),)


class EvaluationInstrument(Instrument):
    """Writes lines of kind "evaluation" into the record of a run, with the fields of `evaluations.jsonl`.

    They are written before the checkpoint of their step, and cut back with the record, so that a resumed run has the
    lines of one never interrupted.
    """

    reads_parameters = True

    def __init__(self, evaluation: MultipleChoice, every: int) -> None:
        self.evaluation, self.every = evaluation, every

    def on_step(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        """Record the results at this step, if it is one of those; with averaged weights, too, where there are some."""
        step = record["step"]
        if step % self.every and step != loop.config.steps:
            return
        loop.record(self._record(loop, step, RAW))
        if loop.average is not None:
            with loop.average.applied():
                loop.record(self._record(loop, step, AVERAGE))

    def _record(self, loop: TrainingLoop, step: int, weights: str) -> dict[str, Any]:
        subject = Subject(config=loop.config, task=loop.task, model=loop.model, device=loop.device)
        loop.model.eval()
        # A second shape would compile a block anew, for shapes that vary, and training would go on with that one.
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            autocast(loop.config.precision, loop.device),
        ):
            results = self.evaluation.run(subject)
        loop.model.train()
        return make_record(self.evaluation, results, step=step, weights=weights)
