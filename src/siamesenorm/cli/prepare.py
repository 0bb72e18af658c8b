"""siamesenorm prepare: text to memory-mapped tokens."""

from __future__ import annotations

from siamesenorm.data import PrepareConfig, prepare, show_progress

Arguments = PrepareConfig


def run(arguments: PrepareConfig) -> None:
    """Prepare the data, showing progress, and describe it."""
    with show_progress() as report:
        data = prepare(arguments, report)
    print(data.describe())
