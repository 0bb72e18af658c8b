"""Train a grid of runs, several at a time, and go on where an interrupted sweep stopped.

A sweep is a directory with `sweep.json` and `runs/<id>`; a run's name is its identity, so a run that is finished is
never trained twice. Each run has a process of its own; one that fails does not stop the others.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from siamesenorm.comparison.findings import choose_learning_rate
from siamesenorm.comparison.grid import Grid
from siamesenorm.comparison.results import read_sweep
from siamesenorm.data import PreparedData
from siamesenorm.data.storage import disk_errors_told, exclusive, write_atomically
from siamesenorm.errors import UserError
from siamesenorm.training.config import RunConfig
from siamesenorm.training.exact_json import encode_json
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
        return f"{self.config.model.label} @ {self.config.optimizer.learning_rate:g}, seed {self.config.seed}"

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

        Raises UserError when the directory holds something else, and for methods that cannot be configured.
        """
        selection = list(self.grid.selection_runs(self.template))
        with disk_errors_told(self.directory):
            self._require_sweep_directory()
            self.directory.mkdir(parents=True, exist_ok=True)
        with exclusive(self.directory / "lock"):
            self._train(selection)
            self._train(self._reported_runs())

    def _reported_runs(self) -> Iterator[RunConfig]:
        """Yield the runs with further seeds at each method's chosen rate."""
        if not self.grid.seeds or len(self.failures) == len(self.planned):
            return
        results = read_sweep(self.directory)
        method_of = {run.path.name: run.method for run in results.runs}
        for method in self.grid.reported_methods:
            one = next(iter(Grid(methods=(method,), learning_rates=self.grid.learning_rates, control=False,
                                 selection_seed=self.grid.selection_seed).selection_runs(self.template)))  # fmt: skip
            result = method_of.get(one.identity[:12])
            choice = choose_learning_rate(results, result) if result else None
            if choice is not None:
                yield from self.grid.reported_runs(self.template, method, choice.learning_rate)

    def _train(self, configs: Iterable[RunConfig]) -> None:
        known = {job.directory for job in self.planned}
        named = {self.directory / "runs" / config.identity[:12]: config for config in configs}
        jobs = [Job(config=named[path], directory=path) for path in named if path not in known]
        if not jobs:
            return
        self.planned += jobs
        self._write_plan()
        self.observer.planned(jobs)
        waiting = iter([job for job in jobs if job.verdict is None])
        running: dict[Job, subprocess.Popen[bytes]] = {}
        places: dict[Job, int] = {}
        with _all_ended(running):
            while True:
                for job in itertools.islice(waiting, self.jobs - len(running)):
                    places[job] = min(set(range(self.jobs)) - {places[other] for other in running})
                    running[job] = _start(job, places[job])
                if not running:
                    return
                time.sleep(POLL_SECONDS)
                for job in [job for job, process in running.items() if process.poll() is not None]:
                    self._end(job, running.pop(job))
                self.observer.progressed(list(running))

    def _end(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        error = None
        with process:  # closes its standard input
            process.wait()
        if process.returncode:
            lines = (job.directory / "log.txt").read_text(errors="replace").strip().splitlines()
            error = lines[-1] if lines else f"exit code {process.returncode}"
            self.failures[job.name] = error
        self.observer.ended(job, error)

    def _require_sweep_directory(self) -> None:
        path = self.directory
        if (
            path.exists()
            and not (path / "sweep.json").is_file()
            and (not path.is_dir() or {each.name for each in path.iterdir()} - {"lock"})
        ):
            raise UserError(f"{path} exists and is not the directory of a sweep: choose another directory")

    def _describe_data(self) -> dict[str, Any]:
        manifest = PreparedData.open(self.template.data_path).manifest
        return {
            "digest": manifest.digest,
            "source": manifest.source,
            "tokenizer": dataclasses.asdict(manifest.tokenizer),
        }

    def _write_plan(self) -> None:
        plan: dict[str, Any] = {
            "schema": 1,
            "command": self.command,
            "data": self._describe_data(),
            "grid": self.grid.to_json(),
            "runs": [str(job.directory.relative_to(self.directory)) for job in self.planned],
        }
        with disk_errors_told(self.directory):
            write_atomically(self.directory / "sweep.json", (encode_json(plan, indent=1) + "\n").encode())
            for job in self.planned:
                RunDirectory(job.directory).prepare(job.config)


def _start(job: Job, place: int) -> subprocess.Popen[bytes]:
    threads = str(job.config.execution.threads or 1)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if job.config.execution.device == "cuda":
        environment |= _own_gpu(place)
    with open(job.directory / "log.txt", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "siamesenorm.training.worker", str(job.directory)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
        )


def _own_gpu(place: int) -> dict[str, str]:
    """Return the variable that shows one GPU to the worker at a place: its own, until there are more workers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {}


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
