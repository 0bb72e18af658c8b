"""Learning-rate sensitivity: held-out loss against learning rate, one line a method, the diverged in a band above."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import Findings
from siamesenorm.comparison.labels import WIDTH, grid_height, label_ends, label_of, label_room, shortened
from siamesenorm.comparison.results import Method
from siamesenorm.comparison.theme import MethodStyle, Theme, styles_of

BAND = 0.13
"""The part of the height, above the losses, where the diverged stand."""
DODGE = 0.04
"""The distance between two diverged methods at one rate, as a part of the width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where one method stands at one rate, in data units."""

    rate: float
    height: float
    diverged: bool


def draw_sensitivity(findings: Findings, theme: Theme) -> Drawing:
    """Draw the held-out loss (nats) over the learning rate, the mean over the seeds that did not diverge."""
    rates = findings.sweep.learning_rates
    styles = styles_of(findings.sweep.methods)
    height, crowded = grid_height(len(styles)), len(rates) > 4
    drawing = Drawing(figsize=(WIDTH, height))
    axes = drawing.subplots()
    right = 1 - label_room(method.name for method in styles)
    drawing.subplots_adjust(left=0.15, right=right, top=1 - 0.36 / height, bottom=(0.72 if crowded else 0.5) / height)
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
    band = _set_heights(axes, findings, theme)
    labels = []
    for method, style in styles.items():
        points = _points(findings, method, band, math.log(axes.get_xlim()[1] / axes.get_xlim()[0]))
        _draw_points(axes, points, style, theme)
        if points:
            labels.append(label_of(style, theme, height=points[-1].height, text=shortened(method.name)))
    axes.set_title("Held-out loss by learning rate")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("held-out loss (nats)")
    names = [quantities.rate(rate) for rate in rates]
    axes.set_xticks(rates, names, fontsize=7 if crowded else 8.5, rotation=45 if crowded else 0)
    axes.minorticks_off()
    label_ends(axes, labels)
    return drawing


def _set_heights(axes: Axes, findings: Findings, theme: Theme) -> float:
    """Fit the axis to the losses and add the band of the diverged; return the height of its middle."""
    losses = [loss.mean for outcome in findings.outcomes.values() if (loss := outcome.held_out_loss)]
    low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.05
    low, high = low - margin, high + margin
    if not any(outcome.all_diverged for outcome in findings.outcomes.values()):
        axes.set_ylim(low, high)
        return high
    top = high + BAND / (1 - BAND) * (high - low)
    axes.set_ylim(low, top)
    axes.axhspan(high, top, color=theme.fill, linewidth=0)
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])
    axes.text(
        -0.02, 1 - BAND / 2, "diverged", transform=axes.transAxes, fontsize=7.5, color=theme.muted, ha="right",
        va="center_baseline",
    )  # fmt: skip
    return (high + top) / 2


def _points(findings: Findings, method: Method, band: float, width: float) -> list[Point]:
    points = []
    for (rate, of), outcome in findings.outcomes.items():
        if of != method:
            continue
        if outcome.all_diverged:
            beside = [m for (at, m), other in findings.outcomes.items() if at == rate and other.all_diverged]
            shift = (beside.index(method) - (len(beside) - 1) / 2) * DODGE * width
            points.append(Point(rate=rate * math.exp(shift), height=band, diverged=True))
        elif outcome.held_out_loss is not None:
            points.append(Point(rate=rate, height=outcome.held_out_loss.mean, diverged=False))
    return points


def _draw_points(axes: Axes, points: Sequence[Point], style: MethodStyle, theme: Theme) -> None:
    """Draw the points and the lines between them, dotted where a line leads to or from a divergence."""
    color = style.color(theme)
    for first, second in pairwise(points):
        if first.diverged and second.diverged:
            continue
        crossing = first.diverged or second.diverged
        axes.plot(
            [first.rate, second.rate],
            [first.height, second.height],
            color=color,
            linewidth=0.9 if crossing else style.width,
            linestyle=":" if crossing else style.dash,
            alpha=0.7 if crossing else 1.0,
        )
    for point in points:
        axes.plot(
            point.rate,
            point.height,
            marker="X" if point.diverged else style.marker,
            markersize=7.5 if point.diverged else 5.5,
            color=color,
            markeredgecolor=theme.surface,
            markeredgewidth=0.8,
            linestyle="",
            zorder=3,
        )
