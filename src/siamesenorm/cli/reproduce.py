"""siamesenorm reproduce: a table or figure of the papers, from training to its report, at a scale that can be paid."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from typing_extensions import Doc

from siamesenorm.cli.output import command_line, console
from siamesenorm.cli.report import build_report, show_report
from siamesenorm.cli.sweep import chosen_jobs, raise_failures, train_experiment
from siamesenorm.cli.train import text_constructors
from siamesenorm.comparison.experiment_console import ExperimentConsole
from siamesenorm.comparison.experiment_plan import PLAN_FILE
from siamesenorm.comparison.experiment_runner import Experiment, Job, OutOfTime
from siamesenorm.comparison.results import RunResult
from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation import Evaluation
from siamesenorm.models.language import LanguageModelConfig, language_model_config
from siamesenorm.norms import NormSpec
from siamesenorm.progress import ProgressDisplay
from siamesenorm.recipes.catalogue import items_table, list_items
from siamesenorm.recipes.continued import ContinuedPlan
from siamesenorm.recipes.item import Item, RunGrid
from siamesenorm.recipes.item_evaluations import build_evaluations, evaluate_item, missing_evaluations
from siamesenorm.recipes.item_report import item_report
from siamesenorm.recipes.item_results import ITEM_FILE, read_costs, read_item, write_item
from siamesenorm.recipes.items import ITEMS, find_item
from siamesenorm.recipes.scales import RUNS_PER_GPU, Scale, Workload
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Compile, Execution, RunConfig
from siamesenorm.training.optimizer import OptimizerConfig

NAMES = ", ".join([*ITEMS, "continued", "all"])
STOPPED = "stopped after {:g} minutes; repeat the command to resume"
MODEL = language_model_config("mini", dim=64, hidden=176, topology="pre", vocabulary=0)


@dataclass(frozen=True, kw_only=True)
class ReproduceArguments:
    """Train the missing runs of an item, evaluate them, and compare them with the published numbers.

    Without an item the items are listed, and nothing is trained. Repeat the command to resume it after an interruption.
    Runs are shared between items.
    """

    item: Annotated[str, tyro.conf.Positional, Doc(f"What to reproduce: {NAMES}; lists the items if empty.")] = ""
    scale: Literal["mini", "small", "full"] = "mini"
    """How much is trained: mini (two cores), small (one GPU, an hour an item), full (the papers' settings)."""
    list: bool = False
    """List the items with their runs, how many have ended, and what the others cost; train nothing."""
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
    tasks: Path | None = None
    """Directory of multiple-choice tasks; without it no accuracies on tasks are measured."""
    task_limit: int = 0
    """Score so many items of each task; 0 scores all."""
    costs: Path | None = None
    """File of step times by topology, such as benchmarks/topology_cost.json, for the league."""
    jobs: int = 0
    """Runs at a time; if 0 one for each core or GPU, and six for each GPU at the scale small."""
    minutes: float = 0.0
    """Stop after this many minutes; repeat the command to resume. 0 is no limit."""
    device: str = ""
    """Device of the runs, if not that of the scale."""
    compile: Compile = "auto"
    """Compile the blocks of the runs; auto does where it pays for a run alone. Runs of one method share the code."""
    mixed: bool = False
    """Allow runs that are computed with different kernels, or partly compiled; the page then says so."""


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
    minutes: float = 0.0
    """Stop after this many minutes; repeat the command to resume. 0 is no limit."""
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
        before = ("", *words)
        switches = {f"--{each.name}" for each in dataclasses.fields(ReproduceArguments) if each.type == "bool"}
        for place, word in enumerate(words):
            if word == "continued" and (before[place] in switches or not before[place].startswith("--")):
                others = [*words[:place], *words[place + 1 :]]
                return ContinuedArguments, others, text_constructors(NormSpec())
        return ReproduceArguments, list(words), text_constructors(NormSpec())


def run(arguments: ReproduceArguments | ContinuedArguments) -> None:
    """Train what is missing, then report; raises UserError when runs have failed."""
    if isinstance(arguments, ContinuedArguments):
        reproduce_continued(arguments)
        return
    scale = Scale(arguments.scale)
    items = list(ITEMS.values()) if arguments.item in ("", "all") else [find_item(arguments.item)]
    for store in arguments.runs:
        if not store.is_dir():
            raise UserError(f"--runs {store} is not a directory: give one of runs, such as benchmarks/books/runs")
    if arguments.list or not arguments.item:
        stores = (arguments.out / "runs", *arguments.runs)
        states = list(list_items(items, scale, stores, lambda workload: data_of(arguments, workload)))
        console().print(items_table(states, scale))
        return
    if arguments.costs:
        read_costs(arguments.costs)  # refused before anything is trained, as are tasks
    evaluations = build_evaluations(arguments.tasks, arguments.task_limit)
    deadline = deadline_after(arguments.minutes)
    started: list[Experiment] = []
    try:
        for item in items:
            train_item(item, arguments, deadline, started)
            report_item(item, arguments, evaluations, deadline)
    except OutOfTime:
        print(STOPPED.format(arguments.minutes))
    for experiment in started:
        raise_failures(experiment)


def deadline_after(minutes: float) -> float:
    """Return the time of the monotonic clock after so many minutes, of 0 infinity; raises UserError for no time."""
    if not 0 <= minutes < math.inf:
        raise UserError(f"--minutes is {minutes:g}: write a number of minutes, or 0 not to stop")
    return time.monotonic() + 60 * minutes if minutes else math.inf


def report_item(
    item: Item, arguments: ReproduceArguments, evaluations: Mapping[str, Evaluation], deadline: float
) -> None:
    """Evaluate the runs that have weights, and write the page of an item; without runs there is none.

    Raises OutOfTime at the deadline; what has been evaluated is kept.
    """
    directory = arguments.out / arguments.scale / item.name
    if item.experiment is not None:
        report = item.experiment()
        for statement in report.conclusions:
            print(f"{statement.topic}: {statement.text}")
        show_report(report, arguments.out / item.name)
        return
    if arguments.item == "all" and not (directory / ITEM_FILE).is_file():
        return
    waiting = list(missing_evaluations(read_item(directory), evaluations))
    scale = Scale(arguments.scale)
    workload = item.workload(item.grids_at(scale)[0], scale)
    with ProgressDisplay(sum(len(missing) for _, missing in waiting)) as progress:

        def show(done: float, what: str) -> None:
            if time.monotonic() > deadline:
                raise OutOfTime
            progress.update(done, what)

        device = execution(arguments, workload.template()).device
        evaluate_item(waiting, partial(data_of_run, arguments, item), device, show)
    show_report(item_report(read_item(directory)), directory / "report")


def train_item(item: Item, arguments: ReproduceArguments, deadline: float, started: list[Experiment]) -> None:
    """Train the grids of an item whose data are given; add the experiment of each to `started`.

    Grids that a scale does not have are left out. Raises UserError for a single item of which it has none, and for one
    with neither data nor runs; nothing has been trained then.
    """
    scale, alone = Scale(arguments.scale), arguments.item == item.name
    available = item.grids_at(scale)
    if alone and item.grids and not available:
        item.workload(item.grids[0], scale)  # raises
    directory = arguments.out / scale / item.name
    prepared: list[tuple[RunGrid, Workload, Path | None]] = []
    for grid in available:
        workload = item.workload(grid, scale)
        data = data_of(arguments, workload)
        if data is not None or not workload.data:
            prepared.append((grid, workload, data))
        elif alone and not (directory / grid.directory / PLAN_FILE).is_file():
            raise UserError(f"{item.name} trains on data: give --{workload.data} PATH")
    for grid, workload, data in prepared:
        template = grid.template(workload, workload.template(data or "", execution(arguments, workload.template())))
        experiment = Experiment(
            directory=directory / grid.directory,
            template=template,
            jobs=chosen_jobs(arguments.jobs, template, RUNS_PER_GPU[scale]),
            comparisons=grid.comparisons(template),
            command=command_line(),
            stores=(arguments.out / "runs", *arguments.runs),
            mixed=arguments.mixed,
            deadline=deadline,
        )
        write = partial(write_item, directory, item, scale, arguments.costs, mixed=arguments.mixed)
        started.append(experiment)
        with contextlib.closing(ItemConsole(experiment.directory, write)) as experiment.observer:
            experiment.train(partial(grid.stages, workload))


class ItemConsole(ExperimentConsole):
    """Shows the progress of a grid; calls `write` before its first run: its item has a page from then on."""

    def __init__(self, directory: Path, write: Callable[[], None]) -> None:
        super().__init__(directory)
        self.write = write

    def planned(self, jobs: Sequence[Job]) -> None:
        """Write what the item's directory holds."""
        self.write()
        super().planned(jobs)


def data_of(arguments: ReproduceArguments, workload: Workload) -> Path | None:
    """Return the path that was given for the data of a workload."""
    path: Path | None = getattr(arguments, workload.data) if workload.data else None
    return path


def data_of_run(arguments: ReproduceArguments, item: Item, run: RunResult) -> Path | None:
    """Return the path that was given for the data of a run of an item."""
    scale = Scale(arguments.scale)
    workloads = (item.workload(grid, scale) for grid in item.grids_at(scale))
    tag = run.config["task"]["tag"]
    return next((data_of(arguments, w) for w in workloads if w.template().task.tag == tag), None)


def execution(arguments: ReproduceArguments, template: RunConfig) -> Execution:
    """Return how runs are carried out: one thread each, on the device of the scale or the one given."""
    own = template.execution
    device = arguments.device or own.device
    compiled = own.compile if arguments.compile == "auto" else arguments.compile
    return dataclasses.replace(own, device=device, compile=compiled, threads=own.threads or 1, keep_checkpoints=1)


def reproduce_continued(arguments: ContinuedArguments) -> None:
    """Train what is missing, then write the report and print its tables; raises UserError when runs have failed."""
    experiment, deadline = None, deadline_after(arguments.minutes)
    if arguments.data is not None:
        plan = arguments.plan
        template = plan.template(base_template(arguments, arguments.data))
        experiment = Experiment(
            directory=arguments.out,
            template=template,
            jobs=chosen_jobs(arguments.jobs, template),
            comparisons=plan.comparisons,
            common=plan.common,
            command=command_line(),
            deadline=deadline,
        )
        try:
            train_experiment(experiment, plan.stages)
        except OutOfTime:
            print(STOPPED.format(arguments.minutes))
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
