"""Read what was trained: bases and continuations, each with its record; unfinished runs are named, not counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.comparison.results import RunResult, read_run
from siamesenorm.errors import UserError
from siamesenorm.recipes.continued.experiment import Arm
from siamesenorm.recipes.continued.training import PLAN_FILE, read_plan
from siamesenorm.training.metrics import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaseRun:
    """A base that has been trained to its end."""

    base: str
    run: RunResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContinuedRun:
    """A continuation that has ended, with the held-out loss that it had before its first step."""

    arm: Arm
    run: RunResult
    first_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The runs that have ended, in the order of the plan, and how many have not."""

    bases: tuple[BaseRun, ...]
    continued: tuple[ContinuedRun, ...]
    unfinished: int
    experiment: dict[str, Any]
    command: str | None
    data: dict[str, Any]

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The rates of the continuations, in the order of the plan: the main one first."""
        return tuple(dict.fromkeys(each.run.learning_rate for each in self.continued))

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms, in the order of the plan."""
        return tuple(dict.fromkeys(each.arm for each in self.continued))

    def of(self, arm: Arm, rate: float) -> dict[int, ContinuedRun]:
        """Return the runs of an arm at a rate, by seed."""
        return {e.run.seed: e for e in self.continued if e.arm == arm and e.run.learning_rate == rate}

    def base_of(self, arm: Arm) -> dict[int, BaseRun]:
        """Return the runs of an arm's base, by seed."""
        return {each.run.seed: each for each in self.bases if each.base == arm.base}


def read_results(directory: Path) -> Results:
    """Read the directory of the experiment; raises UserError where it is none, or no continuation has ended."""
    if not (directory / PLAN_FILE).is_file():
        raise UserError(f"{directory} has no {PLAN_FILE}: train it with `siamesenorm reproduce continued --data DATA`")
    plan = read_plan(directory / PLAN_FILE)
    bases: list[BaseRun] = []
    continued: list[ContinuedRun] = []
    for name, part in plan["runs"].items():
        path = directory / "runs" / name
        run = read_run(path) if (path / "metrics.jsonl").is_file() else None
        if run is None or not run.complete:
            continue
        if part["arm"] is None:
            bases.append(BaseRun(base=part["base"], run=run))
        else:
            continued.append(ContinuedRun(arm=Arm(**part["arm"]), run=run, first_loss=_first_loss(path)))
    if not continued:
        raise UserError(f"no continuation in {directory} has ended: train it with --data")
    return Results(
        bases=tuple(bases),
        continued=tuple(continued),
        unfinished=len(plan["runs"]) - len(bases) - len(continued),
        experiment=plan["experiment"],
        command=plan["command"],
        data=plan["data"],
    )


def _first_loss(path: Path) -> float:
    """Return the held-out loss of step 0."""
    for record in read_metrics(path / "metrics.jsonl"):
        if record["kind"] == "validation" and record["step"] == 0:
            return float(record["loss"])
    raise UserError(f"{path} has no evaluation before its first step: train it again")
