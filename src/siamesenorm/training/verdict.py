"""The three words for a run, the numbers that define them, and the verdict that records both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from siamesenorm.errors import UserError

Word = Literal["stable", "spiked", "diverged"]
Reason = Literal["not finite", "rose and stayed", "rose at the end", "not learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What the three words mean, in numbers; stored with every verdict. Losses in nats, fractions of the run's steps.

    * `rise`, `rise_fraction`: diverged is the smoothed loss this far above its best so far for this part of the run.
    * `entropy_margin`: learned is a final smoothed loss below the unigram entropy minus this. Not a hair below: on text
      of several kinds, a model that has learned nothing but which kind it reads settles below the entropy of the whole
      (measured: HybridNorm at 3e-2 on the built-in corpus, flat for 280 of 300 steps, 0.07 nats below it).
    * `patience_fraction`, `nonfinite_patience`: a run may be ended early after this part of it risen without a break,
      or after so many losses in a row that are not finite.
    * `smoothing_fraction`, `smoothing_least`, `smoothing_most`: the window of the smoothed loss, and its limits in
      steps (never more than a quarter of the run).
    * `spike_sigmas`, `spike_rise`, `spike_steps`: a spike is a log loss this many robust standard deviations above its
      running median, and a loss this many nats above it, for at least so many steps.
    * `spike_window`, `spike_history`: the steps of that running median, and the steps before it is trusted.
    """

    rise: float = 0.5
    rise_fraction: float = 0.05
    entropy_margin: float = 0.2
    patience_fraction: float = 0.1
    nonfinite_patience: int = 20
    smoothing_fraction: float = 0.05
    smoothing_least: int = 11
    smoothing_most: int = 501
    spike_sigmas: float = 6.0
    spike_rise: float = 0.1
    spike_steps: int = 2
    spike_window: int = 51
    spike_history: int = 16

    def __post_init__(self) -> None:
        """Refuse thresholds with which the words would lose their meaning."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0 and field.name != "entropy_margin":
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
    """The word on a run, and the evidence.

    `reason` is set for diverged runs only. `divergence_step` is where the rise began or the first loss that is not
    finite stood; a run that did not learn has none. `spikes` has the first step of each; `gradient_spikes` counts those
    of the gradient norm, which decide nothing. `best` and `final` are smoothed losses (nats); `best` is None before the
    first whole window of finite losses. `steps` were seen of `steps_total`: unless `ended`, the rules about the end of
    a run wait.
    """

    word: Word
    reason: Reason | None
    divergence_step: int | None
    spikes: tuple[int, ...]
    gradient_spikes: int
    best: float | None
    best_step: int | None
    final: float
    steps: int
    steps_total: int
    ended: bool
    warmup_steps: int
    unigram_entropy: float | None
    thresholds: Thresholds

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain values; `encode_json` writes them, NaN included."""
        return dataclasses.asdict(self) | {"spikes": list(self.spikes)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """Return the verdict that `to_json` gave; raises `UserError` when these are not its fields."""
        try:
            thresholds = Thresholds(**values["thresholds"])
            return cls(**{**values, "thresholds": thresholds, "spikes": tuple(values["spikes"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"this is not a verdict ({error}): judge the run again") from error

    def sentence(self) -> str:
        """Return the verdict in one line, with the numbers it rests on."""
        text = self._evidence()
        return text if self.ended else f"{text} (after {self.steps} of {self.steps_total} steps)"

    def _evidence(self) -> str:
        if self.reason == "not finite":
            return f"diverged: the loss is not finite at step {self.divergence_step}"
        if self.reason == "not learned":
            return f"diverged, not learned: final loss {self.final:.3f}, unigram entropy {self.unigram_entropy:.3f}"
        final = f"{self.final:.3f}"
        losses = f"final loss {final}" if self.best is None else f"best loss {self.best:.3f}, final {final}"
        if self.reason is not None:
            return f"diverged, {self.reason}: from step {self.divergence_step}, {losses}"
        if self.spikes:
            steps = ", ".join(map(str, self.spikes[:5])) + (", ..." if len(self.spikes) > 5 else "")
            return f"spiked {len(self.spikes)}x, at step {steps}: {losses}"
        return f"stable: {losses}"
