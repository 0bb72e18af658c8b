"""Runs as jobs of Slurm, through submitit (the `cluster` extra): one job a run, on one or more nodes.

A job that is preempted, out of time or requeued runs its command again, which resumes the run from its last checkpoint.
A process that watches jobs finds those of a process before it by the file `slurm.json` of the run.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, encode_json, write_atomically
from siamesenorm.training.run_directory import RunDirectory

POLL_SECONDS = 5.0
"""Between two questions to the controller."""
MOST_TIMEOUTS = 1000
"""How often a job is requeued that is out of time."""
SECONDS_TO_LEAVE = 80
"""Of the 90 between Slurm's warning and the end of a job: for the step under way and its checkpoint."""
CANCELLED = -15
WARNED = 128 + getattr(signal, "SIGUSR2", 12)
"""Exit code of a process that had the warning."""
IN_JOB = "SIAMESENORM_IN_JOB"
"""Environment variable of a command that a job runs: it trains, and submits nothing."""
COUNTED = ("nodes", "ntasks-per-node", "time")
"""Options that submitit computes with; the others are passed on as they are."""


class Command:
    """A command that each task of a job runs in a process of its own, as one of the processes of `World`."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.words, self.log = list(words), log
        self.waiting: threading.Thread | None = None

    def __call__(self) -> None:
        """Run the command and wait; raises RuntimeError where it fails, so that the job has failed, too."""
        import submitit

        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        with open(self.log, "ab") as log:
            # An open pipe: a worker ends when its standard input is closed.
            process = subprocess.Popen(
                [sys.executable, *self.words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, IN_JOB: "1"},
            )
        # In a thread: the handler of a signal, which waits, too, cannot while its own thread does.
        self.waiting = threading.Thread(target=process.wait, daemon=True)
        self.waiting.start()
        self._wait()
        if process.returncode == WARNED:
            time.sleep(SECONDS_TO_LEAVE)  # the first task requeues the job, which ends this one; failing ends the first
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: see {self.log}")

    def checkpoint(self) -> Any:
        """Return what runs after the job is requeued, once the process, which has the signal, too, has stopped."""
        import submitit

        self._wait(SECONDS_TO_LEAVE)
        return submitit.helpers.DelayedSubmission(Command(self.words, self.log))

    def _wait(self, seconds: float = math.inf) -> None:
        end = time.monotonic() + seconds
        while self.waiting is not None and self.waiting.is_alive() and time.monotonic() < end:
            time.sleep(0.1)


class SlurmJob:
    """A job of a run, with the methods of a process: `poll`, `wait`, `terminate`.

    A job of the run that is still in the queue or running is watched; else one is submitted. Raises UserError without
    submitit, and where Slurm refuses the job.
    """

    def __init__(self, directory: Path, words: Sequence[str], options: Mapping[str, int | str]) -> None:
        run = RunDirectory(directory)
        self.returncode: int | None = None
        self.asked = 0.0
        self.finished = run.verdict_file
        self.id = _id_of(run)
        if self.id not in require_slurm():
            self.id = _submit(run, words, options)

    def poll(self) -> int | None:
        """Return the exit code, or None of a job that waits or runs; asks the controller every five seconds."""
        if self.returncode is None and time.monotonic() > self.asked + POLL_SECONDS:
            self.asked = time.monotonic()
            jobs = active_jobs()
            if jobs is not None and self.id not in jobs:
                self.returncode = 0 if self.finished.is_file() else 1
        return self.returncode

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def terminate(self) -> None:
        """Cancel the job."""
        subprocess.run(["scancel", self.id], check=False, capture_output=True)
        self.returncode = CANCELLED

    def __enter__(self) -> Self:
        """Return the job."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Do nothing: unlike a process a job has no pipes to close."""


def require_slurm() -> set[str]:
    """Return the numbers of this user's jobs that wait or run; raises UserError without Slurm or submitit."""
    if find_spec("submitit") is None:
        raise UserError("--execution.slurm needs submitit: pip install 'siamesenorm[cluster]'")
    jobs = active_jobs()
    if jobs is None:
        raise UserError("squeue fails: run this where Slurm's commands work, or leave out --execution.slurm")
    return jobs


def active_jobs() -> set[str] | None:
    """Return the numbers of this user's jobs that wait or run; None where the controller does not answer."""
    try:
        found = subprocess.run(["squeue", "--me", "--noheader", "--format=%i"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if found.returncode else set(found.stdout.split())


def _id_of(run: RunDirectory) -> str:
    try:
        return str(decode_json(run.slurm_file.read_bytes())["job"])
    except (OSError, ValueError):
        return ""


def _submit(run: RunDirectory, words: Sequence[str], options: Mapping[str, int | str]) -> str:
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.SlurmExecutor(folder=run.slurm_logs, max_num_timeout=MOST_TIMEOUTS)
    executor.update_parameters(
        **{name.replace("-", "_"): value for name, value in options.items() if name in COUNTED},
        additional_parameters={"job-name": run.path.name} | {n: v for n, v in options.items() if n not in COUNTED},
        srun_args=["--kill-on-bad-exit=1"],  # the processes of a run end together
    )
    try:
        job = executor.submit(Command(words, run.log_file.resolve()))
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(f"Slurm refuses the job of {run.path}: {str(error).strip().splitlines()[-1]}") from error
    write_atomically(run.slurm_file, (encode_json({"job": job.job_id}) + "\n").encode())
    return str(job.job_id)
