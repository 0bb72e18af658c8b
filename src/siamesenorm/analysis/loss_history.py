"""The loss of a run as it comes in, and the verdict on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from siamesenorm.errors import UserError
from siamesenorm.training.curves import LossCurve
from siamesenorm.training.stability import StabilityMonitor, judge_curve
from siamesenorm.training.verdict import Thresholds, Verdict


class LossHistory:
    """Losses (nats) by step; the facts about the run may become known later."""

    def __init__(
        self,
        *,
        steps_total: int | None,
        warmup_steps: int | None,
        unigram_entropy: float | None,
        thresholds: Thresholds,
    ) -> None:
        self.steps_total, self.warmup_steps, self.unigram_entropy = steps_total, warmup_steps, unigram_entropy
        self.thresholds = thresholds
        self._points: list[tuple[int, float, float | None]] = []
        self._watch: StabilityMonitor | None = None
        self._watched = 0

    def expect(self, *, steps_total: int | None, warmup_steps: int | None, unigram_entropy: float | None) -> None:
        """Learn what is not known yet."""
        self.steps_total = steps_total if self.steps_total is None else self.steps_total
        self.warmup_steps = warmup_steps if self.warmup_steps is None else self.warmup_steps
        self.unigram_entropy = unigram_entropy if self.unigram_entropy is None else self.unigram_entropy

    @property
    def last_step(self) -> int | None:
        """The last step with a loss."""
        return self._points[-1][0] if self._points else None

    def add(self, step: int, loss: float, gradient_norm: float | None) -> None:
        """Take in the loss of a later step."""
        self._points.append((step, loss, gradient_norm))

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take in the record of an earlier process."""
        for line in lines:
            if line.get("kind") == "train":
                self.add(line["step"], line["loss"], line.get("gradient_norm"))
            elif line.get("kind") == "model":
                self.expect(
                    steps_total=line.get("steps"),
                    warmup_steps=line.get("warmup_steps"),
                    unigram_entropy=line.get("unigram_entropy"),
                )

    def cut_back(self, after: int) -> None:
        """Forget what came after a step."""
        self._points = [point for point in self._points if point[0] <= after]
        self._watch, self._watched = None, 0

    def facts(self) -> Mapping[str, Any]:
        """Return what is known about the run, under the names of a record's first line."""
        return {
            "steps": self.steps_total,
            "warmup_steps": self.warmup_steps,
            "unigram_entropy": self.unigram_entropy,
        }

    def verdict(self) -> Verdict:
        """Return the verdict on the losses so far; raises UserError without losses, and on negative ones."""
        return judge_curve(self._curve(), self.thresholds)

    def should_stop(self) -> bool:
        """Whether the run has been lost for longer than the patience.

        Raises UserError while the length of the run is not known: what counts as lost for long depends on it.
        """
        if self.steps_total is None:
            raise UserError("should_stop needs the length of the run: give the monitor its steps_total")
        if len(self._points) < 2:
            return False
        if self._watch is None:
            # Losses may be logged every n steps: the watch counts points.
            points = len(self._points) + self._curve().missing_points
            self._watch = StabilityMonitor(steps_total=points, thresholds=self.thresholds)
        for _, loss, _ in self._points[self._watched :]:
            self._watch.observe(loss)
        self._watched = len(self._points)
        return self._watch.should_stop

    def _curve(self) -> LossCurve:
        steps, losses, norms = zip(*self._points, strict=True) if self._points else ((), (), ())
        return LossCurve(
            steps=steps,
            losses=losses,
            gradient_norms=norms,
            steps_total=self.steps_total,
            warmup_steps=self.warmup_steps or 0,
            unigram_entropy=self.unigram_entropy,
        )
