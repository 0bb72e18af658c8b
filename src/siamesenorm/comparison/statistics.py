"""Intervals and tests of a comparison: Student's t over seeds, differences paired by seed, Holm's correction.

Student's distribution is computed here from the regularised incomplete beta function, so that a report needs
no statistics package; the tests compare it with published tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds with the half width of its t interval, which a single value does not have (None)."""

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        """The lower end of the interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """The upper end of the interval."""
        return None if self.half_width is None else self.mean + self.half_width

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval and it excludes zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The differences `first - second` over the seeds that both have, by seed."""

    by_seed: Mapping[int, float]

    @property
    def estimate(self) -> Estimate:
        """The mean difference with its uncorrected interval."""
        return t_interval(list(self.by_seed.values()))

    def interval(self, confidence: float) -> Estimate:
        """Return the mean difference with its interval at another confidence."""
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
        return student_t_tail(mean / error, count - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HolmDecision:
    """The decision of Holm's procedure on one hypothesis, and the confidence of the interval that agrees with it."""

    adjusted_p: float
    confidence: float
    rejected: bool


def regularised_incomplete_beta(x: float, a: float, b: float) -> float:
    """Return `I_x(a, b)` for 0 <= x <= 1, by Lentz's continued fraction (DLMF 8.17.22)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, its mirror image converges fast
        return 1.0 - regularised_incomplete_beta(1.0 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x) - _log_beta(a, b)
    return math.exp(log_front) / (a * _beta_continued_fraction(x, a, b))


def student_t_tail(t: float, degrees: int) -> float:
    """Return `P(|T| >= |t|)` for Student's t with that many degrees of freedom."""
    if degrees < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, got {degrees}")
    return regularised_incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


def student_t_quantile(confidence: float, degrees: int) -> float:
    """Return the t with `P(|T| <= t) = confidence`: the factor of a two-sided interval."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"a confidence is strictly between 0 and 1, got {confidence}")
    tail = 1.0 - confidence
    high = 1.0
    while student_t_tail(high, degrees) > tail:
        high *= 2.0
    low = 0.0
    for _ in range(100):  # each halves the bracket: far below the rounding of a double
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_tail(middle, degrees) > tail else (low, middle)
    return (low + high) / 2


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of the values and the half width `t s / sqrt(n)` of its two-sided t interval."""
    if not values:
        raise ValueError("an interval needs at least one value, got none")
    if len(values) == 1:
        return Estimate(mean=values[0], half_width=None, count=1)
    mean, error = _mean_and_standard_error(values)
    half_width = student_t_quantile(confidence, len(values) - 1) * error
    return Estimate(mean=mean, half_width=half_width, count=len(values))


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> PairedDifference:
    """Return the differences `first - second` over the seeds that both have."""
    return PairedDifference(by_seed={seed: first[seed] - second[seed] for seed in sorted(first) if seed in second})


def holm(p_values: Sequence[float], confidence: float = CONFIDENCE) -> list[HolmDecision]:
    """Return Holm's step-down decisions, in the order given.

    The i-th smallest of m p-values is compared with `alpha / (m - i)`, i = 0, 1, ..., and the first that fails
    ends the rejections. The interval at `1 - alpha / (m - i)`, with i no larger than the first failure,
    excludes zero exactly for the rejected.
    """
    alpha = 1.0 - confidence
    decisions: dict[int, HolmDecision] = {}
    adjusted, remaining, still_rejecting = 0.0, len(p_values), True
    for index in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        comparisons_left = len(p_values) - len(decisions)
        adjusted = max(adjusted, min(1.0, comparisons_left * p_values[index]))
        if still_rejecting:
            remaining = comparisons_left
            still_rejecting = p_values[index] < alpha / comparisons_left
        decisions[index] = HolmDecision(
            adjusted_p=adjusted, confidence=1.0 - alpha / remaining, rejected=still_rejecting
        )
    return [decisions[index] for index in range(len(p_values))]


def _mean_and_standard_error(values: Sequence[float]) -> tuple[float, float]:
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _beta_continued_fraction(x: float, a: float, b: float) -> float:
    """Return the denominator `1 + d1/(1 + d2/(1 + ...))` of the continued fraction of the incomplete beta."""
    tiny, tolerance = 1e-300, 1e-15
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1, 1000):
        half = step // 2
        if step % 2 == 0:
            numerator = half * (b - half) * x / ((a + step - 1) * (a + step))
        else:
            numerator = -(a + half) * (a + b + half) * x / ((a + step - 1) * (a + step))
        d = 1.0 / _away_from_zero(1.0 + numerator * d, tiny)
        c = _away_from_zero(1.0 + numerator / c, tiny)
        value *= c * d
        if abs(c * d - 1.0) < tolerance:
            break
    return value


def _away_from_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
