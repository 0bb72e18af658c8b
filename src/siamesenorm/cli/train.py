"""siamesenorm train: one run, from a preset with overrides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from siamesenorm.analysis.monitor_instrument import MonitorOptions
from siamesenorm.cli import is_first_process
from siamesenorm.cli.recipes import RunArguments, RunCommand
from siamesenorm.files import encode_json
from siamesenorm.training.instruments import Console, build_trackers
from siamesenorm.training.loop import train
from siamesenorm.training.warm_start import continue_run


@dataclass(frozen=True, kw_only=True)
class Train(RunCommand):
    """Train one model, or resume it where it stopped."""

    start: Path | None = None
    """Directory of a finished run whose weights to start from, converted to --model.topology and --model.norm."""
    out: Path | None = None
    """Directory of the run; runs/<id> if not given."""
    monitor: MonitorOptions = MonitorOptions()
    """Streams, gradients and updates in the record."""
    json: bool = False
    """Print the verdict as JSON."""


Arguments = RunArguments(Train)


def run(arguments: Train) -> None:
    """Train, showing progress, and print the verdict."""
    start = arguments.start
    config = arguments.run.resolved() if start is None else continue_run(arguments.run, start)
    directory = arguments.out or Path("runs") / config.identity[:12]
    instruments = (Console(), *build_trackers(config, directory), *arguments.monitor.instruments())
    verdict = train(config, directory, instruments=instruments)
    if not is_first_process():
        return
    if arguments.json:
        print(encode_json(verdict.to_json()))
    else:
        print(f"{directory}: {verdict.sentence()}\n(siamesenorm report {directory} makes a page of it)")
