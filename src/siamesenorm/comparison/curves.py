"""Curves made ready to be drawn: smoothed, thinned without losing spikes, and labels that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from siamesenorm.comparison.results import Curve, FloatArray

SMOOTHING_FRACTION = 0.025
MOST_POINTS = 400


def finite_part(curve: Curve) -> Curve:
    """Return the curve up to the step before its first value that is not finite."""
    broken = np.flatnonzero(~np.isfinite(curve.values))
    end = int(broken[0]) if len(broken) else len(curve.values)
    return Curve(steps=curve.steps[:end], values=curve.values[:end])


def smoothed(curve: Curve) -> Curve:
    """Return the centred moving average over 2.5 % of the steps; at the ends the window is cut, not padded."""
    length = len(curve.values)
    reach = max(1, round(SMOOTHING_FRACTION * length / 2))
    sums = np.concatenate(([0.0], np.cumsum(curve.values)))
    first = np.maximum(np.arange(length) - reach, 0)
    last = np.minimum(np.arange(length) + reach + 1, length)
    return Curve(steps=curve.steps, values=(sums[last] - sums[first]) / (last - first))


def thinned(curve: Curve) -> Curve:
    """Return at most about 400 points: the lowest and the highest of each stretch, so that no spike is lost."""
    length = len(curve.values)
    if length <= MOST_POINTS:
        return curve
    edges = np.linspace(0, length, MOST_POINTS // 2 + 1).astype(int)
    kept: set[int] = {0, length - 1}
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        stretch = curve.values[start:end]
        kept |= {int(start + np.argmin(stretch)), int(start + np.argmax(stretch))}
    indices = np.array(sorted(kept))
    return Curve(steps=curve.steps[indices], values=curve.values[indices])


def difference(curve: Curve, reference: Curve) -> Curve:
    """Return `curve - reference` at the steps that both have."""
    steps, own, other = np.intersect1d(curve.steps, reference.steps, assume_unique=True, return_indices=True)
    return Curve(steps=steps, values=curve.values[own] - reference.values[other])


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> FloatArray:
    """Return the nearest positions (least squares) at least `gap` apart, in the same order, moved into [low, high].

    With the gaps taken out, this is isotonic regression, which pooling adjacent violators solves.
    """
    order = np.argsort(positions, kind="stable")
    targets = np.asarray(positions, dtype=float)[order] - gap * np.arange(len(positions))
    pools: list[tuple[float, int]] = []
    for target in targets:
        mean, size = float(target), 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        pools.append((mean, size))
    placed = np.repeat([mean for mean, _ in pools], [size for _, size in pools])
    room = high - gap * (len(positions) - 1)
    placed = np.clip(placed, low, max(low, room)) + gap * np.arange(len(positions))
    result = np.empty(len(positions))
    result[order] = placed
    return result
