"""The runs of an experiment read back: a `RunResult` for a run directory, `ExperimentResults` for an experiment's.

Reading an experiment never fails because of one run: a run that has not ended has the status `unfinished`, and one that
has not been started or cannot be read is listed as missing, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from siamesenorm.comparison.experiment_plan import (
    PLAN_FILE,
    ExperimentPlan,
    Part,
    PlannedRun,
    find_planned,
    read_plan,
)
from siamesenorm.errors import UserError
from siamesenorm.tasks.task import Metric
from siamesenorm.training.loss_curve import final_mean, final_steps
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import read_metrics
from siamesenorm.training.verdict import Verdict, judge

UNFINISHED = "unfinished"
STABLE, SPIKED, NOT_LEARNED, DIVERGED = "stable", "spiked", "not learned", "diverged"
KERNEL_SETTINGS = ("kernels", "compiled")
"""What the environment of a run says of its kernels; runs that differ in it are not compared."""

FloatArray = npt.NDArray[np.float64]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """One value a training step."""

    steps: FloatArray
    values: FloatArray

    def part(self, places: Any) -> Curve:
        """Return the curve at some places: indices, a slice or a mask."""
        return Curve(steps=self.steps[places], values=self.values[places])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunResult(PlannedRun):
    """One run of a plan: what was run, how it ended, what it reached and what it cost.

    `held_out` has the metrics of the last validation by name, `first_held_out` those before the first step; `facts` is
    the first record of the run, which describes its model, data and metrics; `streams` those of the stream monitor;
    `evaluations` those inside training and those of `siamesenorm evaluate` after it.
    """

    path: Path
    identity: str
    status: str
    verdict: Verdict | None
    train_loss: float | None
    held_out: Mapping[str, float]
    first_held_out: Mapping[str, float]
    held_out_step: int | None
    steps: int
    steps_done: int
    step_seconds: float | None
    peak_memory_bytes: int | None
    losses: Curve = field(repr=False)
    gradient_norms: Curve = field(repr=False)
    streams: tuple[Record, ...] = field(default=(), repr=False)
    evaluations: tuple[Record, ...] = field(default=(), repr=False)
    facts: Record = field(repr=False)
    config: Record = field(repr=False)
    environments: tuple[Record, ...] = field(repr=False)

    @property
    def complete(self) -> bool:
        """Whether the run has ended: finished, or stopped early because it diverged."""
        return self.status in ("finished", "stopped_early")

    @property
    def word(self) -> str | None:
        """The word of its verdict."""
        return None if self.verdict is None else self.verdict.label

    @property
    def diverged(self) -> bool:
        """Whether its verdict is `diverged`."""
        return self.word == DIVERGED

    @property
    def score(self) -> float:
        """The held-out loss that it is compared by: infinite where it has not ended, diverged, or has none."""
        loss = self.held_out.get("loss")
        return math.inf if loss is None or self.diverged or not self.complete or math.isnan(loss) else loss

    @property
    def has_result(self) -> bool:
        """Whether it ended without diverging and has a held-out loss."""
        return math.isfinite(self.score)

    @property
    def trailing_losses(self) -> dict[int, float]:
        """The mean training loss over the tenth of the planned steps that ends at each step, up to a non-finite one."""
        finite = np.isfinite(self.losses.values)
        count = len(finite) if finite.all() else int(np.argmin(finite))
        width = final_steps(self.steps)
        sums = np.concatenate([[0.0], np.cumsum(self.losses.values[:count])])
        means = (sums[width:] - sums[:-width]) / width
        return dict(zip(self.losses.steps[width - 1 : count].astype(int).tolist(), means.tolist(), strict=True))

    @property
    def floor(self) -> float | None:
        """The loss of a model that has learned nothing, where it is known."""
        return self.facts.get("floor")

    @property
    def unit(self) -> str:
        """The unit of the loss."""
        return str(self.facts.get("unit", "nats"))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of its task, the loss first."""
        return tuple(Metric(**each) for each in self.facts["metrics"])

    @property
    def normalises_values(self) -> bool:
        """Whether its attention has QKV-norm."""
        return self.facts.get("attention_norm") == "qkv-head"

    @property
    def parameters(self) -> int | None:
        """The number of parameters."""
        return self.facts.get("parameters")

    @property
    def item(self) -> str:
        """The item over which the loss is a mean, such as "token"."""
        return str(self.facts.get("item", "sample"))

    @property
    def flops_per_item(self) -> float | None:
        """The operations of training on one item."""
        flops = self.facts.get("flops_per_sample")
        return None if flops is None else flops / self.facts.get("items_per_sample", 1)

    @property
    def items(self) -> int | None:
        """The items of all planned steps; None where the record does not say."""
        batch = self.facts.get("batch")
        return None if batch is None else batch * self.facts.get("items_per_sample", 1) * self.steps

    @property
    def passes_over_data(self) -> float | None:
        """How often the planned steps go over the training data; None where the record does not say."""
        available = self.facts.get("train_items")
        return self.items / available if self.items and available else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentResults:
    """The runs of one experiment, in the order of its plan; `missing` has by name why a run could not be read."""

    path: Path
    plan: ExperimentPlan
    runs: tuple[RunResult, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order of the plan."""
        return self.plan.methods

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates, ascending."""
        return self.plan.learning_rates

    @property
    def unfinished(self) -> tuple[RunResult, ...]:
        """The runs that have not ended."""
        return tuple(run for run in self.runs if not run.complete)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of the task, the loss first."""
        return self.runs[0].metrics

    @property
    def unit(self) -> str:
        """The unit of the loss."""
        return self.runs[0].unit

    def runs_of(self, method: str) -> tuple[RunResult, ...]:
        """Return the runs of a method that have been started."""
        return tuple(run for run in self.runs if run.method == method)


def read_run(path: Path, planned: PlannedRun | None = None) -> RunResult:
    """Read one run directory; without a plan its configuration says what it is.

    Raises `UserError` where the configuration is absent or not as written by a run.
    """
    directory = RunDirectory(path)
    environments = directory.read_environments()
    records = read_metrics(directory.metrics_file) if directory.metrics_file.exists() else []
    later = read_metrics(directory.evaluations_file) if directory.evaluations_file.exists() else []
    config = directory.read_config()
    kinds = ("model", "train", "validation", "streams", "evaluation", "end")
    of_kind = {kind: [record for record in records if record.get("kind") == kind] for kind in kinds}
    facts, validation, end = (of_kind[kind][-1] if of_kind[kind] else {} for kind in ("model", "validation", "end"))
    train, first = of_kind["train"], next(iter(of_kind["validation"]), {})
    verdict = (directory.read_verdict() or judge(records)) if end else None
    planned = planned or PlannedRun(
        method=config.label,
        learning_rate=config.optimizer.learning_rate,
        seed=config.seed,
        part=Part.SELECTION,
        label=config.label,
    )
    try:
        losses, steps = _curve(train, "loss"), int(facts.get("steps", config.steps))
        return RunResult(
            path=path,
            identity=config.identity,
            **asdict(planned),
            status=str(end.get("status", UNFINISHED)),
            verdict=verdict,
            train_loss=final_mean(losses.steps, losses.values, steps),
            held_out=_metric_values(validation, facts),
            first_held_out=_metric_values(first, facts) if first.get("step") == 0 else {},
            held_out_step=validation.get("step"),
            steps=steps,
            steps_done=len(train),
            step_seconds=undisturbed_step_seconds([float(record["step_seconds"]) for record in train]),
            peak_memory_bytes=end.get("peak_memory_bytes"),
            losses=losses,
            gradient_norms=_curve(train, "gradient_norm"),
            streams=tuple(of_kind["streams"]),
            evaluations=(*of_kind["evaluation"], *later),
            facts=facts,
            config=config.to_json(),
            environments=tuple(environments),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a run that this version can read ({error}): train it again") from error


def has_started(path: Path) -> bool:
    """Return whether the directory of an experiment has a plan, and any run of it a record."""
    plan = read_plan(path)
    return plan is not None and any(
        RunDirectory(find_planned(path, plan, name)).metrics_file.exists() for name in plan.runs
    )


def read_experiment(path: Path, *, mixed: bool = False) -> ExperimentResults:
    """Read the directory of an experiment with all its runs, in the stores that its plan names.

    Raises `UserError` where it has no plan or no run has started, and, unless `mixed`, where its runs were computed
    with different kernels or partly compiled: their numbers differ for another reason than the methods.
    """
    plan = read_plan(path)
    if plan is None:
        raise UserError(f"{path} has no {PLAN_FILE}: name the directory of a sweep, or of a run")
    runs: list[RunResult] = []
    missing: dict[str, str] = {}
    for name, planned in plan.runs.items():
        run_path = find_planned(path, plan, name)
        try:
            if RunDirectory(run_path).metrics_file.exists():
                runs.append(read_run(run_path, planned))
            else:
                missing[name] = "not started"
        except UserError as error:
            missing[name] = str(error).replace(f"{run_path}/", "")
    if not runs:
        raise UserError(f"no run of {path} has started: train it before the report")
    if not mixed:
        require_same_kernels(path, [each for run in runs for each in run.environments])
    return ExperimentResults(path=path, plan=plan, runs=tuple(runs), missing=missing)


def read_single_run(path: Path) -> ExperimentResults:
    """Read one run as an experiment of its own."""
    run = read_run(path)
    return ExperimentResults(path=path, plan=ExperimentPlan(runs={path.name: run}), runs=(run,))


def require_same_kernels(path: Path, environments: Sequence[Record]) -> None:
    """Raise UserError where environments name different kernels, or compilation in some and none in others."""
    for name in KERNEL_SETTINGS:
        values = {str(each[name]) for each in environments if each.get(name) is not None}
        if len(values) > 1:
            found = ", ".join(sorted(values))
            raise UserError(f"the runs of {path} differ in {name} ({found}): train them alike, or add --mixed")


def undisturbed_step_seconds(seconds: Sequence[float]) -> float | None:
    """Return the median over the faster half of the steps, which compilation and other processes disturb least."""
    return float(np.median(sorted(seconds)[: (len(seconds) + 1) // 2])) if seconds else None


def _metric_values(validation: Record, facts: Record) -> dict[str, float]:
    """Return the metrics of a validation by name; one that follows from the loss need not be in the record."""
    values: dict[str, float] = {}
    for metric in (Metric(**each) for each in facts["metrics"]):
        if metric.name in validation:
            values[metric.name] = float(validation[metric.name])
        elif metric.of_loss and "loss" in validation:
            values[metric.name] = metric.from_loss(float(validation["loss"]))
    return values


def _curve(records: Sequence[Record], key: str) -> Curve:
    kept = [record for record in records if record.get(key) is not None]
    return Curve(
        steps=np.array([float(record["step"]) for record in kept]),
        values=np.array([float(record[key]) for record in kept]),
    )
