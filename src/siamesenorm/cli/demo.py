"""siamesenorm demo: everything in a few minutes: a grid of topologies on built-in data, verdicts, a report."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc

from siamesenorm.cli.prepare import prepare_with_progress
from siamesenorm.cli.sweep import run_sweep, sweep_experiment
from siamesenorm.comparison.sweep_grid import SweepGrid
from siamesenorm.data import PrepareConfig
from siamesenorm.errors import unknown
from siamesenorm.training.demos import DEMOS


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """Compare Pre-Norm, Post-Norm and SiameseNorm (both forms), among others, from a safe to a high learning rate.

    A small model on built-in data: bytes of text, or scikit-learn's digits. The number of runs is printed first, the
    time left after the first run. Repeat the command to resume it after an interruption; a finished demo only shows its
    result.
    """

    task: Annotated[str, Doc(f"What is trained: {', '.join(DEMOS)}.")] = "language"
    out: Path | None = None
    """Directory of data, runs and report; runs/demo, or runs/demo-TASK, if not given."""
    jobs: int = 0
    """Runs at a time; as many as cores if 0."""

    def __post_init__(self) -> None:
        if self.task not in DEMOS:
            raise unknown("task of a demo", self.task, DEMOS)


Arguments = DemoArguments


def run(arguments: DemoArguments) -> None:
    """Prepare the data, train the grid, show the table and the path of the report."""
    demo = DEMOS[arguments.task]
    out = arguments.out or Path(demo.out)
    grid, template = SweepGrid(methods=demo.methods, learning_rates=demo.learning_rates), demo.run(out / "data")
    runs = len(grid.all_methods) * len(grid.learning_rates)
    print(
        f"{len(grid.all_methods)} methods at {len(grid.learning_rates)} learning rates: {runs} runs of "
        f"{template.steps} steps, {demo.disk} in {out}; the time left is printed after the first run",
        file=sys.stderr,
        flush=True,
    )
    if demo.source:
        prepare_with_progress(PrepareConfig(source=demo.source, out=out / "data"))
    command = f"siamesenorm demo --task {arguments.task}"
    experiment = sweep_experiment(grid, template, out / "sweep", arguments.jobs, command=command)
    run_sweep(grid, experiment, report=out / "report")
