"""Theory as experiments of seconds: a measurement with its table, its figure, and the claims that it decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure as Drawing

from siamesenorm.comparison import figure_style
from siamesenorm.comparison.figure_style import CurveLabel, Figure, MethodStyle, Theme
from siamesenorm.comparison.report_parts import Code, Gallery, Report, Statement, Statements, Table
from siamesenorm.files import encode_json

HEIGHT = 3.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of a paper, whether it holds in the measurement, and the number that decides."""

    text: str
    holds: bool
    measured: str

    @property
    def outcome(self) -> str:
        """Whether it holds, in words."""
        return "holds" if self.holds else "does not hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoryResult:
    """What an experiment has shown; `record` has JSON values, and `paper` is an arXiv number or a page."""

    name: str
    title: str
    paper: str
    setting: str
    record: Mapping[str, Any]
    table: Table
    figure: Figure
    claims: tuple[Claim, ...]

    def report(self) -> Report:
        """Return the result as a page: claims, figure, table, and the record as a file."""
        link = (f"arXiv {self.paper}", f"https://arxiv.org/abs/{self.paper}") if self.paper[:4].isdigit() else None
        claims = tuple(
            Statement(claim.outcome.capitalize(), f"{claim.text} Measured: {claim.measured}.", link)
            for claim in self.claims
        )
        return Report(
            title=self.title,
            subject=(self.setting,),
            sections={
                "What came out": Statements(claims, tone="conclusions"),
                "Figure": Gallery((self.figure,)),
                self.table.title: self.table,
                "How to repeat it": Code(f"siamesenorm reproduce {self.name}"),
            },
            records={f"{self.name}.json": f"{encode_json(self.record, indent=1)}\n"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TheoryLine:
    """A line of a figure."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: MethodStyle


def draw_lines(
    lines: Sequence[TheoryLine],
    theme: Theme,
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_scale: str = "linear",
    y_scale: str = "log",
    markers: bool = True,
) -> Drawing:
    """Draw lines with their names at the right edge."""
    room = figure_style.label_room([line.name for line in lines])
    drawing = Drawing(figsize=(figure_style.WIDTH, HEIGHT))
    axes = drawing.subplots()
    drawing.subplots_adjust(left=0.2, right=1 - room, top=1 - 0.4 / HEIGHT, bottom=0.52 / HEIGHT)
    axes.set_xscale(x_scale)
    axes.set_yscale(y_scale)
    for line in lines:
        axes.plot(
            line.x,
            line.y,
            color=line.style.color(theme),
            linewidth=line.style.width,
            linestyle=line.style.dash,
            marker=line.style.marker if markers else "",
            markersize=4.5,
            markeredgecolor=theme.surface,
            markeredgewidth=0.6,
        )
    axes.set_title(title, x=-0.2)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.margins(x=0.03)
    labels = [CurveLabel(height=line.y[-1], text=line.name, style=line.style) for line in lines]
    figure_style.label_ends(axes, labels, theme)
    return drawing


def plain_styles(names: Sequence[str]) -> dict[str, MethodStyle]:
    """Return a style for each name that is no method: a hue, a dash and a marker of its own."""
    hues = ("ink", "green", *figure_style.HUES)
    return {
        name: MethodStyle(
            hue=hues[place % len(hues)],
            dash=figure_style.DASHES[place % len(figure_style.DASHES)],
            marker=figure_style.MARKERS[place % len(figure_style.MARKERS)],
            width=1.6,
        )
        for place, name in enumerate(names)
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p of y = c x^p: the slope of the least-squares line of log y over log x."""
    logs = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True)]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in logs)
    return float(covariance / sum((a - mean_x) ** 2 for a, _ in logs))
