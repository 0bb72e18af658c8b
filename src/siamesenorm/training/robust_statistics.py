"""Measures of a loss curve that single bad batches do not move: running medians, excursions, falls."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median

SIGMA_PER_MAD = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""


class RunningMedian:
    """The median of the last `size` values, updated in O(size)."""

    def __init__(self, size: int) -> None:
        """Start with no values."""
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._size = size

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._recent)

    @property
    def is_full(self) -> bool:
        """Whether the window is complete."""
        return len(self) == self._size

    def push(self, value: float) -> None:
        """Add a finite value; a full window drops its oldest."""
        if self.is_full:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """The median; of an even number of values, the mean of the middle two."""
        return median(self._sorted)

    def quantile(self, part: float) -> float:
        """Return the quantile of the window: the value at this part of its order."""
        return self._sorted[int(part * len(self._sorted))]


def centred_medians(values: Sequence[float], half_width: int) -> list[float]:
    r"""Return the median of the values around each one.

    .. math:: m_t = \mathrm{median}(x_{t-h}, \dots, x_{t+h}), \quad h = \min(\mathtt{half\_width}, t)

    (t from 0). A centred window follows a falling curve without lag: on a monotone one, m_t = x_t. Near the start the
    window shrinks on both sides, so that a steep descent stays without bias. Near the end it is cut on the right, which
    raises the median of a falling curve. Of an even number of values the upper middle one counts: the lower one would
    let a step down look like an excursion before it.
    """
    window: list[float] = []
    medians = []
    first = after = 0
    for t in range(len(values)):
        half = min(half_width, t)
        while after < min(len(values), t + half + 1):
            insort(window, values[after])
            after += 1
        while first < t - half:
            del window[bisect_left(window, values[first])]
            first += 1
        medians.append(window[len(window) // 2])
    return medians


def excursions(
    values: Sequence[float], *, window: int, history: int, sigmas: float, rise: float, shortest: int, after: int = 0
) -> tuple[int, ...]:
    """Return where the excursions of a series above its surroundings begin, counted from 1.

    The residual r_t = x_t - m_t from the centred median over `window` values exceeds `rise` and `sigmas` robust
    standard deviations (1.4826 MAD) of the residuals in a window twice as wide, for at least `shortest` values in a
    row. A value that is not finite belongs to an excursion. The first `history` values are never excursions, for lack
    of surroundings, and values up to number `after` do not count.
    """
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    x = [values[index] for index in finite]
    residuals = [value - middle for value, middle in zip(x, centred_medians(x, window // 2), strict=True)]
    out = [not math.isfinite(value) for value in values]
    for position in range(history, len(x)):
        if residuals[position] > rise:
            around = residuals[max(0, position - window) : position + window + 1]
            out[finite[position]] = residuals[position] > sigmas * robust_sigma(around)
    starts, length = [], 0
    for index, is_out in enumerate(out):
        length = length + 1 if is_out and index >= after else 0
        if length == shortest:
            starts.append(index - shortest + 2)
    return tuple(starts)


def robust_sigma(values: Sequence[float]) -> float:
    """Return the robust standard deviation: 1.4826 times the median absolute deviation from the median."""
    centre = median(values)
    return SIGMA_PER_MAD * median([abs(value - centre) for value in values])


def part_far_above(
    values: Sequence[float], *, window: int, history: int, rise: float, spreads: float, after: int = 0
) -> float:
    """Return the part of the values (after number `after`) far above the running lower quartile.

    Far above is more than `rise`, and more than `spreads` times the distance of the lower quartile from the lower
    eighth, for the last `window` values: a spread that stays what it is where up to half of the values are raised. At
    least `history` values are needed before the first that counts. NaN if none counts.
    """
    recent = RunningMedian(window)
    seen = counted = far = 0
    for number, value in enumerate(values, start=1):
        if not math.isfinite(value):
            continue
        if seen >= history and number > after:
            quartile = recent.quantile(0.25)
            counted += 1
            far += value - quartile > max(rise, spreads * (quartile - recent.quantile(0.125)))
        recent.push(value)
        seen += 1
    return far / counted if counted else math.nan


def still_falls(values: Sequence[float], *, fall: float) -> bool:
    """Return whether a series falls over its second half: by `fall`, and more surely than chance explains.

    The fall is that of the median from the third quarter to the last; chance explains two standard deviations of
    Spearman's rank correlation with time (equal values count as falling), which outliers do not move.
    """
    half = values[-2 * (len(values) // 4) :]
    if not half or len(values) < 4:
        return False
    middle, count = len(half) // 2, len(half)
    order = sorted(range(count), key=lambda time: (half[time], -time))
    squares = sum((rank - time) ** 2 for rank, time in enumerate(order))
    correlation = 1 - 6 * squares / (count * (count**2 - 1))
    return median(half[:middle]) - median(half[middle:]) > fall and correlation * math.sqrt(count - 1) < -2
