"""siamesenorm calibrate: how often the verdict is wrong, on real safe runs and on injected faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.cli.verdict import curves_at
from siamesenorm.files import disk_errors
from siamesenorm.progress import ProgressDisplay
from siamesenorm.training.verdict import Thresholds
from siamesenorm.training.verdict_calibration import DEFAULT_GRID, calibrate, read_runs


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Count false positives on safe runs, and detections of spikes, divergences and plateaus injected into them."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Runs known to be safe, such as Pre-Norm at a low learning rate, or directories of them; of any task."""
    out: Path | None = None
    """File for the result as JSON."""
    thresholds: Thresholds = Thresholds()
    """Numbers in the definitions of the four labels."""


def run(arguments: Arguments) -> None:
    """Calibrate and print the tables."""
    curves = read_runs(path for given in arguments.runs for path in curves_at(given))
    if arguments.out is not None:
        with disk_errors(arguments.out):
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with ProgressDisplay(DEFAULT_GRID.cells) as progress:
        report = calibrate(
            curves,
            thresholds=arguments.thresholds,
            on_detection=lambda detection: progress.update(progress.done + 1, str(detection.fault)),
        )
    if arguments.out is not None:
        with disk_errors(arguments.out):
            report.write(arguments.out)
    print(report.markdown())
