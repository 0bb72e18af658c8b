"""Intervals and tests of a comparison: Student's t over seeds, differences paired by seed, Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95


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
        """The two-sided p-value of a mean difference of zero; None for fewer than two seeds."""
        count = len(self.by_seed)
        if count < 2:
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


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of the values and the half width `t s / sqrt(n)` of its two-sided t interval."""
    if not values:
        raise ValueError("an interval needs at least one value, got none")
    if len(values) == 1:
        return Estimate(mean=values[0], half_width=None, count=1)
    mean, error = _mean_and_standard_error(values)
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    return Estimate(mean=mean, half_width=quantile * error, count=len(values))


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> PairedDifference:
    """Return the differences `first - second` over the seeds that both have."""
    return PairedDifference(by_seed={seed: first[seed] - second[seed] for seed in sorted(first) if seed in second})


def holm(p_values: Sequence[float], confidence: float = CONFIDENCE) -> list[HolmDecision]:
    """Return Holm's step-down decisions, in the order given.

    The i-th smallest of m p-values is compared with `alpha / (m - i)`, i = 0, 1, ..., and the first that fails
    ends the rejections. The interval at `1 - alpha / (m - i)`, with i no larger than the first failure,
    excludes zero exactly for the rejected.
    """
    alpha, adjusted, tests, rejected = 1.0 - confidence, 0.0, len(p_values), True
    decisions: dict[int, HolmDecision] = {}
    for index in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        left = len(p_values) - len(decisions)
        adjusted = max(adjusted, min(1.0, left * p_values[index]))
        if rejected:
            tests, rejected = left, p_values[index] < alpha / left
        decisions[index] = HolmDecision(adjusted_p=adjusted, confidence=1.0 - alpha / tests, rejected=rejected)
    return [decisions[index] for index in range(len(p_values))]


def _mean_and_standard_error(values: Sequence[float]) -> tuple[float, float]:
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)
