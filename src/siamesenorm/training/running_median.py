"""Online robust statistics: a running median, and excursions above it in robust standard deviations.

A median is blind to single batches, however wild, where a mean or an EMA carries them along; it costs one insertion
into a short sorted list a step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

# A normal distribution's standard deviation over its median absolute deviation.
SIGMA_PER_MAD = 1.4826

_LEAST_VALUE = 1e-12


class RunningMedian:
    """The median of the last `size` values."""

    def __init__(self, size: int) -> None:
        """Start with no values."""
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._size = size

    def __len__(self) -> int:
        """Return how many values the window holds now."""
        return len(self._sorted)

    @property
    def is_full(self) -> bool:
        """Whether it is the median of a whole window."""
        return len(self._recent) == self._size

    def push(self, value: float) -> None:
        """Take in a finite value; the oldest leaves a full window."""
        if len(self._recent) == self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """The median; of an even number of values, the mean of the middle two."""
        return _median(self._sorted)

    @property
    def sigma(self) -> float:
        """The robust standard deviation: 1.4826 times the median absolute deviation from the median."""
        median = self.median
        return SIGMA_PER_MAD * _median(sorted(abs(value - median) for value in self._sorted))


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


class Excursions:
    """Where a positive series leaves its running median upwards.

    With m the median of the logarithms of the `window` values before a step, its residual is r = log x - m. The step is
    *out* when r exceeds both `sigmas` robust standard deviations of the residuals before it, and `least_rise(exp m)`, a
    floor in log units. An excursion is at least `shortest` consecutive steps out. Both windows look back only, and a
    fall of the series makes residuals negative, so that a steep descent cannot look like an excursion.
    """

    def __init__(
        self, *, window: int, history: int, sigmas: float, shortest: int, least_rise: Callable[[float], float]
    ) -> None:
        """Start with no values; nothing is out before `history` residuals are known."""
        self._logs = RunningMedian(window)
        self._residuals = RunningMedian(window)
        self._history, self._sigmas, self._shortest, self._least_rise = history, sigmas, shortest, least_rise
        self._steps_out = 0
        self.starts: list[int] = []

    def observe(self, step: int, value: float, *, watched: bool = True) -> None:
        """Take in the value of a step; unwatched steps feed the medians and are never out; NaN and inf always are."""
        out = not math.isfinite(value)
        if not out:
            log = math.log(max(value, _LEAST_VALUE))
            if len(self._logs):
                residual = log - self._logs.median
                out = self._is_out(residual)
                self._residuals.push(residual)
            self._logs.push(log)
        self._steps_out = self._steps_out + 1 if out and watched else 0
        if self._steps_out == self._shortest:
            self.starts.append(step - self._shortest + 1)

    def _is_out(self, residual: float) -> bool:
        if len(self._residuals) < self._history or residual <= self._least_rise(math.exp(self._logs.median)):
            return False
        return residual > self._sigmas * self._residuals.sigma
