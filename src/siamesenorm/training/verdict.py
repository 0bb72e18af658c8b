"""The verdict on a run: stable, spiked, diverged or not learned, a pure function of its record and of thresholds.

The loss is smoothed by a trailing running median: one bad batch of any height leaves it where it was. Its window grows
with the run, so that the downward bias of its minimum stays far below the rise that counts. Spikes are residuals from a
median of the steps before *and* after, so that the first steps after the warm-up count as much as the last; the
verdict is therefore made of the whole record, and only `should_stop` works step by step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from siamesenorm.errors import UserError
from siamesenorm.training import robust_statistics
from siamesenorm.training.loss_curve import LossCurve, loss_curve

DETECTOR = 3
"""Version of the rules; raised with every change that may give a record another verdict."""

Label = Literal["stable", "spiked", "diverged", "not learned"]


class Reason(StrEnum):
    """Why a run is not stable, in order of precedence."""

    NOT_FINITE = "not finite"
    ROSE_AND_STAYED = "rose and stayed"
    ROSE_AT_THE_END = "rose at the end"
    NOT_LEARNED = "not learned"
    SPIKES = "spikes"
    OFTEN_HIGH = "often high"

    @property
    def label(self) -> Label:
        """The label of a run with this reason and none before it."""
        if self is Reason.NOT_LEARNED:
            return "not learned"
        return "spiked" if self in (Reason.SPIKES, Reason.OFTEN_HIGH) else "diverged"


class Unchecked(StrEnum):
    """Why one of the rules could not be applied."""

    NO_FLOOR = "no floor"
    NOT_ENDED = "not ended"
    TOO_SHORT_FOR_TRENDS = "too short for trends"
    TOO_SHORT_FOR_SPIKES = "too short for spikes"


_UNCHECKED_SENTENCES = {
    Unchecked.NO_FLOOR: "whether it learned (no floor)",
    Unchecked.TOO_SHORT_FOR_TRENDS: "rises and falls (too few steps)",
    Unchecked.TOO_SHORT_FOR_SPIKES: "spikes (too few steps)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The numbers in the definitions of the four labels; losses in units of the task's scale (1 nat for language)."""

    rise: float = 0.5
    """Diverged: rise of the smoothed loss above its best so far."""
    rise_fraction: float = 0.05
    """Diverged: part of the run for which it stays there."""
    floor_margin: float = 0.2
    """Learned: distance of the final loss, training or held-out, below the floor."""
    fall: float = 0.02
    """Still learning: fall of the loss from the third quarter of the run to the last one."""
    patience_fraction: float = 0.1
    """Part of the run after which an uninterrupted rise may end it early."""
    nonfinite_patience: int = 20
    """Losses in a row that are not finite, after which a run may be ended early."""
    smoothing_fraction: float = 0.05
    """Window of the smoothed loss, as a part of the run."""
    smoothing_least: int = 11
    """Smallest window of the smoothed loss, in steps (but never more than a quarter of the run)."""
    smoothing_most: int = 501
    """Largest window of the smoothed loss, in steps."""
    spike_sigmas: float = 6.0
    """Spike: robust standard deviations above the running median."""
    spike_rise: float = 0.1
    """Spike: rise above the running median."""
    spike_steps: int = 2
    """Spike: steps in a row."""
    spike_window: int = 51
    """Steps of the running median around a step, and of the running quartile before it."""
    spike_history: int = 16
    """Steps before the first one that can be a spike."""
    high_rise: float = 0.5
    """Often high: rise of a step above the running lower quartile."""
    high_spreads: float = 8.0
    """Often high: the same rise, in distances of the lower quartile from the lower eighth."""
    high_fraction: float = 0.05
    """Often high: part of the steps so far above."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0 and field.name != "floor_margin":
                raise UserError(f"the threshold {field.name} is {value}: it must be above 0")
        if self.patience_fraction < self.rise_fraction:
            raise UserError(
                f"the threshold patience_fraction is {self.patience_fraction}: below rise_fraction "
                f"({self.rise_fraction}) an early end would decide the verdict"
            )

    def smoothing_window(self, steps_total: int) -> int:
        """Return the odd number of steps in the smoothing window of a run of this length."""
        window = max(self.smoothing_least, round(self.smoothing_fraction * steps_total))
        window = min(window, self.smoothing_most, max(1, steps_total // 4))
        return window - 1 + window % 2

    def steps(self, fraction: float, steps_total: int) -> int:
        """Return a fraction of the run as a whole number of steps, at least one."""
        return max(1, math.ceil(fraction * steps_total - 1e-9))


DEFAULT_THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The label of a run, and the evidence for it.

    `reasons` has all that hold, in order of precedence: the first gives the label, none means *stable*. `unchecked` has
    the rules that could not be applied. `divergence_step` is where the rise began, or the first loss that is not
    finite. `spikes` has the first step of each; `gradient_spikes` counts those of the gradient norm, which decide
    nothing. `skipped` has the steps whose update was left out. `high_part` is the part of the steps far above the
    running lower quartile, None where none was compared.
    `best` (None before the first whole window) and `final` are smoothed training losses, `held_out` the last held-out
    loss. `steps` of `steps_total` are in the record. `detector` is the version of the rules.
    """

    label: Label
    reasons: tuple[Reason, ...]
    unchecked: tuple[Unchecked, ...]
    divergence_step: int | None
    spikes: tuple[int, ...]
    gradient_spikes: int
    high_part: float | None
    best: float | None
    best_step: int | None
    final: float
    held_out: float | None
    floor: float | None
    scale: float
    steps: int
    steps_total: int
    warmup_steps: int
    thresholds: Thresholds
    detector: int = DETECTOR
    skipped: tuple[int, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return Unchecked.NOT_ENDED not in self.unchecked

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as values that `encode_json` writes, NaN included."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """Return the verdict that `to_json` gave; raises UserError for anything else."""
        try:
            parts = {
                "reasons": tuple(map(Reason, values["reasons"])),
                "unchecked": tuple(map(Unchecked, values["unchecked"])),
                "spikes": tuple(values["spikes"]),
                "skipped": tuple(values.get("skipped", ())),
                "thresholds": Thresholds(**values["thresholds"]),
            }
            return cls(**{**values, **parts})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"this is not a verdict ({error}): judge the run again") from error

    def sentence(self) -> str:
        """Return the verdict in one line, with the numbers it rests on and what could not be checked."""
        left = [_UNCHECKED_SENTENCES[each] for each in self.unchecked if each in _UNCHECKED_SENTENCES]
        text = self._evidence() + (f"; updates skipped: {len(self.skipped)}" if self.skipped else "")
        text += f"; not checked: {', '.join(left)}" if left and self.label != "diverged" else ""
        return text if self.ended else f"{text} (after {self.steps} of {self.steps_total} steps)"

    def _evidence(self) -> str:
        reason = self.reasons[0] if self.reasons else None
        final = f"{self.final:#.4g}"
        losses = f"final loss {final}" if self.best is None else f"best loss {self.best:#.4g}, final {final}"
        match reason:
            case None:
                return f"stable: {losses}"
            case Reason.NOT_FINITE:
                return f"diverged: the loss is not finite at step {self.divergence_step}"
            case Reason.NOT_LEARNED:
                held_out = "" if self.held_out is None else f", held-out {self.held_out:#.4g}"
                return f"not learned: final loss {final}{held_out}, floor {self.floor:#.4g}"
            case Reason.SPIKES:
                steps = ", ".join(map(str, self.spikes[:5])) + (", ..." if len(self.spikes) > 5 else "")
                return f"spiked {len(self.spikes)}x, at step {steps}: {losses}"
            case Reason.OFTEN_HIGH:
                return f"spiked: {100 * (self.high_part or 0):.0f} % of the steps are far above the others, {losses}"
        return f"diverged, {reason}: from step {self.divergence_step}, {losses}"


class StabilityMonitor:
    """The verdict on a run while it happens: `observe` every step, read `should_stop`, and take the `verdict`.

    To resume, observe the record again. `scale` is the unit of the thresholds, `floor` the loss of a model that has
    learned nothing (without it no run is *not learned*). `steps_up` is for how long the smoothed loss has been up.
    """

    def __init__(
        self,
        *,
        steps_total: int,
        warmup_steps: int = 0,
        floor: float | None = None,
        scale: float = 1.0,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
    ) -> None:
        """Start before the first step."""
        if steps_total < 1:
            raise UserError(f"steps_total is {steps_total}: a run has at least one step")
        self._steps_total, self._warmup_steps = steps_total, warmup_steps
        self._floor, self._scale, self._thresholds = floor, scale, thresholds
        self._persistence = thresholds.steps(thresholds.rise_fraction, steps_total)
        self._patience = thresholds.steps(thresholds.patience_fraction, steps_total)
        self._recent = robust_statistics.RunningMedian(thresholds.smoothing_window(steps_total))
        self._losses: list[float] = []
        self._skipped: list[int] = []
        self._gradient_norms: list[float] = []
        self._held_out: float | None = None
        self._best, self._best_step, self._final = math.inf, 0, math.nan
        self.steps_up = self._steps_nonfinite = 0
        self.rise_step: int | None = None

    def observe(self, loss: float, gradient_norm: float | None = None, *, skipped: bool = False) -> None:
        """Add the training loss and the gradient norm of the next step, and whether its update was left out."""
        self._losses.append(loss)
        if gradient_norm is not None:
            self._gradient_norms.append(gradient_norm)
        step = len(self._losses)
        if skipped:
            self._skipped.append(step)
        if math.isfinite(loss):
            self._recent.push(loss)
            self._final = self._recent.median
            if self._recent.is_full and self._final < self._best:
                self._best, self._best_step = self._final, step
            up = self._final > self._best + self._thresholds.rise * self._scale
            self.steps_up = self.steps_up + 1 if up else 0
            self._steps_nonfinite = 0
        else:
            self._final = loss
            self._steps_nonfinite += 1
            self.steps_up += not skipped
        if self.steps_up >= self._persistence and self.rise_step is None and not self._is_short:
            self.rise_step = step - self.steps_up + 1

    def observe_validation(self, loss: float) -> None:
        """Add a held-out loss: the last one counts."""
        self._held_out = loss

    @property
    def should_stop(self) -> bool:
        """Whether the run has been lost for longer than the patience: ending it now cannot change its verdict."""
        lost = self.steps_up >= self._patience and bool(self._steps_nonfinite or not self._is_short)
        return lost or self._steps_nonfinite >= self._thresholds.nonfinite_patience

    def verdict(self) -> Verdict:
        """Return the verdict on the steps so far; raises UserError before the first."""
        if not self._losses:
            raise UserError("there are no losses to judge: expected at least one step")
        thresholds, scale = self._thresholds, self._scale
        divergence, divergence_step = self._divergence()
        excursions = partial(
            robust_statistics.excursions, window=thresholds.spike_window, history=thresholds.spike_history,
            sigmas=thresholds.spike_sigmas, after=self._warmup_steps,
        )  # fmt: skip
        spikes = excursions(self._losses, rise=thresholds.spike_rise * scale, shortest=thresholds.spike_steps)
        # Clipped norms are nearly constant: by a tenth at least.
        logarithms = [math.log(max(each, 1e-12)) if math.isfinite(each) else math.nan for each in self._gradient_norms]
        norm_spikes = excursions(logarithms, rise=math.log(1.1), shortest=1)
        high_part = robust_statistics.part_far_above(
            self._losses, window=thresholds.spike_window, history=thresholds.spike_history,
            rise=thresholds.high_rise * scale, spreads=thresholds.high_spreads, after=self._warmup_steps,
        )  # fmt: skip
        found = {
            divergence: divergence is not None,
            Reason.NOT_LEARNED: divergence is None and self._has_not_learned(),
            Reason.SPIKES: bool(spikes),
            Reason.OFTEN_HIGH: high_part > thresholds.high_fraction,
        }
        reasons = tuple(reason for reason, holds in found.items() if reason is not None and holds)
        return Verdict(
            label=reasons[0].label if reasons else "stable",
            reasons=reasons,
            unchecked=self._unchecked(),
            divergence_step=divergence_step,
            spikes=spikes,
            gradient_spikes=len(norm_spikes),
            high_part=None if math.isnan(high_part) else high_part,
            best=self._best if self._best_step else None,
            best_step=self._best_step or None,
            final=self._final,
            held_out=self._held_out,
            floor=self._floor,
            scale=scale,
            steps=len(self._losses),
            steps_total=self._steps_total,
            warmup_steps=self._warmup_steps,
            thresholds=thresholds,
            skipped=tuple(self._skipped),
        )

    @property
    def _ended(self) -> bool:
        return len(self._losses) >= self._steps_total

    @property
    def _is_short(self) -> bool:
        """Whether two windows of the smoothed loss do not fit into the steps so far."""
        least = self._thresholds.smoothing_least
        return len(self._losses) < 2 * max(least, self._thresholds.smoothing_window(self._steps_total))

    def _divergence(self) -> tuple[Reason | None, int | None]:
        for step, loss in enumerate(self._losses, start=1):
            if not math.isfinite(loss) and not (step in self._skipped and any(map(math.isfinite, self._losses[step:]))):
                return Reason.NOT_FINITE, step
        if self.rise_step is not None:
            return Reason.ROSE_AND_STAYED, self.rise_step
        if self._ended and self.steps_up and not self._is_short:
            return Reason.ROSE_AT_THE_END, len(self._losses) - self.steps_up + 1
        return None, None

    def _has_not_learned(self) -> bool:
        if self._floor is None or self._is_short or not self._ended:
            return False
        line = self._floor - self._thresholds.floor_margin * self._scale
        learned = self._final < line or (self._held_out is not None and self._held_out < line)
        return not learned and not robust_statistics.still_falls(self._losses, fall=self._thresholds.fall * self._scale)

    def _unchecked(self) -> tuple[Unchecked, ...]:
        first_spike = max(self._thresholds.spike_history, self._warmup_steps) + self._thresholds.spike_steps
        found = {
            Unchecked.NO_FLOOR: self._floor is None,
            Unchecked.NOT_ENDED: not self._ended,
            Unchecked.TOO_SHORT_FOR_TRENDS: self._is_short,
            Unchecked.TOO_SHORT_FOR_SPIKES: len(self._losses) < first_spike,
        }
        return tuple(each for each, holds in found.items() if holds)


def judge(record: LossCurve | Iterable[Mapping[str, Any]], thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Verdict:
    """Return the verdict on a run, given its record (the lines of its `metrics.jsonl`) or any loss curve.

    * *diverged*: a loss is not finite (of a skipped step: and none after it); or the smoothed loss stays above its best
      so far + 0.5 for 5 % of the run, or to its end.
    * *not learned*: the final loss, training and held-out, is not below the floor - 0.2, and no longer falls.
    * *spiked*: after the warm-up, for at least two steps in a row, the loss is six robust standard deviations and 0.1
      above its running median; or more than 5 % of the steps are 0.5 above the running lower quartile.
    * *stable*: none of these, as far as they could be checked.

    The first that holds is the label. Numbers are thresholds, in units of the task's scale. A curve that was logged
    every n steps is judged by its points. Raises UserError where there are no losses.
    """
    curve = record if isinstance(record, LossCurve) else loss_curve(record)
    points = len(curve.losses)
    monitor = StabilityMonitor(
        steps_total=max(1, points + curve.missing_points),
        warmup_steps=curve.warmup_points,
        floor=curve.floor,
        scale=curve.scale,
        thresholds=thresholds,
    )
    norms, skipped = curve.gradient_norms or (None,) * points, curve.skipped or (False,) * points
    for loss, gradient_norm, left_out in zip(curve.losses, norms, skipped, strict=True):
        monitor.observe(loss, gradient_norm, skipped=left_out)
    if curve.held_out is not None:
        monitor.observe_validation(curve.held_out)
    verdict = monitor.verdict()
    # Points of the curve as steps of the run.
    step_of: dict[int | None, int | None] = {None: None}
    step_of.update(enumerate(curve.steps, start=1))
    return dataclasses.replace(
        verdict,
        divergence_step=step_of[verdict.divergence_step],
        spikes=tuple(curve.steps[point - 1] for point in verdict.spikes),
        skipped=tuple(curve.steps[point - 1] for point in verdict.skipped),
        best_step=step_of[verdict.best_step],
        steps=curve.steps[-1],
        steps_total=max(curve.steps[-1], curve.steps_total or 0),
        warmup_steps=curve.warmup_steps,
    )
