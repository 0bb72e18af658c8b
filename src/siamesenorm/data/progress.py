"""How far a preparation is: a bar when stderr is a terminal, a plain line now and then when it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a preparation stands, after each of its chunks."""

    stage: str
    """What is being done, for people."""
    documents: int = 0
    tokens: int = 0
    position: int = 0
    """Bytes of the source that were read."""
    size: int | None = None
    """Bytes of the source, None where that is not known."""


Report = Callable[[Progress], None]


@contextmanager
def show_progress() -> Iterator[Report]:
    """Give a function that shows progress on stderr, for as long as the context lasts."""
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _Lines()


class _Lines:
    """Plain lines, not more than one every few seconds."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = self._start
        self._stage = ""
        self._first_position = 0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._start, self._first_position = progress.stage, now, progress.position
        elif now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        print(describe(progress, self._seconds_left(progress, now)), file=sys.stderr, flush=True)

    def _seconds_left(self, progress: Progress, now: float) -> float | None:
        done = progress.position - self._first_position
        if progress.size is None or done <= 0:
            return None
        return (now - self._start) * (progress.size - progress.position) / done


def describe(progress: Progress, seconds_left: float | None = None) -> str:
    """Return progress as one line; a stage that counts nothing is only named."""
    if not progress.documents:
        return progress.stage
    parts = [f"{progress.documents:,} documents", f"{progress.tokens:,} tokens"]
    if progress.size:
        parts.insert(0, f"{progress.position / progress.size:.0%} of {progress.size / 1e6:,.1f} MB")
    if seconds_left is not None:
        parts.append(f"{seconds_left:,.0f} s left")
    return f"{progress.stage}: {', '.join(parts)}"


@contextmanager
def _bar() -> Iterator[Report]:
    """Give a function that draws a bar; it is imported only where there is a terminal to draw on."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prepare", total=None)

        def report(progress: Progress) -> None:
            text = f"{progress.stage}: {progress.documents:,} documents, {progress.tokens:,} tokens"
            bar.update(
                task,
                description=text if progress.documents else progress.stage,
                completed=progress.position,
                total=progress.size,
            )

        yield report
