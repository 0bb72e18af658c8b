"""Train the runs of a plan, several at a time; the same command repeated resumes where it stopped.

An experiment is a directory with `plan.json` and `runs/<id>`, unless it shares a store of runs with others; a run's
name is its identity, so that a finished run is never trained twice. Each run has a process of its own; one that fails
does not stop the others.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from siamesenorm.comparison import experiment_plan
from siamesenorm.comparison.experiment_plan import RUNS, ExperimentPlan, PlannedComparison, PlannedRun, find_run
from siamesenorm.comparison.results import KERNEL_SETTINGS, require_same_kernels
from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors, encode_json, exclusive
from siamesenorm.training.config import Execution, RunConfig, described, first_difference
from siamesenorm.training.console_and_trackers import build_trackers
from siamesenorm.training.execution import choose, find_device
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.slurm import SlurmJob, require_slurm
from siamesenorm.training.verdict import Verdict

POLL_SECONDS = 0.2
LOCK_FILE = "lock"
UNPLANNED = {LOCK_FILE, f".{experiment_plan.PLAN_FILE}.tmp"}
"""Files that a process leaves that was killed before it wrote the plan."""

Planned = tuple[PlannedRun, RunConfig]


class OutOfTime(Exception):
    """The deadline of an experiment has passed; its runs resume from their checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of an experiment: what it is in the plan, its configuration and its directory."""

    planned: PlannedRun
    config: RunConfig
    directory: Path

    @property
    def name(self) -> str:
        """Method, learning rate and seed."""
        return self.planned.name

    @property
    def verdict(self) -> Verdict | None:
        """The verdict, once the run is finished."""
        return RunDirectory(self.directory).read_verdict()


class ExperimentObserver:
    """Receives the progress of an experiment; every method does nothing by default."""

    def planned(self, jobs: Sequence[Job]) -> None:
        """Jobs were added to the plan; some may be finished already."""

    def progressed(self, running: Sequence[Job]) -> None:
        """Some time has passed; these jobs are running."""

    def note(self, line: str) -> None:
        """Something a person should read."""

    def ended(self, job: Job, error: str | None) -> None:
        """A job has ended, with a verdict or an error."""


Stages = Callable[["Experiment"], Iterator[Sequence[Planned]]]
"""A generator of plans: yields runs, and receives control again when they have been trained."""


@dataclass(slots=True, kw_only=True)
class Experiment:
    """A plan that is trained in a directory, `jobs` runs at a time.

    Args:
        directory: Directory of the experiment.
        template: The run from which all others are made.
        jobs: Largest number of runs at a time.
        observer: Receives the progress.
        comparisons: Methods and their baselines.
        common: Further settings that all runs of the directory share.
        command: Command to write into the plan.
        notes: Lines for people, shown before the first run.
        mixed: Allow runs that were computed with different kernels, or partly compiled.
        stores: Directories of runs that experiments share, the first for new runs; `directory/runs` if not given.
        deadline: Time by `time.monotonic` at which training stops; runs that are not finished resume the next time.
    """

    directory: Path
    template: RunConfig
    jobs: int
    observer: ExperimentObserver = field(default_factory=ExperimentObserver)
    comparisons: tuple[PlannedComparison, ...] = ()
    common: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    notes: tuple[str, ...] = ()
    mixed: bool = False
    stores: tuple[Path, ...] = ()
    deadline: float = math.inf
    trained: list[Job] = field(default_factory=list)
    failures: dict[Job, str] = field(default_factory=dict)

    def train(self, stages: Stages) -> None:
        """Train every run of the stages that is not finished yet; `failures` then has the errors.

        Raises UserError where the directory holds another experiment or something else, for runs that cannot be
        configured, and where data, device or trackers are missing; nothing has been written then.
        """
        batches = stages(self)
        first = next(batches)
        for _, config in first[:1]:
            if config.execution.slurm:
                require_slurm()
            else:
                find_device(config.execution.device)
            config.task.build(config.seed)
            build_trackers(config, self.directory)
        with self._claimed():
            for line in self.notes:
                self.observer.note(line)
            self._train(first)
            for runs in batches:
                self._train(runs)

    @property
    def nothing_finished(self) -> bool:
        """Whether every run so far has failed."""
        return len(self.failures) == len(self.trained)

    def run_directory(self, config: RunConfig) -> Path:
        """Return the directory of a run."""
        return find_run(self._stores, config.identity[:12])

    @property
    def _stores(self) -> tuple[Path, ...]:
        return self.stores or (self.directory / RUNS,)

    @property
    def plan(self) -> ExperimentPlan:
        """The plan in the directory, an empty one before it is written."""
        return experiment_plan.read_plan(self.directory) or ExperimentPlan()

    @property
    def record(self) -> dict[str, Any]:
        """What all runs of the directory have in common, as JSON values: the template without what a run chooses."""
        optimizer = dataclasses.replace(self.template.optimizer, learning_rate=1.0)
        alike = dataclasses.replace(self.template.with_method("pre"), optimizer=optimizer, seed=0)
        record: dict[str, Any] = decode_json(encode_json({**described(alike.resolved()), **self.common}))
        return record

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Make the directory this experiment's and keep other processes out while it is open.

        Raises UserError when it holds another experiment or something else, and then leaves it as it is.
        """
        with ExitStack() as held:
            with disk_errors(self.directory):
                self._require_same()
                self.directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(exclusive(self.directory / LOCK_FILE))
                self._require_same()  # another process may have come first
            yield

    def _require_same(self) -> None:
        plan, directory = experiment_plan.read_plan(self.directory), self.directory
        if plan is None:
            # Empty, or of a process that was killed before it wrote the plan.
            fresh = directory.is_dir() and {each.name for each in directory.iterdir()} <= UNPLANNED
            if directory.exists() and not fresh:
                raise UserError(f"{directory} exists and is not the directory of an experiment: choose another one")
        elif plan.template != self.record:
            name, there, here = first_difference(plan.template, self.record)
            raise UserError(f"{directory} holds an experiment with {name} {there}, not {here}: choose another --out")

    def _train(self, runs: Sequence[Planned]) -> None:
        known = {job.directory for job in self.trained}
        named = {self.run_directory(config): (planned, config) for planned, config in reversed(runs)}
        execution = self._common_execution([config for _, config in runs])
        jobs = [
            Job(planned=planned, config=dataclasses.replace(config, execution=execution), directory=path)
            for path, (planned, config) in reversed(named.items())
            if path not in known
        ]
        if not jobs:
            return
        self.trained += jobs
        self._write_plan(jobs)
        self.observer.planned(jobs)
        self.failures |= train_jobs(jobs, self.jobs, self.observer, self.deadline)

    def _common_execution(self, configs: Sequence[RunConfig]) -> Execution:
        """Return how all runs are executed: with the kernels, and compiled or not, as the runs that are there."""
        execution = self.template.execution
        names = dict.fromkeys([*self.plan.runs, *(config.identity[:12] for config in configs)])
        started = (RunDirectory(find_run(self._stores, name)) for name in names)
        earlier = [environment for run in started for environment in run.read_environments()]
        recorded = next((each for each in earlier if all(name in each for name in KERNEL_SETTINGS)), None)
        operations = _operations(configs[0]) if configs and execution.compile == "auto" and not recorded else 0.0
        choices = choose(execution, operations, recorded)
        if not self.mixed:
            require_same_kernels(self.directory, [*earlier, dataclasses.asdict(choices)])
        compiling: Literal["on", "off"] = "on" if choices.compiled else "off"
        return dataclasses.replace(execution, kernels=choices.kernels, compile=compiling)

    def _write_plan(self, jobs: Sequence[Job]) -> None:
        """Write the plan with these runs and prepare their directories; runs listed before stay listed."""
        before = self.plan
        runs = dict(before.runs)
        for job in jobs:
            planned = runs.setdefault(job.directory.name, job.planned)
            if planned.part is not job.planned.part:
                raise UserError(
                    f"{self.directory} has {planned.name} as a run of {planned.part}, not of {job.planned.part}: "
                    "choose another --out, or the same seeds"
                )
        together = 0
        if any(job.verdict is None for job in jobs):
            together = -(-min(self.jobs, len(jobs)) // max(1, len(shared_gpus(self.template.execution.device))))
        new = any(job.verdict is not None and job.directory.name not in before.runs for job in jobs)
        elsewhere = any(find_run(self._stores, name).parent != self._stores[0] for name in runs)
        if self.stores and (new or elsewhere):
            together = max(together, 2)  # how many runs were trained beside those of another plan is not known here
        plan = ExperimentPlan(
            command=self.command,
            template=self.record,
            data=self.template.task.describe_data(),
            runs=runs,
            comparisons=tuple(dict.fromkeys([*before.comparisons, *self.comparisons])),
            jobs=max(before.jobs, together),
            stores=tuple(Path(os.path.relpath(store, self.directory)).as_posix() for store in self._stores),
        )
        experiment_plan.write_plan(self.directory, plan)
        for job in jobs:
            RunDirectory(job.directory).prepare(job.config)


def train_jobs(
    jobs: Sequence[Job], at_once: int, observer: ExperimentObserver, deadline: float = math.inf
) -> dict[Job, str]:
    """Train the jobs that are not finished, each in a process of its own; return the errors of those that failed.

    The configurations of the jobs are in their directories already. All processes end with this one. Raises OutOfTime
    at the deadline, a time by `time.monotonic`.
    """
    waiting = iter([job for job in jobs if job.verdict is None])
    running: dict[int, tuple[Job, subprocess.Popen[bytes] | SlurmJob]] = {}
    failures: dict[Job, str] = {}
    try:
        while True:
            free = [place for place in range(at_once) if place not in running]
            for place, job in zip(free, waiting, strict=False):
                running[place] = job, _start(job, place)
            if not running:
                return failures
            time.sleep(POLL_SECONDS)
            for place, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[place]
                    error = _error_of(job, process)
                    if error is not None:
                        failures[job] = error
                    observer.ended(job, error)
            observer.progressed([job for job, _ in running.values()])
            if running and time.monotonic() > deadline:
                raise OutOfTime
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            with process:
                process.wait()


def shared_gpus(device: str) -> list[str]:
    """Return the GPUs that workers take turns on, each seeing only its own: all for `cuda`, none for `cuda:1` or a CPU.

    They are named as in CUDA_VISIBLE_DEVICES.
    """
    if device != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def usual_jobs(device: str, threads: int, per_gpu: int = 1) -> int:
    """Return how many runs fit at a time: `per_gpu` for each GPU, or one for every `threads` cores."""
    if not device.startswith("cpu"):
        return per_gpu * max(1, len(shared_gpus(device)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, threads))


def _operations(config: RunConfig) -> float:
    """Return the operations of a run."""
    task = config.task.build(config.seed)
    flops = task.describe(task.build_model(torch.device("meta")))["flops_per_sample"]
    return float(flops) * config.batch * config.steps


def _error_of(job: Job, process: subprocess.Popen[bytes] | SlurmJob) -> str | None:
    """Wait for the process of a job that has ended; return its signal, or the last line of its log, if it failed."""
    with process:  # closes its standard input
        code = process.wait()
    if code == 0:
        return None
    if code < 0:
        return f"killed by signal {-code}"
    log = RunDirectory(job.directory).log_file
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else f"exit code {code}"


def _start(job: Job, place: int) -> subprocess.Popen[bytes] | SlurmJob:
    words = ["-m", "siamesenorm.comparison.worker", str(job.directory.resolve())]
    if job.config.execution.slurm:
        return SlurmJob(job.directory, words, job.config.execution.read_slurm_options())
    threads = str(job.config.execution.threads or 1)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if gpus := shared_gpus(job.config.execution.device):
        environment["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    with open(RunDirectory(job.directory).log_file, "wb") as log:
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
        )
