"""siamesenorm reproduce: an experiment of the recipes, from training to its report."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from siamesenorm.cli.sweep import jobs_at_hand
from siamesenorm.comparison.console import SweepConsole
from siamesenorm.comparison.renderings import for_terminal
from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModelConfig, language_model_config
from siamesenorm.recipes.continued import Experiment, find, gaps, read_results, train_experiment, write_report
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.optimizer import OptimizerConfig

EXPERIMENT = Experiment()


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train Pre-Norm models, convert them, continue both on the same batches, and report the gaps paired by seed.

    Repeat the command to go on after an interruption; without --data it reports on what has been trained.
    """

    recipe: Annotated[Literal["continued"], tyro.conf.Positional] = "continued"
    """The experiment."""
    data: Path | None = None
    """Directory of prepared data; without it nothing is trained."""
    model: LanguageModelConfig = language_model_config("mini", dim=64, hidden=176, topology="pre", vocabulary=0)
    """The model, whatever its residual path."""
    seeds: tuple[int, ...] = EXPERIMENT.seeds
    """Seeds, each of a base and of everything that goes on from it."""
    learning_rates: tuple[float, ...] = EXPERIMENT.learning_rates
    """Peak learning rates of the continuation, the main one first."""
    base_learning_rate: float = EXPERIMENT.base_learning_rate
    """Peak learning rate of the bases."""
    base_steps: int = EXPERIMENT.base_steps
    """Steps of a base."""
    steps: int = EXPERIMENT.steps
    """Steps of a continuation."""
    batch: int = 16
    """Samples of an optimizer step."""
    jobs: int = 0
    """Runs at a time; as many as cores (or GPUs) if 0."""
    out: Path = Path("runs/continued")
    """Directory of the experiment."""
    execution: Execution = Execution(threads=1, keep_checkpoints=1)
    """How the runs are carried out."""


def run(arguments: Arguments) -> None:
    """Train what is missing, then write the report and print its table; raises UserError when runs have failed."""
    failures = {} if arguments.data is None else _train(arguments, arguments.data)
    findings = find(read_results(arguments.out))
    paths = write_report(findings, arguments.out / "report")
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(for_terminal(gaps(findings), console.width))
    print(f"report: {paths.markdown}")
    if failures:
        name, error = next(iter(failures.items()))
        raise UserError(f"{len(failures)} runs failed, such as {name}: {error}")


def _train(arguments: Arguments, data: Path) -> dict[str, str]:
    experiment = Experiment(
        seeds=arguments.seeds,
        learning_rates=arguments.learning_rates,
        base_learning_rate=arguments.base_learning_rate,
        base_steps=arguments.base_steps,
        steps=arguments.steps,
    )
    template = _template(arguments, data)
    if arguments.jobs < 0:
        raise UserError(f"jobs is {arguments.jobs}: choose at least 1, or 0 for one a core")
    jobs = arguments.jobs or jobs_at_hand(template.execution.device, template.execution.threads)
    command = shlex.join(["siamesenorm", *sys.argv[1:]])
    with SweepConsole(arguments.out) as console:
        return train_experiment(experiment, template, arguments.out, jobs=jobs, observer=console, command=command)


def _template(arguments: Arguments, data: Path) -> RunConfig:
    """Return the run that bases are made from; raises UserError for options that the arms have."""
    usual = Arguments().model
    for name in ("topology", "norm", "attention_norm"):
        if (given := getattr(arguments.model, name)) != getattr(usual, name):
            raise UserError(f"{name} {given!r} for all models: the recipe names them")
    # dozens of short runs, each in a process of its own
    execution = dataclasses.replace(arguments.execution, threads=arguments.execution.threads or 1, compile="off")
    return RunConfig(
        task=LanguageTaskConfig(data=data, model=arguments.model),
        optimizer=OptimizerConfig(),  # the experiment sets rate and warm-up
        batch=arguments.batch,
        steps=arguments.base_steps,
        execution=execution,
    ).resolved()
