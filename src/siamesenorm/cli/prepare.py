"""siamesenorm prepare: text to memory-mapped tokens."""

from __future__ import annotations

from siamesenorm.data import PrepareConfig, PreparedData, PrepareProgress, prepare
from siamesenorm.progress import ProgressDisplay

Arguments = PrepareConfig


def run(arguments: PrepareConfig) -> None:
    """Prepare the data, showing progress, and describe it."""
    print(prepare_with_progress(arguments).describe())


def prepare_with_progress(config: PrepareConfig) -> PreparedData:
    """Prepare data and show the progress on standard error."""
    with ProgressDisplay(line_seconds=5) as display:
        stage = ""

        def report(progress: PrepareProgress) -> None:
            nonlocal stage
            if progress.stage != stage:
                stage = progress.stage
                display.start(progress.size, progress.position)
            display.update(progress.position, str(progress))

        return prepare(config, report)
