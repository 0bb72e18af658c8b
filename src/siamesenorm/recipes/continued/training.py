"""Train the experiment in a directory, several runs at a time; repeated after an interruption, it goes on.

`continued.json` names every run with its part in the experiment; `runs/<id>` holds it, so that none is trained twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.comparison.sweep import Job, SweepObserver, train_jobs
from siamesenorm.comparison.sweep_directory import LOCK_FILE, template_record
from siamesenorm.data import PreparedData
from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors, encode_json, exclusive, write_atomically
from siamesenorm.recipes.continued.experiment import Arm, Experiment
from siamesenorm.training.config import RunConfig
from siamesenorm.training.run_directory import RunDirectory

SCHEMA = 1
PLAN_FILE = "continued.json"
COMMON = ("base_learning_rate", "base_steps", "steps", "warmup_fraction")
"""What all runs of a directory share; seeds, learning rates of the continuation and arms may be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A run of the experiment: a base (without arm) or a base continued."""

    job: Job
    base: str
    arm: Arm | None


def plan_experiment(experiment: Experiment, template: RunConfig, directory: Path) -> list[Planned]:
    """Return every run, bases first; raises UserError where a base cannot become what an arm asks for."""
    bases = [
        (base, Job(config=config, directory=_run_directory(directory, config)))
        for config, base in zip(experiment.base_runs(template), experiment.bases * len(experiment.seeds), strict=True)
    ]
    continued = [
        Planned(job=Job(config=config, directory=_run_directory(directory, config)), base=base, arm=arm)
        for rate in experiment.learning_rates
        for base, job in bases
        for arm in experiment.arms
        if arm.base == base
        for config in [experiment.continued_run(job.config, job.directory, arm, rate)]
    ]
    return [*(Planned(job=job, base=base, arm=None) for base, job in bases), *continued]


def train_experiment(
    experiment: Experiment,
    template: RunConfig,
    directory: Path,
    *,
    jobs: int,
    observer: SweepObserver,
    command: str | None = None,
) -> dict[str, str]:
    """Train what is not finished yet, `jobs` runs at a time; return the errors of the runs that failed, by name.

    Raises UserError when the directory holds another experiment or something else; nothing is written then.
    """
    planned = plan_experiment(experiment, template, directory)
    with _claimed(directory, experiment, template):
        _write_plan(directory, experiment, template, planned, command)
        observer.planned([each.job for each in planned])
        failures: dict[str, str] = {}
        for part in ([p for p in planned if p.arm is None], [p for p in planned if p.arm is not None]):
            due = [each.job for each in part]
            for job in due:
                RunDirectory(job.directory).prepare(job.config)
            failures |= train_jobs(due, jobs, observer)
        return failures


def _run_directory(directory: Path, config: RunConfig) -> Path:
    return directory / "runs" / config.identity[:12]


@contextmanager
def _claimed(directory: Path, experiment: Experiment, template: RunConfig) -> Iterator[None]:
    """Make the directory this experiment's and keep other processes out while it is open."""
    with ExitStack() as held:
        with disk_errors(directory):
            plan = directory / PLAN_FILE
            if not plan.is_file() and directory.exists():
                allowed = {LOCK_FILE, f".{PLAN_FILE}.tmp"}
                if not directory.is_dir() or {each.name for each in directory.iterdir()} - allowed:
                    raise UserError(f"{directory} exists and is not of this recipe: choose another --out")
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(directory / LOCK_FILE))
            if plan.is_file():
                _refuse_another(read_plan(plan), directory, experiment, template)
        yield


def _refuse_another(plan: dict[str, Any], directory: Path, experiment: Experiment, template: RunConfig) -> None:
    """Raise UserError unless the runs of the plan can stand in one table with those of the experiment."""
    if plan["template"] != _template(template):
        raise UserError(f"{directory} holds the recipe with other data or another model: choose another --out")
    for name in COMMON:
        there, here = plan["experiment"][name], getattr(experiment, name)
        if there != here:
            raise UserError(f"{directory} holds the recipe with {name} {there}, not {here}: choose another --out")


def _template(template: RunConfig) -> dict[str, Any]:
    """Return what all runs have in common whatever the experiment, as JSON values."""
    record = template_record(template)
    for name in ("steps", "validation_every"):
        del record[name]
    del record["optimizer"]["warmup_steps"]
    return record


def _write_plan(
    directory: Path, experiment: Experiment, template: RunConfig, planned: list[Planned], command: str | None
) -> None:
    """Write what is compared; runs listed before stay listed."""
    path, manifest = directory / PLAN_FILE, PreparedData.open(template.task.data).manifest
    earlier = read_plan(path)["runs"] if path.is_file() else {}
    runs = {
        each.job.directory.name: {"base": each.base, "arm": each.arm and dataclasses.asdict(each.arm)}
        for each in planned
    }
    record = {
        "schema": SCHEMA,
        "command": command,
        "data": {"digest": manifest.digest, "source": manifest.source},
        "template": _template(template),
        "experiment": experiment.to_json(),
        "runs": {**earlier, **runs},
    }
    with disk_errors(directory):
        write_atomically(path, (encode_json(record, indent=1) + "\n").encode())


def read_plan(path: Path) -> dict[str, Any]:
    """Return what `continued.json` holds; raises UserError where it cannot be read."""
    try:
        plan: dict[str, Any] = decode_json(path.read_bytes())
        if plan["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {plan['schema']}, this version reads {SCHEMA}: choose another --out")
        return {name: plan[name] for name in ("command", "data", "template", "experiment", "runs")}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): choose another --out") from error
