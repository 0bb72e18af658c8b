"""siamesenorm sweep: a grid of methods, learning rates and seeds, then the report."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc

from siamesenorm.cli.recipes import RunArguments, RunCommand
from siamesenorm.cli.report import show_report
from siamesenorm.comparison.console import SweepConsole
from siamesenorm.comparison.grid import Grid
from siamesenorm.comparison.sweep import SweepRun, shared_gpus
from siamesenorm.errors import UserError
from siamesenorm.topologies import available_topologies
from siamesenorm.training.config import RunConfig

Methods = Annotated[
    tuple[str, ...],
    Doc(f"What to compare, each in quotes if it holds a plus sign. Topologies: {', '.join(available_topologies())}."),
]


@dataclass(frozen=True, kw_only=True)
class SweepArguments(RunCommand):
    """Train a grid of methods x learning rates x seeds, several at a time; repeat the command to go on.

    A method is a topology, and what differs after plus signs: "siamese", "pre + qkv", "dhc-2:streams=4 + seednorm".
    """

    methods: Methods = ("pre", "post", "hybridnorm", "siamese-post-pre", "siamese")
    learning_rates: tuple[float, ...] = (2e-3, 8e-3, 3e-2)
    """Peak learning rates."""
    seeds: tuple[int, ...] = ()
    """Further seeds for each method at its chosen rate; the rate is chosen with --seed."""
    reported: tuple[str, ...] = ()
    """Methods that run with the further seeds; all if not given."""
    control: bool = True
    """Add Pre-Norm with QKV-norm where a method has QKV-norm."""
    jobs: int = 0
    """Runs at a time; as many as cores (or GPUs) if 0."""
    out: Path = Path("runs/sweep")
    """Directory of the sweep."""


Arguments = RunArguments(SweepArguments)


def run(arguments: SweepArguments) -> None:
    """Train the grid, then write the report."""
    grid = Grid(
        methods=arguments.methods,
        learning_rates=arguments.learning_rates,
        selection_seed=arguments.run.seed,
        seeds=arguments.seeds,
        reported=arguments.reported,
        control=arguments.control,
    )
    command = shlex.join(["siamesenorm", *sys.argv[1:]])
    run_sweep(grid, arguments.run, arguments.out, arguments.jobs, report=arguments.out / "report", command=command)


def run_sweep(grid: Grid, run: RunConfig, out: Path, jobs: int, *, report: Path, command: str) -> None:
    """Train a grid from a run and show its report; raises UserError at the end when runs have failed."""
    if jobs < 0:
        raise UserError(f"jobs is {jobs}: choose at least 1, or 0 for one a core")
    template = _template(run)
    jobs = jobs or jobs_at_hand(template.execution.device, template.execution.threads)
    with SweepConsole(out) as console:
        sweep = SweepRun(grid=grid, template=template, directory=out, jobs=jobs, observer=console, command=command)
        sweep.run()
    if len(sweep.failures) < len(sweep.planned):
        show_report(out, report)
    if sweep.failures:
        name, error = next(iter(sweep.failures.items()))
        raise UserError(f"{len(sweep.failures)} of {len(sweep.planned)} runs failed, such as {name}: {error}")


def _template(run: RunConfig) -> RunConfig:
    """Return the run that all runs of a grid are made from; raises UserError for options that methods have."""
    if run.task.model.attention_norm != "auto":
        value = run.task.model.attention_norm
        raise UserError(f"attention norm {value!r} for all methods: write it in the methods, as in 'pre + {value}'")
    execution = dataclasses.replace(run.execution, threads=run.execution.threads or 1)
    return dataclasses.replace(run, execution=execution).with_method("pre").resolved()


def jobs_at_hand(device: str, threads: int) -> int:
    """Return how many runs fit at a time: one a GPU, or one for every `threads` cores."""
    if not device.startswith("cpu"):
        return max(1, len(shared_gpus(device)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)
