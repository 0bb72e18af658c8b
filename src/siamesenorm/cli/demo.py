"""siamesenorm demo: the whole road in a few minutes: built-in corpus, a grid of topologies, verdicts, a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from siamesenorm.cli.sweep import run_sweep
from siamesenorm.comparison.grid import Grid
from siamesenorm.data import PrepareConfig, prepare, show_progress
from siamesenorm.models.language import language_model_config
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.optimizer import OptimizerConfig

GRID = Grid(
    methods=("pre", "post", "hybridnorm", "siamese-post-pre", "siamese"),
    learning_rates=(2e-3, 8e-3, 3e-2),
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compare Pre-Norm, Post-Norm, HybridNorm and SiameseNorm (both forms) from a safe to a high learning rate.

    Bytes of the built-in corpus, a small model, minutes on two cores. Repeat the command to go on after an
    interruption; a finished demo only shows its result.
    """

    out: Path = Path("runs/demo")
    """Directory of data, runs and report."""
    jobs: int = 0
    """Runs at a time; as many as cores if 0."""


def run(arguments: Arguments) -> None:
    """Prepare the corpus, train the grid, show the table and the path of the report."""
    data = arguments.out / "data"
    with show_progress() as report:
        prepare(PrepareConfig(source="builtin", out=data), report)
    model = language_model_config("mini", topology="pre", dim=96, hidden=256, vocabulary=0)
    template = RunConfig(
        task=LanguageTaskConfig(data=data, model=model, validation_tokens=16_384),
        optimizer=OptimizerConfig(warmup_steps=40),
        steps=220,
        batch=8,
        validation_every=110,
        execution=Execution(threads=1),
    )
    sweep, page = arguments.out / "sweep", arguments.out / "report"
    run_sweep(GRID, template, sweep, arguments.jobs, report=page, command="siamesenorm demo")
