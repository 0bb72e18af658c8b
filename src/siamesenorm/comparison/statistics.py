"""Statistics of a comparison: intervals and tests over seeds, noise of a baseline, sensitivity, and cost of a loss.

Student's t over seeds, differences paired by seed and corrected together (Holm); the band in which one more seed of a
baseline falls; the dependence of a loss on the learning rate; the steps and the compute that a loss takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
LEAST_BUDGETS = 3
"""Budgets that a curve of loss over compute needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds with the half width of its t interval, which a single value does not have (None)."""

    mean: float
    half_width: float | None
    count: int

    @property
    def ends(self) -> tuple[float, float] | None:
        """The ends of the interval."""
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The differences `first - second` over the seeds that both have, by seed."""

    by_seed: Mapping[int, float]

    def interval(self, confidence: float = CONFIDENCE) -> Estimate:
        """Return the mean difference with its t interval."""
        return t_interval(list(self.by_seed.values()), confidence)

    @property
    def p_value(self) -> float | None:
        """The two-sided p-value of a mean difference of zero; None for fewer than two seeds, or one not finite."""
        count = len(self.by_seed)
        if count < 2 or not all(map(math.isfinite, self.by_seed.values())):
            return None
        mean, error = _mean_and_standard_error(list(self.by_seed.values()))
        if error == 0.0:
            return 1.0 if mean == 0.0 else 0.0
        return float(2 * stdtr(count - 1, -abs(mean / error)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HolmDecision:
    """The decision of Holm's procedure on one hypothesis, and the confidence of the interval that agrees with it."""

    adjusted_p: float
    confidence: float
    rejected: bool


class Bound(StrEnum):
    """How a speedup is known: from the curve, or, for a loss outside of its losses, from its nearer end."""

    EXACT = "="
    AT_LEAST = "≥"
    AT_MOST = "≤"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Compute that a baseline needs for a loss, over the compute that a method needed for it.

    `ratio` counts the cost of the method's steps, `at_equal_step_cost` does not. `bound` is EXACT only where the loss
    is within the losses of the baseline's curve.
    """

    ratio: float
    at_equal_step_cost: float
    bound: Bound


# --- over seeds


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of the values and the half width `t s / sqrt(n)` of its two-sided t interval."""
    if not values:
        raise ValueError("an interval needs at least one value, got none")
    if len(values) == 1:
        return Estimate(mean=values[0], half_width=None, count=1)
    mean, error = _mean_and_standard_error(values)
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    return Estimate(mean=mean, half_width=quantile * error, count=len(values))


def noise_band(losses: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    r"""Return the ends of the interval in which the loss of one more seed falls; None for fewer than two losses.

    .. math:: \bar l \pm t_{n-1} s \sqrt{1 + 1/n}

    with the mean and the standard deviation s of the n losses: the prediction interval of normal losses. It describes a
    single run, and is wider than the interval of the mean (`t_interval`) by the factor sqrt(n + 1).
    """
    estimate = t_interval(losses, confidence)
    if estimate.half_width is None:
        return None
    half_width = estimate.half_width * math.sqrt(len(losses) + 1)
    return estimate.mean - half_width, estimate.mean + half_width


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> PairedDifference:
    """Return the differences `first - second` over the seeds that both have."""
    return PairedDifference(by_seed={seed: first[seed] - second[seed] for seed in sorted(first) if seed in second})


def holm(p_values: Sequence[float], confidence: float = CONFIDENCE) -> list[HolmDecision]:
    """Return Holm's step-down decisions, in the order given.

    The i-th smallest of m p-values is compared with `alpha / (m - i)`, i = 0, 1, ..., and the first that fails
    ends the rejections. The interval at `1 - alpha / (m - i)`, with i no larger than the first failure,
    excludes zero exactly for the rejected. Raises ValueError for a p-value that is not finite: it has no place in the
    order.
    """
    if not all(map(math.isfinite, p_values)):
        raise ValueError(f"p-values must be finite, got {list(p_values)}")
    alpha, adjusted, tests, rejected = 1.0 - confidence, 0.0, len(p_values), True
    decisions: dict[int, HolmDecision] = {}
    for index in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        left = len(p_values) - len(decisions)
        adjusted = max(adjusted, min(1.0, left * p_values[index]))
        if rejected:
            tests, rejected = left, p_values[index] < alpha / left
        decisions[index] = HolmDecision(adjusted_p=adjusted, confidence=1.0 - alpha / tests, rejected=rejected)
    return [decisions[index] for index in range(len(p_values))]


# --- over learning rates


def rate_sensitivity(losses: Mapping[float, float], *, floor: float | None) -> float | None:
    r"""Return how much the loss depends on the learning rate, averaged over a log-uniform grid of rates.

    .. math:: \frac{1}{n} \sum_{i} \min(l_i, \mathtt{floor}) - \min_i l_i

    (Wortsman et al., 2023, arXiv 2309.14322, whose floor is the loss at initialisation: that depends on the model, the
    loss of one that has learned nothing does not). `losses` are the final losses by rate, infinite or NaN for a rate
    at which the run diverged: it counts at `floor`. None where only one rate was tried, where no loss is below the
    floor (a method that fails everywhere is not insensitive), and where one diverged and the floor is unknown.
    """
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    if len(losses) < 2 or not finite or (floor is None and len(finite) < len(losses)):
        return None
    cap = math.inf if floor is None else floor
    counted = [min(loss, cap) if math.isfinite(loss) else cap for loss in losses.values()]
    return sum(counted) / len(counted) - min(counted) if min(counted) < cap else None


# --- over steps and compute


def time_to_target(losses_by_step: Mapping[int, float], target: float) -> float:
    """Return the first step whose loss is not above a target, infinity where there is none; NaN does not count."""
    return min((step for step, loss in losses_by_step.items() if loss <= target), default=math.inf)


def effective_speedup(
    curve: Mapping[float, float], loss: float, step_cost: float, *, compute: float, irreducible: float = 0.0
) -> Speedup | None:
    r"""Return the compute that a baseline needs for a method's loss, over the compute of the method.

    .. math:: \frac{C(l)}{\mathtt{compute} \cdot \mathtt{step\_cost}}

    C(l) is read from `curve`, the baseline's loss by compute: log C is interpolated linearly over log(l - irreducible)
    between neighbouring budgets, which is exact for the power law `irreducible + A C^-a` (1.6 in a public ladder of
    language models). A budget whose loss is not below that of every smaller one is left out, so that C(l) is monotone.
    A loss outside of the curve is not extrapolated: C at the nearer end is a bound, and `bound` says so.

    Args:
        curve: Loss by compute, in any unit (FLOPs, steps).
        loss: Loss of the method.
        step_cost: Cost of a step of the method over that of the baseline, such as the ratio of their step times.
        compute: Compute, in the unit of the curve, of the baseline's run with as many steps as the method's.
        irreducible: Loss below every other, of which log(l - irreducible) is taken.

    Returns:
        The speedup; None where fewer than three budgets are left.

    Raises:
        ValueError: For costs that are not positive, and losses that are not above `irreducible`.
    """
    if min(step_cost, compute, *curve) <= 0:
        raise ValueError(f"step cost {step_cost}, compute {compute} and budgets {list(curve)} must be positive")
    if not min(loss, *curve.values()) > irreducible:
        raise ValueError(f"losses {loss} and {list(curve.values())} must be above irreducible = {irreducible}")
    points: list[tuple[float, float]] = []
    for budget, reached in sorted(curve.items()):
        height = math.log(reached - irreducible)
        if not points or height < points[-1][1]:
            points.append((math.log(budget), height))
    if len(points) < LEAST_BUDGETS:
        return None
    needed, bound = _log_compute(points, math.log(loss - irreducible))
    gross = math.exp(needed) / compute
    return Speedup(ratio=gross / step_cost, at_equal_step_cost=gross, bound=bound)


def _log_compute(points: Sequence[tuple[float, float]], height: float) -> tuple[float, Bound]:
    """Return the log compute at a height of a falling curve, at the nearer end for a height outside of it."""
    (first, highest), (last, lowest) = points[0], points[-1]
    if height > highest:
        return first, Bound.AT_MOST
    if height < lowest:
        return last, Bound.AT_LEAST
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if pair[1][1] <= height)
    return x0 + (x1 - x0) * (y0 - height) / (y0 - y1), Bound.EXACT


def _mean_and_standard_error(values: Sequence[float]) -> tuple[float, float]:
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)
