"""The style of figures: a light and a dark theme, one colour and dash for a method, labels at the ends of curves.

Families of topologies, the part of the name before a hyphen, share a hue (`pre` the colour of ink, `siamese` green, the
others in the order of the experiment), and their members differ by dash. The hues keep their distance under simulated
protanopia and deuteranopia, and a contrast of 3:1 on their surface; a test checks both.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scipy.optimize import isotonic_regression

Dash = tuple[float, tuple[float, ...]]

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
"""The page's fonts. Drawings are laid out in DejaVu Sans, which is wider than these: no text outgrows its place."""
PNG_DOTS_PER_INCH = 200
WIDTH = 4.6
"""The width of every figure in inches: small, so that its text can still be read on a telephone."""
LABEL_SIZE = 8.5
LETTER_WIDTH = 0.0725
"""Inches of a letter at that size, on average, in DejaVu Sans."""
LABEL_STOPS = (0.02, 0.09, 0.14, 0.36, 0.41)
"""Inches right of the axes: a leader's start, its bend and its end; the end of the line's sample; the text."""
LONGEST_NAME = 25
DASHES: tuple[Dash, ...] = ((0, ()), (0, (4, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "D", "v", "p", "<", "h", ">", "d")
RESERVED_HUES = {"pre": "ink", "siamese": "green"}
HUES = ("rust", "blue", "purple", "amber", "cyan", "pink", "brown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """The colours of one theme; `surface` equals the card of the page, the background of the figures."""

    name: str
    surface: str
    ink: str
    muted: str
    line: str
    fill: str
    danger: str
    hatch: str
    best: str
    worst: str
    hues: dict[str, str]


def _hues(colors: str) -> dict[str, str]:
    return dict(zip(("ink", "green", *HUES), colors.split(), strict=True))


LIGHT = Theme(
    name="light", surface="#ffffff", ink="#1b2129", muted="#5b6673", line="#dde2e8", fill="#f1f3f6", danger="#b3261e",
    hatch="#e3bcb8", best="#0b7a4b", worst="#eef6f1",
    hues=_hues("#1b2129 #229f6e #7e350e #1b4696 #9a1cf2 #c08014 #3396b2 #941f5b #634330"),
)  # fmt: skip
DARK = Theme(
    name="dark", surface="#171b21", ink="#e8ecf1", muted="#9aa6b3", line="#2e3640", fill="#222830", danger="#ff8a80",
    hatch="#5c3a38", best="#4fd69b", worst="#1d3029",
    hues=_hues("#e8ecf1 #65eaa0 #e65823 #66a9f3 #b73ef4 #f4ca5e #5db9ce #c9517f #b37354"),
)  # fmt: skip
THEMES = (LIGHT, DARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure to draw in a theme: its file name, title, caption and the text that replaces it."""

    name: str
    title: str
    caption: str
    alternative: str
    draw: Callable[[Theme], Drawing]


def render(figure: Figure, theme: Theme, form: Literal["svg", "png"]) -> bytes:
    """Draw a figure as a file; the same findings give the same bytes."""
    buffer = io.BytesIO()
    with applied(theme):
        drawing = figure.draw(theme)
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        drawing.savefig(buffer, format=form, dpi=PNG_DOTS_PER_INCH, metadata=metadata)
    if form == "png":
        return buffer.getvalue()
    # The page's fonts, and two decimals in the paths instead of six.
    svg = re.sub(r"(font: [^';\"]*px) [^;\"]*", rf"\1 {FONTS}", buffer.getvalue().decode())
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path.group()), svg).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodStyle:
    """How one method is drawn in every figure; without a hue, in the muted colour of the theme."""

    hue: str | None
    dash: Dash
    marker: str
    width: float

    def color(self, theme: Theme) -> str:
        """Return its colour in a theme."""
        return theme.muted if self.hue is None else theme.hues[self.hue]


def styles_of(methods: Sequence[str]) -> dict[str, MethodStyle]:
    """Give every method its style: by the family of its topology, and its turn in the family."""
    topologies = {method: method.partition("+")[0].partition(":")[0].strip() for method in methods}
    hues: dict[str, str] = {}
    members: Counter[str] = Counter()
    styles: dict[str, MethodStyle] = {}
    for index, method in enumerate(sorted(methods, key=lambda m: ("-" in topologies[m], m != topologies[m]))):
        family = topologies[method].partition("-")[0]
        taken = len(hues.keys() - RESERVED_HUES.keys())
        hues.setdefault(family, RESERVED_HUES.get(family, HUES[taken % len(HUES)]))
        styles[method] = MethodStyle(
            hue=hues[family],
            dash=DASHES[members[hues[family]] % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            width=2.2 if method == "siamese" else 1.6,
        )
        members[hues[family]] += 1
    return styles


def hues_of(runs: Sequence[str]) -> dict[str, str]:
    """Return a hue for each run of a page: `pre` and `siamese` have theirs in every figure, others the next ones."""
    others = cycle(HUES)
    return {run: RESERVED_HUES.get(run) or next(others) for run in runs}


def applied(theme: Theme) -> AbstractContextManager[None]:
    """Draw in a theme: text stays text in SVG, and the same data gives the same bytes."""
    settings: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "siamesenorm",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.labelsize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": theme.line,
        "axes.labelcolor": theme.muted,
        "axes.facecolor": theme.surface,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.line,
        "grid.linewidth": 0.6,
        "figure.facecolor": theme.surface,
        "hatch.linewidth": 0.8,
        "text.color": theme.ink,
        "xtick.color": theme.line,
        "ytick.color": theme.line,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "lines.solid_capstyle": "round",
    }
    return mpl.rc_context(settings)  # type: ignore[arg-type]


def scale_logarithmically(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with short numbers at 1, 2 and 5 of each decade."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveLabel:
    """The label at the end of a line: its text, the style of the line, and the height (data) of the end."""

    height: float
    text: str
    style: MethodStyle


def label_ends(axes: Axes, labels: Sequence[CurveLabel], theme: Theme) -> None:
    """Write the labels beside the right edge, each as near to the end of its curve as the others allow."""
    if not labels:
        return
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    pixels = [axes.transData.transform((axes.get_xlim()[0], label.height)) for label in labels]
    ends = np.clip([axes.transAxes.inverted().transform((0.0, pixel))[1] for _, pixel in pixels], 0.0, 1.0).tolist()
    gap = min(1.35 * LABEL_SIZE / 72 / box.height, 1.0 / len(labels))
    start, bend, sample, end_of_sample, text = (1 + inches / box.width for inches in LABEL_STOPS)
    for label, end, place in zip(labels, ends, spread(ends, gap, 0.0, 1.0), strict=True):
        style = label.style
        line: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": style.color(theme)}
        axes.plot([start, bend, sample], [end, place, place], linewidth=0.9, **line)
        axes.plot([sample, end_of_sample], [place, place], linewidth=style.width, linestyle=style.dash, **line)
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


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> npt.NDArray[np.float64]:
    """Return the nearest positions (least squares) at least `gap` apart, in the same order, moved into [low, high].

    With the gaps taken out, this is isotonic regression.
    """
    order = np.argsort(positions, kind="stable")
    gaps = gap * np.arange(len(positions))
    placed = isotonic_regression(np.asarray(positions, dtype=float)[order] - gaps).x
    result = np.empty(len(positions))
    result[order] = np.clip(placed, low, max(low, high - gap * (len(positions) - 1))) + gaps
    return result
