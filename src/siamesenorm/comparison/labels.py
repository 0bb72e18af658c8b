"""Labels at the ends of curves, instead of a legend: each beside its own curve, none on another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from siamesenorm.comparison.results import FloatArray
from siamesenorm.comparison.theme import Dash, MethodStyle, Theme

WIDTH = 4.6
"""The width of every figure in inches: small, so that its text can still be read on a telephone."""
LABEL_SIZE = 8.5
LETTER_WIDTH = 0.0725
"""Inches of a letter at that size, on average, in DejaVu Sans."""
LABEL_STOPS = (0.02, 0.09, 0.14, 0.36, 0.41)
"""Inches right of the axes: a leader's start, its bend and its end; the end of the line's sample; the text."""
LONGEST_NAME = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What stands at the end of a line: its text, a sample of the line, and the height (data) where it belongs."""

    height: float
    text: str
    color: str
    dash: Dash
    width: float


def grid_height(methods: int) -> float:
    """Return the height in inches of the two figures that stand side by side, frontier and sensitivity."""
    return max(3.0, 0.95 + 0.34 * methods)


def label_of(style: MethodStyle, theme: Theme, *, height: float, text: str) -> Label:
    """Return the label of a method's line."""
    return Label(height=height, text=text, color=style.color(theme), dash=style.dash, width=style.width)


def label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Write the labels beside the right edge, each as near to its curve's end as the others let it be."""
    if not labels:
        return
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    ends = [float(np.clip(_axes_fraction(axes, label.height), 0.0, 1.0)) for label in labels]
    gap = min(1.35 * LABEL_SIZE / 72 / box.height, 1.0 / len(labels))
    start, bend, sample, end_of_sample, text = (1 + inches / box.width for inches in LABEL_STOPS)
    for label, end, place in zip(labels, ends, spread(ends, gap, 0.0, 1.0), strict=True):
        line: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": label.color}
        axes.plot([start, bend, sample], [end, place, place], linewidth=0.9, **line)
        axes.plot([sample, end_of_sample], [place, place], linewidth=label.width, linestyle=label.dash, **line)
        axes.text(text, place, label.text, transform=axes.transAxes, fontsize=LABEL_SIZE, va="center_baseline")


def shortened(name: str) -> str:
    """Return a name that fits a figure, an ellipsis for what does not."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def label_room(names: Iterable[str]) -> float:
    """Return the part of a figure's width that labels take, with room for a mark after the longest name."""
    return (LABEL_STOPS[-1] + 2 * LETTER_WIDTH) / WIDTH + name_room(names)


def name_room(names: Iterable[str]) -> float:
    """Return the part of a figure's width that the longest name takes."""
    return LETTER_WIDTH * max((len(shortened(name)) for name in names), default=0) / WIDTH


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


def _axes_fraction(axes: Axes, height: float) -> float:
    _, pixel = axes.transData.transform((axes.get_xlim()[0], height))
    return float(axes.transAxes.inverted().transform((0.0, pixel))[1])
