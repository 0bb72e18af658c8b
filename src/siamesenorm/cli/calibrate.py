"""siamesenorm calibrate: how often the verdict is wrong, on real safe runs and on injected faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.files import disk_errors
from siamesenorm.training.calibration import calibrate, read_runs
from siamesenorm.training.verdict import Thresholds


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Count false positives on safe runs, and detections of spikes, divergences and plateaus injected into them."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of runs known to be safe, such as Pre-Norm at a low learning rate."""
    out: Path | None = None
    """File for the result as JSON."""
    thresholds: Thresholds = Thresholds()
    """What the words mean."""


def run(arguments: Arguments) -> None:
    """Calibrate and print the tables."""
    report = calibrate(read_runs(arguments.runs), thresholds=arguments.thresholds)
    if arguments.out is not None:
        with disk_errors(arguments.out):
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            report.write(arguments.out)
    print(report.markdown())
