"""siamesenorm demo: everything in a few minutes: built-in corpus, a grid of topologies, verdicts, a report."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from siamesenorm.cli.prepare import prepare_with_progress
from siamesenorm.cli.sweep import run_sweep, sweep_experiment
from siamesenorm.comparison.sweep_grid import SweepGrid
from siamesenorm.data import PrepareConfig
from siamesenorm.models.language import language_model_config
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.optimizer import OptimizerConfig

GRID = SweepGrid()
STEPS = 220


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """Compare Pre-Norm, Post-Norm, HybridNorm and SiameseNorm (both forms) from a safe to a high learning rate.

    Bytes of the built-in corpus, a small model: 18 runs of 220 steps and about 75 MB of disk. The time left is printed
    after the first run. Repeat the command to resume it after an interruption; a finished demo only shows its result.
    """

    out: Path = Path("runs/demo")
    """Directory of data, runs and report."""
    jobs: int = 0
    """Runs at a time; as many as cores if 0."""


Arguments = DemoArguments


def run(arguments: DemoArguments) -> None:
    """Prepare the corpus, train the grid, show the table and the path of the report."""
    runs = len(GRID.all_methods) * len(GRID.learning_rates)
    print(
        f"{len(GRID.all_methods)} methods at {len(GRID.learning_rates)} learning rates: {runs} runs of {STEPS} steps, "
        f"about 75 MB in {arguments.out}; the time left is printed after the first run",
        file=sys.stderr,
        flush=True,
    )
    data = arguments.out / "data"
    prepare_with_progress(PrepareConfig(source="builtin", out=data))
    experiment = sweep_experiment(GRID, demo_run(data), arguments.out / "sweep", arguments.jobs, "siamesenorm demo")
    run_sweep(GRID, experiment, report=arguments.out / "report")


def demo_run(data: Path) -> RunConfig:
    """Return the run from which those of the demo are made."""
    model = language_model_config("mini", topology="pre", dim=96, hidden=256, vocabulary=0)
    return RunConfig(
        task=LanguageTaskConfig(data=data, model=model, validation_tokens=16_384),
        optimizer=OptimizerConfig(warmup_steps=40),
        steps=STEPS,
        batch=8,
        validation_every=110,
        execution=Execution(threads=1),
    )
