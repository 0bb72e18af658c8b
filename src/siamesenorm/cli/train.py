"""siamesenorm train: one language model, from a recipe with overrides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from siamesenorm.cli.recipes import recipe_arguments
from siamesenorm.files import encode_json
from siamesenorm.training.console import ConsoleObserver
from siamesenorm.training.loop import Observer, train
from siamesenorm.training.plan import RunPlan
from siamesenorm.training.start import resolve_continued
from siamesenorm.training.trackers import build_trackers


@dataclass(frozen=True, kw_only=True)
class Train(RunPlan):
    """Train one language model, or go on with it where it stopped."""

    start: Path | None = None
    """Directory of a finished run whose weights to start from, converted to --model.topology and --model.norm."""
    out: Path | None = None
    """Directory of the run; runs/<id> if not given."""
    json: bool = False
    """Print the verdict as JSON."""


Arguments = recipe_arguments(Train)


def run(arguments: Train) -> None:
    """Train, showing progress, and print the verdict."""
    config = arguments.resolve() if arguments.start is None else resolve_continued(arguments, arguments.start)
    directory = arguments.out or Path("runs") / config.identity[:12]
    console = ConsoleObserver()
    observers: tuple[Observer, ...] = (console, *build_trackers(config, directory))
    try:
        verdict = train(config, directory, observers=observers)
    finally:
        console.close()
    print(encode_json(verdict.to_json()) if arguments.json else f"{directory}: {verdict.sentence()}")
