"""siamesenorm prepare: text to memory-mapped tokens."""

from __future__ import annotations

from siamesenorm.data import PrepareConfig, prepare

Arguments = PrepareConfig


def run(arguments: PrepareConfig) -> None:
    """Prepare the data and describe it."""
    print(prepare(arguments).describe())
