"""The figures over methods and learning rates: a heat map of loss and verdict, and loss against learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from siamesenorm.comparison import figure_style, formatting
from siamesenorm.comparison.figure_style import CurveLabel, Figure, MethodStyle, Theme
from siamesenorm.comparison.findings import AgainstNoise, Findings, Outcome
from siamesenorm.comparison.report_parts import SIGNS
from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, SPIKED, UNFINISHED

Color = str | tuple[float, float, float]

WIDE_CELL = 0.85
"""Inches that a cell needs for mark and number on one line."""
BAND = 0.13
"""The part of the height, above the losses, for the methods that diverged or did not learn."""
DODGE = 0.04
"""The distance between two such methods at one rate, as a part of the width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One method at one rate, in data units; `lost` has the word of a verdict without a place on the axis."""

    rate: float
    height: float
    lost: str | None


def rate_figures(findings: Findings) -> tuple[Figure, Figure]:
    """Return the figures over methods and learning rates: frontier and sensitivity."""
    over_seeds = (
        f"Held-out loss ({findings.results.unit}), the mean over the seeds that every method has finished at that rate"
    )
    noise = findings.noise
    words = f"where one more seed of {noise.baseline} falls with 95 % probability" if noise else ""
    frontier = Figure(
        name="frontier",
        title="Stability frontier",
        caption=f"{over_seeds}, without the diverged: the stronger the colour, the lower the loss. ● stable, ▲ spiked, "
        f"◇ not learned, ✕ and hatching: diverged, ○ unfinished.{f' Framed: {words}.' if noise else ''}",
        alternative="; ".join(outcome.description for outcome in findings.outcomes.values()),
        draw=lambda theme: draw_frontier(findings, theme),
    )
    sensitivity = Figure(
        name="sensitivity",
        title="Learning-rate sensitivity",
        caption=f"{over_seeds}; the tables have the intervals. In the upper band: ✕ every seed diverged, ◇ not "
        f"learned.{f' The band: {words}.' if noise else ''}",
        alternative="Rate sensitivity, mean excess loss: "
        + ("; ".join(f"{m} {value:.3f}" for m, value in findings.sensitivities.items()) or "of one rate there is none"),
        draw=lambda theme: draw_sensitivity(findings, theme),
    )
    return frontier, sensitivity


def draw_frontier(findings: Findings, theme: Theme) -> Drawing:
    """Draw a cell for every method and learning rate: held-out loss as colour, verdict as mark and hatching."""
    methods, rates, noise = findings.results.methods, findings.results.learning_rates, findings.noise
    left, right = 0.04 + figure_style.name_room(methods), 0.985
    drawing, axes = _new_drawing(methods, left=left, right=right, top=0.4, bottom=0.5)
    wide = (right - left) * figure_style.WIDTH / len(rates) >= WIDE_CELL
    color = _loss_colors(_losses(findings, lambda outcome: outcome.verdict != NOT_LEARNED), theme)
    for (rate, method), outcome in findings.outcomes.items():
        loss, colored = outcome.held_out_loss, outcome.verdict not in (DIVERGED, NOT_LEARNED)
        face = color(loss.mean) if loss and colored else None
        place = (rates.index(rate), methods.index(method))
        text = _draw_cell(axes, place, outcome, face, theme, wide=wide)
        if noise and loss and colored and noise.place(loss.mean) is AgainstNoise.INSIDE:
            _frame(axes, place, theme)
        if findings.is_best(outcome, lambda run: run.held_out.get("loss")):
            text.set_fontweight("bold")
    axes.set_title("Held-out loss and verdict", x=(0.02 - left) / (right - left))
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xticks(range(len(rates)), [formatting.rate(rate) for rate in rates], fontsize=8.5 if wide else 7)
    axes.set_yticks(range(len(methods)), [figure_style.shortened(method) for method in methods], color=theme.ink)
    axes.set_xlabel("learning rate")
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return drawing


def draw_sensitivity(findings: Findings, theme: Theme) -> Drawing:
    """Draw the held-out loss over the learning rate, the mean over the seeds that did not diverge."""
    rates = findings.results.learning_rates
    styles, crowded = figure_style.styles_of(findings.results.methods), len(rates) > 4
    room, bottom = figure_style.label_room(styles), 0.72 if crowded else 0.5
    drawing, axes = _new_drawing(styles, left=0.15, right=1 - room, top=0.36, bottom=bottom)
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
    band = _set_heights(axes, findings, theme)
    if noise := findings.noise:
        axes.axhspan(noise.low, noise.high, color=styles[noise.baseline].color(theme), alpha=0.13, linewidth=0)
    labels = []
    for method, style in styles.items():
        points = _points(findings, method, band, math.log(axes.get_xlim()[1] / axes.get_xlim()[0]))
        _draw_points(axes, points, style, theme)
        if points:
            labels.append(CurveLabel(height=points[-1].height, text=figure_style.shortened(method), style=style))
    axes.set_title("Held-out loss by learning rate")
    axes.set_xlabel("learning rate")
    axes.set_ylabel(f"held-out loss ({findings.results.unit})", y=(1 - BAND) / 2)  # the band has words of its own
    names = [formatting.rate(rate) for rate in rates]
    axes.set_xticks(rates, names, fontsize=7 if crowded else 8.5, rotation=45 if crowded else 0)
    axes.minorticks_off()
    figure_style.label_ends(axes, labels, theme)
    return drawing


def _new_drawing(
    methods: Collection[str], *, left: float, right: float, top: float, bottom: float
) -> tuple[Drawing, Axes]:
    """Return one of the two figures, side by side in the page, and its axes; `top` and `bottom` are in inches."""
    height = max(3.0, 0.95 + 0.34 * len(methods))
    drawing = Drawing(figsize=(figure_style.WIDTH, height))
    axes = drawing.subplots()
    drawing.subplots_adjust(left=left, right=right, top=1 - top / height, bottom=bottom / height)
    return drawing, axes


def _losses(findings: Findings, shown: Callable[[Outcome], bool]) -> list[float]:
    outcomes = findings.outcomes.values()
    return [loss.mean for outcome in outcomes if (loss := outcome.held_out_loss) and shown(outcome)]


def _draw_cell(
    axes: Axes, place: tuple[int, int], outcome: Outcome, face: Color | None, theme: Theme, *, wide: bool
) -> Text:
    """Draw a cell at (column, row), plain where it has no colour of its own; return its text."""
    (column, row), hatched, plain = place, outcome.diverged, face is None
    face = face or theme.fill
    axes.add_patch(
        Rectangle(
            (column - 0.485, row - 0.46), 0.97, 0.92, facecolor=face, linewidth=0.8,
            hatch="////" if hatched else None, linestyle=":" if plain and not hatched else "-",
            edgecolor=theme.hatch if hatched else theme.muted if plain else face,
        )
    )  # fmt: skip
    text = axes.text(
        column, row, _cell_text(outcome, wide), ha="center", va="center_baseline" if wide else "center",
        fontsize=9 if wide else 7, color=_readable(face, theme),
    )  # fmt: skip
    if hatched:
        text.set_color(theme.danger)
        text.set_bbox({"facecolor": theme.fill, "edgecolor": "none", "pad": 1.5})
    return text


def _frame(axes: Axes, place: tuple[int, int], theme: Theme) -> None:
    column, row = place
    frame = Rectangle((column - 0.455, row - 0.4), 0.91, 0.8, fill=False, linewidth=1.1, edgecolor=theme.ink)
    axes.add_patch(frame)


def _cell_text(outcome: Outcome, wide: bool) -> str:
    """Write mark and loss side by side, or in a narrow cell one above the other."""
    if not outcome.complete:
        return f"{SIGNS[UNFINISHED][0]} {UNFINISHED}" if wide else SIGNS[UNFINISHED][0]
    mark = SIGNS.get(outcome.verdict or "", ("·", ""))[0]
    if outcome.verdict == DIVERGED:
        share = "" if outcome.all_diverged else f"{outcome.count(DIVERGED)}/{len(outcome.complete)}"
        return " ".join(filter(None, [mark, "diverged" if wide else "", share]))
    loss = outcome.held_out_loss
    number = f"{loss.mean:.3f}{'*' if outcome.verdict == SPIKED else ''}" if loss else ""
    return f"{mark}{' ' if wide else chr(10)}{number}".strip()


def _loss_colors(losses: Sequence[float], theme: Theme) -> Callable[[float], Color]:
    """Return the colour of a loss: the lower, the stronger; the square root spreads the losses near the best."""
    low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
    scale = PowerNorm(0.5, low, high if high > low else low + 1.0)
    colors = LinearSegmentedColormap.from_list("loss", [theme.best, theme.worst])
    return lambda loss: to_rgb(colors(float(scale(loss))))


def _readable(face: Color, theme: Theme) -> str:
    """Return the theme's ink or surface, whichever contrasts more with the cell (WCAG)."""

    def contrast(color: str) -> float:
        darker, lighter = sorted((_luminance(face), _luminance(color)))
        return (lighter + 0.05) / (darker + 0.05)

    return max((theme.ink, theme.surface), key=contrast)


