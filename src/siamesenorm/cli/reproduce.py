"""siamesenorm reproduce: a table or figure of the papers, from training to its report, at a scale that can be paid."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from typing_extensions import Doc

from siamesenorm.cli.report import build_report, show_report
from siamesenorm.cli.sweep import chosen_jobs, raise_failures, train_experiment
from siamesenorm.cli.train import text_constructors
from siamesenorm.comparison.experiment_runner import Experiment, OutOfTime
from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModelConfig, language_model_config
from siamesenorm.norms import NormSpec
from siamesenorm.recipes.continued import ContinuedPlan
from siamesenorm.recipes.item import Item
from siamesenorm.recipes.items import ITEMS, find_item
from siamesenorm.recipes.scales import Scale, find_workload
from siamesenorm.recipes.theory_experiments import THEORY
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.optimizer import OptimizerConfig

NAMES = ", ".join([*ITEMS, *THEORY, "continued", "all"])
MODEL = language_model_config("mini", dim=64, hidden=176, topology="pre", vocabulary=0)


@dataclass(frozen=True, kw_only=True)
class ReproduceArguments:
    """Train what an item needs and is not there yet, evaluate it, and set it beside the published numbers.

    Repeat the command to resume it after an interruption. Runs are shared between items.
    """

    item: Annotated[
        str, tyro.conf.Positional, Doc(f"What to reproduce: {', '.join([*ITEMS, *THEORY, 'continued', 'all'])}.")
    ] = "all"
    scale: Scale = Scale.MINI
    """How much is trained: mini (two cores), small (one GPU, an hour), full (the papers' settings)."""
    data: Path | None = None
    """Directory of prepared text; without it no language model is trained."""
    images: Path | None = None
    """Labelled images to classify: CIFAR-10 at the scale mini, ImageNet at full."""
    drawings: Path | None = None
    """Images to generate: MNIST at the scale mini, ImageNet at full."""
    out: Path = Path("runs/reproduce")
    """Directory of the runs, the plans and the reports."""
    runs: tuple[Path, ...] = ()
    """Further directories of runs, such as benchmarks/books/runs: what has ended there is not trained again."""
    jobs: int = 0
    """Runs at a time; as many as cores (or GPUs) if 0."""
    minutes: float = 0.0
    """Stop after so many minutes, to be resumed by the same command; 0 does not stop."""
    device: str = ""
    """Device of the runs, if not that of the scale."""


@dataclass(frozen=True, kw_only=True)
class ContinuedArguments:
    """Train Pre-Norm models, convert them, continue both on the same batches, and report the differences by seed.

    Repeat the command to resume it after an interruption; without --data it reports on what has been trained.
    """

    data: Path | None = None
    """Directory of prepared data; without it nothing is trained."""
    model: LanguageModelConfig = MODEL
    """The model, whatever its residual path."""
    plan: Annotated[ContinuedPlan, tyro.conf.arg(name="")] = ContinuedPlan()
    """Seeds, rates and steps."""
    batch: int = 16
    """Samples of an optimizer step."""
    jobs: int = 0
    """Runs at a time; as many as cores (or GPUs) if 0."""
    title: str = ""
    """Title of the report."""
    out: Path = Path("runs/continued")
    """Directory of the experiment."""
    execution: Execution = Execution(threads=1, keep_checkpoints=1)
    """How the runs are carried out."""


class Arguments:
    """The arguments, with topologies and norms read from text; those of `continued` are its own."""

    @staticmethod
    def prepare(words: Sequence[str]) -> tuple[Any, list[str], tyro.constructors.ConstructorRegistry]:
        """Return the type that tyro reads, the words, and how tyro reads topologies and norms."""
        if words[:1] == ["continued"]:
            return ContinuedArguments, list(words[1:]), text_constructors(NormSpec())
        return ReproduceArguments, list(words), text_constructors(NormSpec())


def run(arguments: ReproduceArguments | ContinuedArguments) -> None:
    """Train what is missing, then report; raises UserError when runs have failed."""
    if isinstance(arguments, ContinuedArguments):
        reproduce_continued(arguments)
        return
    if arguments.item in THEORY:
        reproduce_theory(arguments)
        return
    items = list(ITEMS.values()) if arguments.item == "all" else [find_item(arguments.item)]
    deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    try:
        for item in items:
            for experiment in train_item(item, arguments, deadline):
                raise_failures(experiment)
    except OutOfTime:
        print(f"stopped after {arguments.minutes:g} minutes; repeat the command to resume")


def reproduce_theory(arguments: ReproduceArguments) -> None:
    """Run an experiment on theory, and show its claims and its report."""
    result = THEORY[arguments.item]()
    for claim in result.claims:
        print(f"{claim.outcome}: {claim.text} Measured: {claim.measured}.")
    show_report(result.report(), arguments.out / "theory" / result.name)


def train_item(item: Item, arguments: ReproduceArguments, deadline: float) -> Iterator[Experiment]:
    """Train the grids of an item whose data are given; yield the experiment of each."""
    for grid in item.grids:
        workload = find_workload(grid.domain, arguments.scale)
        data = getattr(arguments, workload.data) if workload.data else ""
        if data is None:
            if arguments.item == item.name:
                raise UserError(f"{item.name} trains on data: give --{workload.data} PATH")
            continue
        template = grid.template(workload, workload.template(data, execution(arguments, workload.template())))
        experiment = Experiment(
            directory=arguments.out / arguments.scale / item.name / grid.directory,
            template=template,
            jobs=chosen_jobs(arguments.jobs, template),
            comparisons=grid.comparisons(template),
            command=shlex.join(["siamesenorm", *sys.argv[1:]]),
            stores=(arguments.out / "runs", *arguments.runs),
            deadline=deadline,
        )
        train_experiment(experiment, partial(grid.stages, workload))
        yield experiment


def execution(arguments: ReproduceArguments, template: RunConfig) -> Execution:
    """Return how runs are carried out: one thread each, on the device of the scale or the one given."""
    own = template.execution
    device = arguments.device or own.device
    return dataclasses.replace(own, device=device, threads=own.threads or 1, keep_checkpoints=1)


def reproduce_continued(arguments: ContinuedArguments) -> None:
    """Train what is missing, then write the report and print its tables; raises UserError when runs have failed."""
    experiment = None
    if arguments.data is not None:
        plan = arguments.plan
        template = plan.template(base_template(arguments, arguments.data))
        experiment = Experiment(
            directory=arguments.out,
            template=template,
            jobs=chosen_jobs(arguments.jobs, template),
            comparisons=plan.comparisons,
            common=plan.common,
            command=shlex.join(["siamesenorm", *sys.argv[1:]]),
        )
        train_experiment(experiment, plan.stages)
    show_report(build_report(arguments.out, title=arguments.title), arguments.out / "report")
    if experiment is not None:
        raise_failures(experiment)


def base_template(arguments: ContinuedArguments, data: Path) -> RunConfig:
    """Return the run from which bases are made; raises UserError for options that the variants have."""
    for name in ("topology", "norm", "attention_norm"):
        if getattr(arguments.model, name) != getattr(MODEL, name):
            raise UserError(f"--model.{name.replace('_', '-')}: the recipe sets it for each model: leave it out")
    # Dozens of short runs, each in a process of its own: compiling does not pay.
    execution = dataclasses.replace(arguments.execution, threads=arguments.execution.threads or 1, compile="off")
    return RunConfig(
        task=LanguageTaskConfig(data=data, model=arguments.model),
        optimizer=OptimizerConfig(),  # the recipe sets rate and warm-up
        batch=arguments.batch,
        steps=arguments.plan.base_steps,
        execution=execution,
    ).resolved()
