"""Curves made ready to be drawn: smoothed, and thinned without losing spikes."""

from __future__ import annotations

import numpy as np

from siamesenorm.comparison.results import Curve, FloatArray

SMOOTHING_FRACTION = 0.05
MOST_POINTS = 400


def finite_part(curve: Curve) -> Curve:
    """Return the curve up to the step before its first value that is not finite."""
    broken = np.flatnonzero(~np.isfinite(curve.values))
    end = int(broken[0]) if len(broken) else len(curve.values)
    return Curve(steps=curve.steps[:end], values=curve.values[:end])


def smoothed(curve: Curve) -> Curve:
    """Return the curve of midmeans over 5 % of the steps, at 400 steps or fewer: spikes do not move it.

    A midmean is the mean of the middle half of a window; at the ends the window is cut, not padded.
    """
    length = len(curve.values)
    reach = max(1, round(SMOOTHING_FRACTION * length / 2))
    places = np.unique(np.linspace(0, length - 1, min(length, MOST_POINTS)).round().astype(int))
    values = [_midmean(curve.values[max(0, place - reach) : place + reach + 1]) for place in places]
    return Curve(steps=curve.steps[places], values=np.array(values))


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


def _midmean(window: FloatArray) -> float:
    trimmed = len(window) // 4
    return float(np.mean(np.sort(window)[trimmed : len(window) - trimmed]))
