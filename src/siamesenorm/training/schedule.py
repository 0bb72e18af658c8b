"""The learning rate as a pure function of the step: warm-up, then a shape, to a fraction of the peak.

Updates are counted from 1, as in `metrics.jsonl`: update `warmup_steps` is the first at the peak, update `total_steps`
the last, at `final_fraction` (all shapes but "constant").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from siamesenorm.errors import UserError, unknown

Shape = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    r"""The factor on the peak learning rate at every step.

    With warm-up \(w\), total \(T\), final fraction \(f\) and progress \(p = (t - w) / (T - w)\):

    * warm-up: \(t / w\) for \(t < w\);
    * cosine: \(f + (1 - f)(1 + \cos \pi p) / 2\), as OLMo (arXiv 2402.00838);
    * linear: \(1 - (1 - f) p\);
    * wsd: 1, then linear to \(f\) over the last `decay_fraction` of \(T\) (arXiv 2404.06395, 2405.18392);
    * constant: 1.

    Raises `UserError` on values that make no schedule.
    """

    total_steps: int
    warmup_steps: int = 0
    shape: Shape = "cosine"
    final_fraction: float = 0.1
    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        """Refuse values that make no schedule."""
        if self.shape not in get_args(Shape):
            raise unknown("schedule", self.shape, get_args(Shape))
        if self.total_steps < 1:
            raise UserError(f"total_steps is {self.total_steps}: a schedule needs at least one step")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise UserError(
                f"warmup_steps is {self.warmup_steps}: it must be at least 0 and less than the {self.total_steps} steps"
            )
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"final_fraction is {self.final_fraction}: it must be between 0 and 1")
        most = 1 - self.warmup_steps / self.total_steps
        if self.shape == "wsd" and not 0 < self.decay_fraction <= most + 1e-9:
            raise UserError(
                f"decay_fraction is {self.decay_fraction}: with {self.warmup_steps} of {self.total_steps} steps of "
                f"warm-up it must be above 0 and at most {most:g}"
            )

    def factor(self, step: int) -> float:
        """Return the factor at update `step`, counted from 1; past the end the last value holds.

        Step 0 is where the warm-up starts: 0, or without warm-up the peak. Raises `ValueError` below that.
        """
        if step < 0:
            raise ValueError(f"step is {step}: steps are counted from 1")
        if step < self.warmup_steps:
            return step / self.warmup_steps
        step = min(step, self.total_steps)
        if self.shape == "constant":
            return 1.0
        start = float(self.warmup_steps)
        if self.shape == "wsd":
            start = self.total_steps * (1 - self.decay_fraction)
        progress = max(0.0, (step - start) / (self.total_steps - start))
        remaining = (1 + math.cos(math.pi * progress)) / 2 if self.shape == "cosine" else 1 - progress
        return self.final_fraction + (1 - self.final_fraction) * remaining
