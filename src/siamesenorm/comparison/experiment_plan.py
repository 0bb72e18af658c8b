"""The plan of an experiment: every run with its part, and which method is compared with which baseline.

A plan is the file `plan.json` of an experiment's directory; the runs are in `runs/<run id>`, or in stores that several
plans share. Sweeps and recipes write plans, `Experiment` trains them, reports read them: nothing about a run is derived
from differences of configurations.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors, encode_json, write_atomically
from siamesenorm.training.run_directory import RunDirectory

PLAN_FILE = "plan.json"
RUNS = "runs"
SCHEMA = 2


class Part(StrEnum):
    """The part of a run in its experiment."""

    SELECTION = "selection"
    """Its held-out loss chooses the learning rate of its method."""
    REPORT = "report"
    """Its method is reported on it, at the chosen rate."""
    BASE = "base"
    """Other runs start from its weights."""
    CONTINUED = "continued"
    """It starts from the weights of a base."""


class ComparisonKind(StrEnum):
    """What differs between a method and its baseline."""

    TOPOLOGY = "topology"
    """The topology; the baseline is Pre-Norm with the same operator."""
    OPERATOR = "operator"
    """The norm operator."""
    ABLATION = "ablation"
    """One option of the topology, or the norm inside the attention."""
    INITIALISATION = "initialisation"
    """The distribution of the initial weights."""
    OPTIMIZER = "optimizer"
    """The optimizer."""
    CONTROL = "control"
    """The topology; the baseline is Pre-Norm with the method's QKV-norm."""
    CONVERSION = "conversion"
    """The residual path with which a trained model continues; the baseline continues unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """What one run is in its experiment; `label` is the name of its method in tables."""

    method: str
    learning_rate: float
    seed: int
    part: Part
    label: str

    @property
    def name(self) -> str:
        """Method, learning rate and seed."""
        return f"{self.method} @ {self.learning_rate:g}, seed {self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedComparison:
    """A method and the baseline that it is compared with."""

    method: str
    baseline: str
    kind: ComparisonKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPlan:
    """Everything that `plan.json` says.

    Args:
        command: Command that wrote the plan.
        template: What all runs have in common: a configuration as JSON values.
        data: `name` of the data and `details`, for people.
        runs: What each run is, by its id.
        comparisons: Methods and their baselines.
        jobs: Largest number of runs that shared a device at a time; 0 where none was trained yet.
        stores: Directories of runs, relative to that of the plan: new runs are in the first, the others are searched
            for runs that have ended.
    """

    command: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, PlannedRun] = field(default_factory=dict)
    comparisons: tuple[PlannedComparison, ...] = ()
    jobs: int = 0
    stores: tuple[str, ...] = (RUNS,)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order of the plan."""
        return tuple(dict.fromkeys(run.method for run in self.runs.values()))

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates, ascending."""
        return tuple(sorted({run.learning_rate for run in self.runs.values()}))

    @property
    def selection_seeds(self) -> tuple[int, ...]:
        """The seeds whose runs choose the learning rates."""
        return tuple(sorted({run.seed for run in self.runs.values() if run.part is Part.SELECTION}))


def find_run(stores: Sequence[Path], name: str) -> Path:
    """Return the directory of a run: that in the first store where it has ended, else that in the first store."""
    places = [store / name for store in stores]
    return next((place for place in places if RunDirectory(place).verdict_file.is_file()), places[0])


def find_planned(directory: Path, plan: ExperimentPlan, name: str) -> Path:
    """Return the directory of a run of the plan in `directory`, as `find_run` does."""
    return find_run([Path(os.path.normpath(directory / store)) for store in plan.stores], name)


def read_plan(directory: Path) -> ExperimentPlan | None:
    """Return the plan of an experiment's directory, None where it has none; raises UserError for a damaged one."""
    path = directory / PLAN_FILE
    if not path.is_file():
        return None
    try:
        record = decode_json(path.read_bytes())
        if (schema := record["schema"]) == SCHEMA:
            return ExperimentPlan(
                command=record["command"],
                template=dict(record["template"]),
                data=dict(record["data"]),
                runs={name: PlannedRun(**{**run, "part": Part(run["part"])}) for name, run in record["runs"].items()},
                comparisons=tuple(
                    PlannedComparison(**{**each, "kind": ComparisonKind(each["kind"])})
                    for each in record["comparisons"]
                ),
                jobs=int(record["jobs"]),
                stores=tuple(record.get("stores", (RUNS,))),
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the plan of an experiment ({error}): choose another directory") from error
    raise UserError(f"{path}: the plan has schema {schema}, this version reads {SCHEMA}: choose another directory")


def write_plan(directory: Path, plan: ExperimentPlan) -> None:
    """Write the plan of an experiment's directory, whole or not at all."""
    text = encode_json({"schema": SCHEMA, **asdict(plan)}, indent=1)
    with disk_errors(directory):
        write_atomically(directory / PLAN_FILE, f"{text}\n".encode())
