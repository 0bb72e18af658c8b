"""The verdict on a run: stable, spiked or diverged, a pure function of its losses and of thresholds.

One algorithm serves both uses: `Watch` takes one step at a time, and `judge` feeds it a whole curve. The loss is
smoothed by a trailing running median over 5 % of the run (11 to 501 steps). A median, not an EMA, because the
question is where the bulk of recent batches lies: one bad batch of any height leaves it where it was, and it moves only
when more than half of a window has moved. The best is taken of whole windows only: the median of the first few losses
smooths nothing. The window grows with the run so that the noise left in it, and with it the
downward bias of its minimum, stays far below the 0.5 nats that count as a rise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from siamesenorm.errors import UserError
from siamesenorm.training.curves import LossCurve
from siamesenorm.training.running_median import Excursions, RunningMedian
from siamesenorm.training.verdict import DEFAULT_THRESHOLDS, Reason, Thresholds, Verdict, Word


class StabilityMonitor:
    """The verdict on a run while it happens: feed it every step, ask it when to give up.

    It costs a few insertions into short sorted lists a step. To resume, feed it the steps of the record again.
    """

    def __init__(
        self,
        *,
        steps_total: int,
        warmup_steps: int = 0,
        unigram_entropy: float | None = None,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
    ) -> None:
        """Start before the first step; without the unigram entropy (nats) nothing is called *not learned*."""
        if steps_total < 1:
            raise UserError(f"steps_total is {steps_total}: a run has at least one step")
        self._steps_total, self._warmup_steps = steps_total, warmup_steps
        self._unigram_entropy, self._thresholds = unigram_entropy, thresholds
        self._persistence = thresholds.steps(thresholds.rise_fraction, steps_total)
        self._patience = thresholds.steps(thresholds.patience_fraction, steps_total)
        self._recent = RunningMedian(thresholds.smoothing_window(steps_total))
        self._spikes = self._excursions(shortest=thresholds.spike_steps, floor=_nats_above(thresholds.spike_rise))
        self._gradient_spikes = self._excursions(shortest=1, floor=_a_tenth)
        self._step = 0
        self._best, self._best_step = math.inf, 0
        self._final = math.nan
        self._steps_up = self._steps_nonfinite = 0
        self._first_nonfinite: int | None = None
        self._rise_step: int | None = None

    def _excursions(self, *, shortest: int, floor: Callable[[float], float]) -> Excursions:
        return Excursions(
            window=self._thresholds.spike_window,
            history=self._thresholds.spike_history,
            sigmas=self._thresholds.spike_sigmas,
            shortest=shortest,
            least_rise=floor,
        )

    def observe(self, loss: float, gradient_norm: float | None = None) -> None:
        """Take in the next step's training loss (nats) and gradient norm; raises `UserError` on a negative loss."""
        if loss < 0 and math.isfinite(loss):
            raise UserError(
                f"loss {loss} at step {self._step + 1} is negative: the verdict needs a loss such as cross-entropy"
            )
        self._step += 1
        watched = self._step > self._warmup_steps
        self._spikes.observe(self._step, loss, watched=watched)
        if gradient_norm is not None:
            self._gradient_spikes.observe(self._step, gradient_norm, watched=watched)
        if math.isfinite(loss):
            self._recent.push(loss)
            self._final = self._recent.median
            if self._recent.is_full and self._final < self._best:
                self._best, self._best_step = self._final, self._step
            up = self._final > self._best + self._thresholds.rise
            self._steps_nonfinite = 0
        else:
            self._final, up = loss, True
            self._steps_nonfinite += 1
            self._first_nonfinite = self._first_nonfinite or self._step
        self._steps_up = self._steps_up + 1 if up else 0
        if self._steps_up >= self._persistence and self._rise_step is None:
            self._rise_step = self._step - self._steps_up + 1

    @property
    def should_stop(self) -> bool:
        """Whether the run has been lost for longer than the patience: ending it now cannot change its verdict."""
        return self._steps_up >= self._patience or self._steps_nonfinite >= self._thresholds.nonfinite_patience

    def verdict(self) -> Verdict:
        """Return the verdict on the steps so far; raises `UserError` before the first."""
        if not self._step:
            raise UserError("there are no losses to judge: expected at least one step")
        reason, divergence_step = self._divergence()
        word: Word = "diverged" if reason else "spiked" if self._spikes.starts else "stable"
        return Verdict(
            word=word,
            reason=reason,
            divergence_step=divergence_step,
            spikes=tuple(self._spikes.starts),
            gradient_spikes=len(self._gradient_spikes.starts),
            best=self._best if self._best_step else None,
            best_step=self._best_step or None,
            final=self._final,
            steps=self._step,
            steps_total=self._steps_total,
            ended=self._ended,
            warmup_steps=self._warmup_steps,
            unigram_entropy=self._unigram_entropy,
            thresholds=self._thresholds,
        )

    @property
    def _ended(self) -> bool:
        return self._step >= self._steps_total

    def _divergence(self) -> tuple[Reason | None, int | None]:
        if self._first_nonfinite is not None:
            return "not finite", self._first_nonfinite
        if self._rise_step is not None:
            return "rose and stayed", self._rise_step
        if self._ended and self._steps_up:
            return "rose at the end", self._step - self._steps_up + 1
        if self._ended and self._unigram_entropy is not None:
            learned = self._final < self._unigram_entropy - self._thresholds.entropy_margin
            return (None, None) if learned else ("not learned", None)
        return None, None


