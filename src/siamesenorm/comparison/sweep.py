"""Train a grid of runs, several at a time, and go on where an interrupted sweep stopped.

A sweep is a directory with `sweep.json` and `runs/<id>`; a run's name is its identity, so a run that is finished is
never trained twice. Each run has a process of its own; one that fails does not stop the others.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from siamesenorm.comparison.findings import choose_learning_rate
from siamesenorm.comparison.grid import Grid
from siamesenorm.comparison.results import read_sweep
from siamesenorm.comparison.sweep_directory import SweepDirectory
from siamesenorm.training.config import RunConfig
from siamesenorm.training.environment import find_device
from siamesenorm.training.instruments import build_trackers
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import Verdict

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a sweep."""

    config: RunConfig
    directory: Path

    @property
    def name(self) -> str:
        """Method, learning rate and seed."""
        method = f"{self.config.label}{', continued' if self.config.warm_start else ''}"
        return f"{method} @ {self.config.optimizer.learning_rate:g}, seed {self.config.seed}"

    @property
    def verdict(self) -> Verdict | None:
        """The verdict, once the run is finished."""
        return RunDirectory(self.directory).read_verdict()


class SweepObserver(Protocol):
    """What wants to know how a sweep goes on."""

    def planned(self, jobs: list[Job]) -> None:
        """Jobs were added to the plan; some may be finished already."""

    def progressed(self, running: list[Job]) -> None:
        """Some time has passed; these jobs are running."""

    def told(self, line: str) -> None:
        """Something a person should know."""

    def ended(self, job: Job, error: str | None) -> None:
        """A job has ended, with a verdict or an error."""


@dataclass(slots=True, kw_only=True)
class SweepRun:
    """A grid being trained in a directory, `jobs` runs at a time with `threads` threads each."""

    grid: Grid
    template: RunConfig
    directory: Path
    jobs: int
    observer: SweepObserver
    command: str | None = None
    planned: list[Job] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Train everything that is not finished yet; `failures` then names the runs that ended with an error.

        Raises UserError when the directory holds another sweep or something else, for methods that cannot be
        configured, and where data, device or trackers are not at hand; it has then written nothing.
        """
        selection = list(self.grid.selection_runs(self.template))
        self.template.task.build(self.template.seed)
        find_device(self.template.execution.device)
        build_trackers(self.template, self.directory)
        with SweepDirectory(self.directory).claimed(self.template):
            self._train(selection)
            self._train(self._reported_runs())

    def _reported_runs(self) -> Iterator[RunConfig]:
        """Yield the runs with further seeds at each method's chosen rate, and name the methods that have none."""
        if set(self.grid.seeds) <= {self.grid.selection_seed} or len(self.failures) == len(self.planned):
            return
        results = read_sweep(self.directory)
        method_of = {run.path: run.method for run in results.runs}
        for method in self.grid.reported_methods:
            tried = map(SweepDirectory(self.directory).run_directory, self.grid.rates_of(self.template, method))
            result = next((method_of[path] for path in tried if path in method_of), None)
            choice = choose_learning_rate(results, result) if result else None
            if choice is None:
                self.observer.told(
                    f"{method}: no further seeds, for no run of seed {self.grid.selection_seed} has a result"
                )
            else:
                yield from self.grid.reported_runs(self.template, method, choice.learning_rate)

    def _train(self, configs: Iterable[RunConfig]) -> None:
        known = {job.directory for job in self.planned}
        named = {SweepDirectory(self.directory).run_directory(config): config for config in configs}
        jobs = [Job(config=named[path], directory=path) for path in named if path not in known]
        if not jobs:
            return
        self.planned += jobs
        self._write_plan()
        self.observer.planned(jobs)
        self.failures |= train_jobs(jobs, self.jobs, self.observer)

    def _write_plan(self) -> None:
        directories = [job.directory for job in self.planned]
        SweepDirectory(self.directory).write_plan(self.template, self.grid, directories, self.command)
        for job in self.planned:
            RunDirectory(job.directory).prepare(job.config)


def train_jobs(jobs: list[Job], at_once: int, observer: SweepObserver) -> dict[str, str]:
    """Train the jobs that are not finished, each in a process of its own; return the errors of those that failed.

    The configurations of the jobs are in their directories already.
    """
    waiting = iter([job for job in jobs if job.verdict is None])
    running: dict[Job, subprocess.Popen[bytes]] = {}
    places: dict[Job, int] = {}
    failures: dict[str, str] = {}
    with _all_ended(running):
        while True:
            for job in itertools.islice(waiting, at_once - len(running)):
                places[job] = min(set(range(at_once)) - {places[other] for other in running})
                running[job] = _start(job, places[job])
            if not running:
                return failures
            time.sleep(POLL_SECONDS)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                error = _error_of(job, running.pop(job))
                if error is not None:
                    failures[job.name] = error
                observer.ended(job, error)
            observer.progressed(list(running))


def _error_of(job: Job, process: subprocess.Popen[bytes]) -> str | None:
    """Wait for the process of a job that has ended, and return the last thing it said if it failed."""
    with process:  # closes its standard input
        process.wait()
    if not process.returncode:
        return None
    lines = (job.directory / "log.txt").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {process.returncode}"


def _start(job: Job, place: int) -> subprocess.Popen[bytes]:
    threads = str(job.config.execution.threads or 1)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if gpus := shared_gpus(job.config.execution.device):
        environment["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    with open(job.directory / "log.txt", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "siamesenorm.training.worker", str(job.directory)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
        )


def shared_gpus(device: str) -> list[str]:
    """Return the GPUs that workers take turns on, each seeing only its own: all for `cuda`, none for `cuda:1` or a CPU.

    They are named as in CUDA_VISIBLE_DEVICES.
    """
    if device != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def _all_ended(running: dict[Job, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Leave no worker behind, however the block ends."""
    try:
        yield
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            with process:
                process.wait()
