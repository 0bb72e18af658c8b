"""How figures look: a light and a dark theme, and one colour and dash for a method in every figure.

Families of topologies, the part of the name before a hyphen, share a hue (`pre` the colour of ink, `siamese` green, the
others in the order of the sweep), and their members differ by dash. The hues keep their distance under simulated
protanopia and deuteranopia, and a contrast of 3:1 on their surface; a test holds them to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl

from siamesenorm.comparison.results import Method

Dash = tuple[float, tuple[float, ...]]

DASHES: tuple[Dash, ...] = ((0, ()), (0, (4, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "D", "v", "p", "<", "h", ">", "d")
RESERVED_HUES = {"pre": "ink", "siamese": "green"}
HUES = ("rust", "blue", "purple", "amber", "cyan", "pink", "brown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """The colours of one theme; `surface` equals the page's card, on which the figures lie."""

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


LIGHT = Theme(
    name="light",
    surface="#ffffff",
    ink="#1b2129",
    muted="#5b6673",
    line="#dde2e8",
    fill="#f1f3f6",
    danger="#b3261e",
    hatch="#e3bcb8",
    best="#0b7a4b",
    worst="#eef6f1",
    hues={
        "ink": "#1b2129",
        "green": "#229f6e",
        "rust": "#7e350e",
        "blue": "#1b4696",
        "purple": "#9a1cf2",
        "amber": "#c08014",
        "cyan": "#3396b2",
        "pink": "#941f5b",
        "brown": "#634330",
    },
)

DARK = Theme(
    name="dark",
    surface="#171b21",
    ink="#e8ecf1",
    muted="#9aa6b3",
    line="#2e3640",
    fill="#222830",
    danger="#ff8a80",
    hatch="#5c3a38",
    best="#4fd69b",
    worst="#1d3029",
    hues={
        "ink": "#e8ecf1",
        "green": "#65eaa0",
        "rust": "#e65823",
        "blue": "#66a9f3",
        "purple": "#b73ef4",
        "amber": "#f4ca5e",
        "cyan": "#5db9ce",
        "pink": "#c9517f",
        "brown": "#b37354",
    },
)

THEMES = (LIGHT, DARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodStyle:
    """How one method is drawn in every figure."""

    hue: str
    dash: Dash
    marker: str
    width: float

    def color(self, theme: Theme) -> str:
        """Return its colour in a theme."""
        return theme.hues[self.hue]


def styles_of(methods: Sequence[Method]) -> dict[Method, MethodStyle]:
    """Give every method its style: by the family of its topology, and its turn in the family."""
    hues: dict[str, str] = {}
    members: dict[str, int] = {}
    styles: dict[Method, MethodStyle] = {}
    for index, method in enumerate(sorted(methods, key=lambda m: ("-" in m.topology, m.name != m.topology))):
        family = method.topology.partition("-")[0]
        taken = len(hues.keys() - RESERVED_HUES.keys())
        hues.setdefault(family, RESERVED_HUES.get(family, HUES[taken % len(HUES)]))
        turn = members.get(hues[family], 0)
        members[hues[family]] = turn + 1
        styles[method] = MethodStyle(
            hue=hues[family],
            dash=DASHES[turn % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            width=2.2 if method.topology == "siamese" else 1.6,
        )
    return styles


@contextmanager
def applied(theme: Theme) -> Iterator[None]:
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
    with mpl.rc_context(settings):  # type: ignore[arg-type]
        yield