def _nats_above(nats: float) -> Callable[[float], float]:
    """Return the floor, in log units, that asks a loss to be so many nats above the median."""
    return lambda median: math.log1p(nats / median)


def _a_tenth(median: float) -> float:
    """Return a floor of 10 %: clipped gradient norms are nearly constant, and six times nothing is nothing."""
    return math.log1p(0.1)


def judge(
    losses: Sequence[float],
    *,
    steps_total: int | None = None,
    warmup_steps: int = 0,
    gradient_norms: Sequence[float | None] | None = None,
    unigram_entropy: float | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Verdict:
    """Return the verdict on the training losses (nats) of steps 1, 2, 3, ...

    Diverged, in this order: a loss is not finite; the smoothed loss stayed more than 0.5 nats above its best so far for
    5 % of the run, or to its end; the run ended not below the unigram entropy of its data minus 0.2 (unless that is
    unknown). Spiked: after the warm-up, for at least two steps in a row, the log loss was more than six robust standard
    deviations above its running median, and the loss itself more than 0.1 nats above that median. Else stable.

    A record shorter than `steps_total` has not ended, and the rules about the end wait. Raises `UserError` on no losses
    and on negative ones.
    """
    curve = LossCurve(
        steps=tuple(range(1, len(losses) + 1)),
        losses=tuple(losses),
        gradient_norms=None if gradient_norms is None else tuple(gradient_norms),
        steps_total=steps_total,
        warmup_steps=warmup_steps,
        unigram_entropy=unigram_entropy,
    )
    return judge_curve(curve, thresholds)


def judge_curve(curve: LossCurve, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Verdict:
    """Return the verdict on a curve; one that was logged every n steps is judged by its points, and told in steps."""
    if not curve.losses:
        raise UserError("there are no losses to judge: expected at least one step")
    points = len(curve.losses)
    watch = StabilityMonitor(
        steps_total=points + curve.missing_points,
        warmup_steps=curve.warmup_points,
        unigram_entropy=curve.unigram_entropy,
        thresholds=thresholds,
    )
    for loss, gradient_norm in zip(curve.losses, curve.gradient_norms or (None,) * points, strict=True):
        watch.observe(loss, gradient_norm)
    return _in_steps(watch.verdict(), curve)


def _in_steps(verdict: Verdict, curve: LossCurve) -> Verdict:
    """Return the verdict on a curve's points with its places named by their steps."""

    def step(point: int | None) -> int | None:
        return None if point is None else curve.steps[point - 1]

    return dataclasses.replace(
        verdict,
        divergence_step=step(verdict.divergence_step),
        spikes=tuple(curve.steps[point - 1] for point in verdict.spikes),
        best_step=step(verdict.best_step),
        steps=curve.steps[-1],
        steps_total=max(curve.steps[-1], curve.steps_total or 0),
        warmup_steps=curve.warmup_steps,
    )


def learning_rate_sensitivity(losses_by_rate: Mapping[float, float], *, cap: float) -> float:
    """Return the mean excess loss (nats) over a grid of learning rates: 0 when the rate does not matter.

    With final losses l(rate) over a log-uniform grid: mean of min(l, cap), minus min of l, as Wortsman et al. (arXiv
    2309.14322). Their cap is the loss at initialisation; the unigram entropy serves as well. A diverged run enters
    with its final loss, at most the cap; a loss that is not finite enters as the cap. NaN when no rate trained below
    the cap, for a method that fails everywhere is not insensitive. Raises `ValueError` without losses.
    """
    if not losses_by_rate:
        raise ValueError("losses_by_rate is empty: expected the final loss of at least one learning rate")
    capped = [min(loss, cap) if math.isfinite(loss) else cap for loss in losses_by_rate.values()]
    best = min(capped)
    return sum(capped) / len(capped) - best if best < cap else math.nan
