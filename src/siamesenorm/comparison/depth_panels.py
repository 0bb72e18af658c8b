"""Drawings of curves over the depth in panels, and of rows of marks; figures of analyses consist of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from siamesenorm.comparison import figure_style
from siamesenorm.comparison.figure_style import CurveLabel, MethodStyle, Theme

LEFT = 0.175
PANEL = 2.35
"""Height of a panel in inches."""
DOTTED = (0.0, (1.0, 2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: its name, its run, which of the run's curves it is, its points, and whether it is dotted."""

    name: str
    run: str
    number: int = 0
    x: Sequence[float]
    y: Sequence[float | None]
    dotted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes: its labels, its lines, and whether the height is logarithmic."""

    x: str
    y: str
    lines: tuple[Line, ...]
    logarithmic: bool = False
    zero: bool = False
    """Whether a line marks the height 0."""
    share: bool = False
    """Whether the heights are parts of 1: the axis has all of them."""


def draw_panels(panels: Sequence[Panel], runs: Sequence[str], title: str, theme: Theme) -> Drawing:
    """Draw panels one above the other, each with the names of its curves beside it."""
    hues = figure_style.hues_of(runs)
    names = [line.name for panel in panels for line in panel.lines]
    height = PANEL * len(panels) + 0.35
    drawing = Drawing(figsize=(figure_style.WIDTH, height))
    all_axes = drawing.subplots(len(panels), 1, squeeze=False)[:, 0]
    drawing.subplots_adjust(
        left=LEFT, right=1 - figure_style.label_room(names), top=1 - 0.36 / height, bottom=0.48 / height, hspace=0.3
    )
    all_axes[0].set_title(title)
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, hues, theme)
    return drawing


def _draw_panel(axes: Axes, panel: Panel, hues: Mapping[str, str], theme: Theme) -> None:
    labels: dict[str, CurveLabel] = {}
    for line in panel.lines:
        style = _style(line, hues)
        values = np.array([np.nan if value is None else float(value) for value in line.y])
        axes.plot(
            np.asarray(line.x, dtype=float), values, color=style.color(theme), linewidth=style.width,
            linestyle=style.dash, marker="o", markersize=2.2 if line.dotted else 3.0,
        )  # fmt: skip
        present = finite(line.y)
        if len(present):
            label = CurveLabel(height=float(present[-1]), text=figure_style.shortened(line.name), style=style)
            labels.setdefault(line.name, label)
    if panel.logarithmic:
        figure_style.scale_logarithmically(axes)
    if panel.zero:
        axes.axhline(0, color=theme.muted, linewidth=0.8, zorder=1.5)
    if panel.share:
        axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.yaxis.set_label_coords(0.048, 0.5, blended_transform_factory(axes.figure.transFigure, axes.transAxes))
    figure_style.label_ends(axes, list(labels.values()), theme)


def _style(line: Line, hues: Mapping[str, str]) -> MethodStyle:
    """Return the style of a line: the hue of its run, and a dash by its place among the run's curves."""
    dash = DOTTED if line.dotted else figure_style.DASHES[line.number % len(figure_style.DASHES)]
    return MethodStyle(hue=hues.get(line.run), dash=dash, marker="", width=1.0 if line.dotted else 1.6)


def draw_rows(rows: Mapping[str, Mapping[str, float | None]], label: str, title: str, theme: Theme) -> Drawing:
    """Draw a row for every name, with a mark for each of its values; a legend names the marks."""
    series = list(dict.fromkeys(name for row in rows.values() for name in row))
    names = [figure_style.shortened(name) for name in rows]
    height = 1.15 + 0.27 * len(rows)
    drawing = Drawing(figsize=(figure_style.WIDTH, height))
    axes = drawing.subplots()
    drawing.subplots_adjust(
        left=figure_style.name_room(names) + 0.03, right=0.96, top=1 - 0.62 / height, bottom=0.46 / height
    )
    hues = [theme.hues[hue] for hue in ("green", *figure_style.HUES)]
    handles = []
    for index, name in enumerate(series):
        marker, color = figure_style.MARKERS[index % len(figure_style.MARKERS)], hues[index % len(hues)]
        points = [(value, place) for place, row in enumerate(rows.values()) if (value := row.get(name)) is not None]
        axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, markersize=6, color=color, clip_on=False)
        handles.append(Line2D([], [], linestyle="", marker=marker, markersize=6, color=color, label=name))
    axes.axvline(0, color=theme.muted, linewidth=0.8)
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)
    drawing.suptitle(title, x=0.02, y=1 - 0.06 / height, ha="left", va="top", fontsize=11, fontweight="bold")
    drawing.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.01, 1 - 0.26 / height), ncols=len(series), frameon=False,
        fontsize=8.5, handletextpad=0.2, columnspacing=1.2, labelcolor=theme.muted,
    )  # fmt: skip
    return drawing


def finite(values: Sequence[Any]) -> Any:
    """Return the finite numbers among values as an array."""
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    return numbers[np.isfinite(numbers)]
