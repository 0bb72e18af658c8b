"""How far a preparation is, and how the command line shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from siamesenorm.progress import ProgressDisplay

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareProgress:
    """How far a preparation is, after each of its shards."""

    stage: str
    """What is being done, for people."""
    documents: int = 0
    tokens: int = 0
    position: int = 0
    """Bytes of the source that were read."""
    size: int | None = None
    """Bytes of the source, None where that is unknown."""

    def __str__(self) -> str:
        """Return one line; a stage that counts nothing is only named."""
        if not self.documents:
            return self.stage
        share = f"{self.position / self.size:.0%} of {self.size / 1e6:,.1f} MB, " if self.size else ""
        return f"{self.stage}: {share}{self.documents:,} documents, {self.tokens:,} tokens"


Report = Callable[[PrepareProgress], None]


@contextmanager
def show_progress() -> Iterator[Report]:
    """Return a function that shows progress on standard error while the context is open."""
    with ProgressDisplay(line_seconds=SECONDS_BETWEEN_LINES) as display:
        stage = ""

        def report(progress: PrepareProgress) -> None:
            nonlocal stage
            if progress.stage != stage:
                stage = progress.stage
                display.start(progress.size, progress.position)
            display.update(progress.position, str(progress))

        yield report
