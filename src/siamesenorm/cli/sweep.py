"""siamesenorm sweep: a grid of methods, learning rates and seeds, then the report."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import tyro

from siamesenorm.cli.output import command_line
from siamesenorm.cli.report import build_report, show_report
from siamesenorm.cli.train import RunArguments, RunCommand
from siamesenorm.comparison.experiment_console import ExperimentConsole
from siamesenorm.comparison.experiment_runner import Experiment, Stages, usual_jobs
from siamesenorm.comparison.sweep_grid import SweepGrid, comparisons_of
from siamesenorm.errors import UserError
from siamesenorm.models.transformer import TransformerConfig
from siamesenorm.training.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class SweepArguments(RunCommand):
    """Train a grid of methods x learning rates x seeds, several at a time; repeat the command to resume it.

    A method is a topology, and what differs after plus signs: "siamese", "pre + qkv", "dhc-2:streams=4 + seednorm".
    """

    set_by = MappingProxyType({"--model.topology": "--methods", "--optimizer.learning-rate": "--learning-rates"})

    grid: Annotated[SweepGrid, tyro.conf.arg(name="")] = SweepGrid()
    """Methods, learning rates and seeds."""
    jobs: int = 0
    """Runs at a time; as many as cores (or GPUs) if 0. Step times are reported only of runs that ran alone (1)."""
    mixed: bool = False
    """Allow runs that are computed with different kernels, or partly compiled."""
    title: str = ""
    """Title of the report; methods and data if not given."""
    out: Path = Path("runs/sweep")
    """Directory of the sweep."""


Arguments = RunArguments(SweepArguments)


def run(arguments: SweepArguments) -> None:
    """Train the grid, then write the report."""
    command = command_line()
    experiment = sweep_experiment(arguments.grid, arguments.run, arguments.out, arguments.jobs, command)
    experiment.mixed = arguments.mixed
    run_sweep(arguments.grid, experiment, report=arguments.out / "report", title=arguments.title)


def sweep_experiment(grid: SweepGrid, run: RunConfig, out: Path, jobs: int, command: str) -> Experiment:
    """Return the experiment of a grid; raises UserError for options that methods have, and for bad ones."""
    template = template_of(run)
    return Experiment(
        directory=out,
        template=template,
        jobs=chosen_jobs(jobs, template),
        comparisons=comparisons_of(grid.all_methods, template),
        command=command,
        notes=tuple(
            f"{control} is added as a control: Pre-Norm with the QKV-norm of other methods (--no-control)"
            for control in grid.added_controls
        ),
    )


def run_sweep(grid: SweepGrid, experiment: Experiment, *, report: Path, title: str = "") -> None:
    """Train a grid and show its report; raises UserError at the end when runs have failed."""
    train_experiment(experiment, grid.stages)
    if not experiment.nothing_finished:
        show_report(build_report(experiment.directory, title=title, mixed=experiment.mixed), report)
    raise_failures(experiment)


def train_experiment(experiment: Experiment, stages: Stages) -> None:
    """Train an experiment, with its progress on the console."""
    with contextlib.closing(ExperimentConsole(experiment.directory)) as experiment.observer:
        experiment.train(stages)


def raise_failures(experiment: Experiment) -> None:
    """Raise UserError when runs have failed."""
    if experiment.failures:
        job, error = next(iter(experiment.failures.items()))
        failed = f"{len(experiment.failures)} of {len(experiment.trained)} runs failed"
        raise UserError(f"{failed}, such as {job.name}: {error}")


def chosen_jobs(jobs: int, template: RunConfig, per_gpu: int = 1) -> int:
    """Return the number of runs at a time; raises UserError for a negative one."""
    if jobs < 0:
        raise UserError(f"jobs is {jobs}: choose at least 1, or 0 for one a core")
    return jobs or usual_jobs(template.execution.device, template.execution.threads, per_gpu)


def template_of(run: RunConfig) -> RunConfig:
    """Return the run that all runs of a grid are made from; raises UserError for options that methods have."""
    model = run.task.model
    if isinstance(model, TransformerConfig) and model.attention_norm != "auto":
        value = model.attention_norm
        raise UserError(f"attention norm {value!r} for all methods: write it in the methods, as in 'pre + {value}'")
    execution = dataclasses.replace(run.execution, threads=run.execution.threads or 1)
    return dataclasses.replace(run, execution=execution).with_method("pre").resolved()
