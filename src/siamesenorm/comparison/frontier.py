"""The stability frontier: held-out loss and verdict of every method at every learning rate, as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Rectangle

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import Findings, Outcome
from siamesenorm.comparison.labels import WIDTH, grid_height, name_room, shortened
from siamesenorm.comparison.results import DIVERGED, SPIKED, UNFINISHED
from siamesenorm.comparison.tables import MARKS
from siamesenorm.comparison.theme import Theme

WIDE_CELL = 0.85
"""Inches that a cell needs to have everything on one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the map; `bold` says that its loss is the lowest of its column."""

    column: int
    row: int
    outcome: Outcome
    wide: bool
    bold: bool


def draw_frontier(findings: Findings, theme: Theme) -> Drawing:
    """Draw a cell for every method and learning rate: held-out loss as colour, verdict as mark and hatching."""
    methods, rates = findings.sweep.methods, findings.sweep.learning_rates
    height = grid_height(len(methods))
    drawing = Drawing(figsize=(WIDTH, height))
    axes = drawing.subplots()
    left, right = 0.04 + name_room(method.name for method in methods), 0.985
    drawing.subplots_adjust(left=left, right=right, top=1 - 0.4 / height, bottom=0.5 / height)
    wide = (right - left) * WIDTH / len(rates) >= WIDE_CELL
    losses = [loss.mean for outcome in findings.outcomes.values() if (loss := outcome.held_out_loss)]
    color = LossColors(losses, theme)
    for (rate, method), outcome in findings.outcomes.items():
        beside = [other for (at, _), other in findings.outcomes.items() if at == rate and other.whole]
        lowest = min((loss.mean for other in beside if (loss := other.held_out_loss)), default=None)
        bold = outcome.whole and (loss := outcome.held_out_loss) is not None and loss.mean == lowest
        cell = Cell(column=rates.index(rate), row=methods.index(method), outcome=outcome, wide=wide, bold=bold)
        _draw_cell(axes, cell, color, theme)
    axes.set_title("Held-out loss and verdict", x=(0.02 - left) / (right - left))
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xticks(range(len(rates)), [quantities.rate(rate) for rate in rates], fontsize=8.5 if wide else 7)
    axes.set_yticks(range(len(methods)), [shortened(method.name) for method in methods], color=theme.ink)
    axes.set_xlabel("learning rate")
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return drawing


def _draw_cell(axes: Axes, cell: Cell, color: LossColors, theme: Theme) -> None:
    loss, hatched = cell.outcome.held_out_loss, cell.outcome.verdict == DIVERGED
    face = theme.fill if loss is None or hatched else color(loss.mean)
    axes.add_patch(
        Rectangle(
            (cell.column - 0.485, cell.row - 0.46), 0.97, 0.92, facecolor=face, linewidth=0.8,
            hatch="////" if hatched else None, linestyle=":" if loss is None and not hatched else "-",
            edgecolor=theme.hatch if hatched else theme.muted if loss is None else face,
        )
    )  # fmt: skip
    text = axes.text(
        cell.column, cell.row, _cell_text(cell), ha="center", va="center_baseline" if cell.wide else "center",
        fontsize=9 if cell.wide else 7, color=_readable(face, theme), fontweight="bold" if cell.bold else "normal",
    )  # fmt: skip
    if hatched:
        text.set_color(theme.danger)
        text.set_bbox({"facecolor": theme.fill, "edgecolor": "none", "pad": 1.5})


def _cell_text(cell: Cell) -> str:
    """Write mark and loss side by side, or in a narrow cell one above the other."""
    outcome, loss = cell.outcome, cell.outcome.held_out_loss
    if not outcome.complete:
        return f"{MARKS[UNFINISHED]} {UNFINISHED}" if cell.wide else MARKS[UNFINISHED]
    mark = MARKS.get(outcome.verdict or "", "·")
    if outcome.verdict == DIVERGED:
        share = "" if outcome.all_diverged else f"{outcome.with_verdict}/{len(outcome.complete)}"
        return " ".join(filter(None, [mark, "diverged" if cell.wide else "", share]))
    number = f"{loss.mean:.3f}{'*' if outcome.verdict == SPIKED else ''}" if loss else ""
    return f"{mark}{' ' if cell.wide else chr(10)}{number}".strip()


class LossColors:
    """The colour of a loss: the lower, the stronger; the square root spreads the losses near the best."""

    def __init__(self, losses: Sequence[float], theme: Theme) -> None:
        """Span the colours over the losses."""
        low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
        self._scale = PowerNorm(0.5, low, high if high > low else low + 1.0)
        self._colors = LinearSegmentedColormap.from_list("loss", [theme.best, theme.worst])

    def __call__(self, loss: float) -> tuple[float, float, float]:
        """Return the colour of a loss as red, green and blue in [0, 1]."""
        return to_rgb(self._colors(float(self._scale(loss))))


def _readable(face: str | tuple[float, float, float], theme: Theme) -> str:
    """Return the theme's ink or surface, whichever contrasts more with the cell (WCAG relative luminance)."""
    own = _luminance(face)
    return max((theme.ink, theme.surface), key=lambda color: _contrast(own, _luminance(color)))


def _luminance(color: str | tuple[float, float, float]) -> float:
    channels = np.array(to_rgb(color))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


def _contrast(first: float, second: float) -> float:
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)
