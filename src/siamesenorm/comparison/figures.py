"""The figures of a report, each drawn for a light and a dark theme: curves by learning rate, frontier, sensitivity.

Curves show the selection seed only: on one seed all methods see the same data in the same order, so that their
differences are theirs and not the data's.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from siamesenorm.comparison import quantities, theme
from siamesenorm.comparison.curves import difference, finite_part, smoothed, spread, thinned
from siamesenorm.comparison.findings import Findings, baseline_of
from siamesenorm.comparison.results import SPIKED, Curve, Method, RunResult
from siamesenorm.comparison.theme import MethodStyle, Theme

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
"""The page's fonts; drawings are laid out in DejaVu Sans, which is wider than all of them, so nothing grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure to be drawn: its file name, title, caption, a text that replaces it, and how to draw it."""

    name: str
    title: str
    caption: str
    alternative: str
    draw: Callable[[Theme], Drawing]
