"""Progress for people, on standard error: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

BAR_WIDTH = 40

Progress = Callable[[float, str], None]
"""Is called with how much is done, and a text."""


def format_duration(seconds: float) -> str:
    """Return a duration as text in the unit that fits: `45 s`, `12 min`, `3 h 20 min`, `5 days`."""
    minutes = seconds / 60
    if not minutes < 60 * 24 * 1000:
        return "more than 1,000 days"
    if minutes < 1.5:
        return f"{seconds:.0f} s"
    if minutes < 89.5:
        return f"{minutes:.0f} min"
    if minutes < 47.5 * 60:
        hours, rest = divmod(round(minutes), 60)
        return f"{hours} h {rest} min"
    return f"{minutes / 60 / 24:.0f} days"


class ProgressDisplay:
    """Show how much of some work is done, and how long the rest will take.

    Args:
        total: Amount of work, None where it is unknown.
        before: Part of `total` that was done before, and does not count for the speed.
        unit: Unit of `total`, such as "tokens": the speed is shown in it; no speed is shown without it.
        line_seconds: Shortest time between two plain lines.
        above: Returns what to draw above the bar.
        keep: Leave the last state on the terminal.
    """

    def __init__(
        self,
        total: float | None = None,
        before: float = 0,
        *,
        unit: str = "",
        line_seconds: float = 10.0,
        above: Callable[[], RenderableType] | None = None,
        keep: bool = False,
    ) -> None:
        self.terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._unit = unit
        self._line_seconds = line_seconds
        self._above = above
        self._live: Live | None = None
        if self.terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=not keep)
            self._live.start()
        self.start(total, before)

    def __enter__(self) -> Self:
        """Return the display."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the display."""
        self.close()

    def start(self, total: float | None = None, before: float = 0) -> None:
        """Start a stage of work: its clock begins at zero, and its first update prints a line at once."""
        self._begin = time.monotonic()
        self._last_line: float | None = None
        self._text = ""
        self.measure(before, total, before)

    def measure(self, done: float, total: float | None, before: float) -> None:
        """Set how much is done without showing it."""
        self.done, self.total, self.before = done, total, before

    def update(self, done: float, text: str) -> None:
        """Show that `done` of the work is done, with a text beside it."""
        finished = self.total is not None and self.done < self.total <= done
        self.done, self._text, now = done, text, time.monotonic()
        if self._live is not None:
            self._live.update(self._draw())
        elif self._last_line is None or now - self._last_line >= self._line_seconds or finished:
            self._last_line = now
            self.line(", ".join(filter(None, (text, self.speed(), self.time_left()))))

    def line(self, text: str) -> None:
        """Print a line; on a terminal above the bar."""
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(text))
        else:
            print(text, file=sys.stderr, flush=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def speed(self) -> str:
        """Return the speed as text, such as `1,200 tokens/s`, or nothing where there is no unit or no measurement."""
        rate = self._rate()
        return f"{rate:,.0f} {self._unit}/s" if self._unit and rate > 0 else ""

    def time_left(self) -> str:
        """Return the time left as text, such as `12 min left`, or nothing where it is unknown or no work is left."""
        rate = self._rate()
        if self.total is None or self.done >= self.total or rate <= 0:
            return ""
        return f"{format_duration((self.total - self.done) / rate)} left"

    def close(self) -> None:
        """Remove the bar, or draw it for the last time; later lines are plain."""
        if self._live is not None:
            self._live.update(self._draw(), refresh=True)
            self._live.stop()
            self._live = None

    def _rate(self) -> float:
        return (self.done - self.before) / max(self.elapsed, 1e-9)

    def _draw(self) -> RenderableType:
        """Return the bar, its text and the time left, below what `above` returns."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = ProgressBar(total=self.total and max(self.total, 1), completed=self.done, width=BAR_WIDTH)
        row = Table.grid(padding=(0, 2))
        row.add_row(bar, *map(Text, filter(None, (self._text, self.speed(), self.time_left()))))
        return row if self._above is None else Group(self._above(), row)
