"""siamesenorm reproduce: an experiment of the recipes, from training to its report."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from siamesenorm.cli.report import build_report, show_report
from siamesenorm.cli.sweep import chosen_jobs, raise_failures, train_experiment
from siamesenorm.cli.train import text_constructors
from siamesenorm.comparison.experiment_runner import Experiment
from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModelConfig, language_model_config
from siamesenorm.norms import NormSpec
from siamesenorm.recipes.continued import ContinuedPlan
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.optimizer import OptimizerConfig

MODEL = language_model_config("mini", dim=64, hidden=176, topology="pre", vocabulary=0)


@dataclass(frozen=True, kw_only=True)
class ReproduceArguments:
    """Train Pre-Norm models, convert them, continue both on the same batches, and report the differences by seed.

    Repeat the command to resume it after an interruption; without --data it reports on what has been trained.
    """

    recipe: Annotated[Literal["continued"], tyro.conf.Positional] = "continued"
    """The experiment."""
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
    """The arguments, with topologies and norms read from text."""

    @staticmethod
    def prepare(words: Sequence[str]) -> tuple[Any, list[str], tyro.constructors.ConstructorRegistry]:
        """Return the type that tyro reads, the words, and how tyro reads topologies and norms."""
        return ReproduceArguments, list(words), text_constructors(NormSpec())


def run(arguments: ReproduceArguments) -> None:
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


def base_template(arguments: ReproduceArguments, data: Path) -> RunConfig:
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