def _luminance(color: Color) -> float:
    """Return the relative luminance of a colour (WCAG)."""
    channels = np.array(to_rgb(color))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


def _lost(outcome: Outcome) -> str | None:
    """Return why an outcome has no place among the losses: every seed diverged, or one did not learn."""
    if outcome.all_diverged:
        return DIVERGED
    return NOT_LEARNED if outcome.verdict == NOT_LEARNED else None


def _set_heights(axes: Axes, findings: Findings, theme: Theme) -> float:
    """Fit the axis to the losses and add the band of the lost; return the height of its middle."""
    outcomes = findings.outcomes.values()
    losses = _losses(findings, lambda outcome: not _lost(outcome))
    low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.05
    low, high = low - margin, high + margin
    words = [word for word in (DIVERGED, NOT_LEARNED) if any(_lost(outcome) == word for outcome in outcomes)]
    if not words:
        axes.set_ylim(low, high)
        return high
    top = high + BAND / (1 - BAND) * (high - low)
    axes.set_ylim(low, top)
    axes.axhspan(high, top, color=theme.fill, linewidth=0)
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])
    axes.text(
        -0.02, 1 - BAND / 2, "\n".join(words), transform=axes.transAxes, fontsize=7.5, color=theme.muted, ha="right",
        va="center",
    )  # fmt: skip
    return (high + top) / 2


def _points(findings: Findings, method: str, band: float, width: float) -> list[Point]:
    points = []
    for (rate, of), outcome in findings.outcomes.items():
        if of != method:
            continue
        if lost := _lost(outcome):
            beside = [m for (at, m), other in findings.outcomes.items() if at == rate and _lost(other)]
            shift = (beside.index(method) - (len(beside) - 1) / 2) * DODGE * width
            points.append(Point(rate=rate * math.exp(shift), height=band, lost=lost))
        elif outcome.held_out_loss is not None:
            points.append(Point(rate=rate, height=outcome.held_out_loss.mean, lost=None))
    return points


def _draw_points(axes: Axes, points: Sequence[Point], style: MethodStyle, theme: Theme) -> None:
    """Draw the points and the lines between them, dotted where a line leads to or from the band."""
    color = style.color(theme)
    for first, second in pairwise(points):
        if first.lost and second.lost:
            continue
        rates, heights = (first.rate, second.rate), (first.height, second.height)
        if first.lost or second.lost:
            axes.plot(rates, heights, color=color, linewidth=0.9, linestyle=":", alpha=0.7)
        else:
            axes.plot(rates, heights, color=color, linewidth=style.width, linestyle=style.dash)
    for point in points:
        marker = {DIVERGED: "X", NOT_LEARNED: "d"}.get(point.lost or "", style.marker)
        axes.plot(
            point.rate, point.height, marker=marker, markersize=7.5 if point.lost else 5.5, color=color,
            markeredgecolor=theme.surface, markeredgewidth=0.8, linestyle="", zorder=3,
        )  # fmt: skip
