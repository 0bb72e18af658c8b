"""What a person sees of a sweep: a live table on a terminal, a line a run elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.table import Table
from rich.text import Text

from siamesenorm.comparison.sweep import Job
from siamesenorm.progress import ProgressDisplay, format_duration
from siamesenorm.training.verdict import Verdict

TAIL_BYTES = 4096
LINE_SECONDS = 30.0
STYLES = {"stable": "green", "spiked": "yellow", "diverged": "red"}


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has come."""

    step: int
    loss: float | None
    held_out: float | None


class SweepConsole:
    """Follows the records of the runs; learning rates are columns, methods rows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs: list[Job] = []
        self.running: list[Job] = []
        self.progress: dict[Job, RunProgress] = {}
        self.words: dict[Job, str] = {}
        self.first_steps: dict[Job, int] = {}
        self.display = ProgressDisplay(unit="tokens", line_seconds=LINE_SECONDS, above=self._table, keep=True)

    def __enter__(self) -> Self:
        """Return the console."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the last state."""
        self.running = []
        self.display.close()

    def planned(self, jobs: list[Job]) -> None:
        """Take in new jobs, some of which may be finished."""
        self.jobs += jobs
        done = 0
        for job in jobs:
            verdict = job.verdict
            self.progress[job] = read_progress(job.directory / "metrics.jsonl")
            self.first_steps[job] = self.progress[job].step
            if verdict is not None:
                self.words[job] = verdict.label
                done += 1
        self._print(f"{len(jobs)} runs in {self.directory}, {done} of them finished before")

    def progressed(self, running: list[Job]) -> None:
        """Read the records of the running jobs."""
        for job in running:
            self.progress[job] = read_progress(job.directory / "metrics.jsonl")
            # A run that goes on from a checkpoint cuts its record back.
            self.first_steps[job] = min(self.first_steps[job], self.progress[job].step)
        self.running = running
        done = self._measure()
        if running:
            now = ", ".join(f"{job.name}: {_told(self.progress[job], job)}" for job in running)
            self.display.update(done, "" if self.display.terminal else now)

    def _measure(self) -> int:
        """Count the tokens of all runs, and return those that are done."""
        batch = self.jobs[0].config.batch
        done = batch * sum(map(self._steps_done, self.jobs))
        measured = batch * sum(self.progress[job].step - self.first_steps[job] for job in self.jobs)
        self.display.measure(done, batch * sum(job.config.steps for job in self.jobs), done - measured)
        return done

    def ended(self, job: Job, error: str | None) -> None:
        """Say how a job ended."""
        self.progress[job] = progress = read_progress(job.directory / "metrics.jsonl")
        verdict: Verdict | None = job.verdict
        self.words[job] = "failed" if verdict is None else verdict.label
        for line in _lines_going_back(job.directory / "log.txt"):
            self.told(f"{job.name}: {line}")
        self._measure()
        told = error or (verdict.sentence() if verdict else "no verdict")
        # After an error the last validation is that of an interrupted run, not a result.
        held_out = "" if error or progress.held_out is None else f", held-out {progress.held_out:.3f}"
        self._print(f"[{len(self.words)}/{len(self.jobs)}] {job.name}: {told}{held_out}; {self._time()}")

    def told(self, line: str) -> None:
        """Say something, above the live table where there is one."""
        self.display.line(line)

    def _table(self) -> Table:
        rates = sorted({job.config.optimizer.learning_rate for job in self.jobs})
        table = Table(title=f"sweep in {self.directory}", title_justify="left", header_style="bold")
        table.add_column("method")
        for rate in rates:
            table.add_column(f"lr {rate:g}", justify="right", min_width=16)
        for method in dict.fromkeys(job.config.label for job in self.jobs):
            cells = []
            for rate in rates:
                here = [
                    job
                    for job in self.jobs
                    if job.config.label == method and job.config.optimizer.learning_rate == rate
                ]
                cells.append(self._cell(here))
            table.add_row(method, *cells)
        return table

    def _cell(self, jobs: list[Job]) -> Text:
        """Show the running job of a cell, else the last one that ended, and how many have."""
        active = [job for job in jobs if job in self.running]
        ended = [job for job in jobs if job in self.words]
        if active:
            return Text(_told(self.progress[active[0]], active[0]), style="cyan")
        if not ended:
            return Text("·" if jobs else "", style="dim")
        job = ended[-1]
        loss, word = self.progress[job].held_out, self.words[job]
        text = word if loss is None else f"{loss:.3f} {word}"
        return Text(text + (f" x{len(ended)}" if len(ended) > 1 else ""), style=STYLES.get(word, "red"))

    def _steps_done(self, job: Job) -> int:
        return job.config.steps if job in self.words else self.progress[job].step

    def _time(self) -> str:
        return self.display.time_left() or format_duration(self.display.elapsed)

    def _print(self, line: str) -> None:
        """Print a line where no table shows the same."""
        if not self.display.terminal:
            self.display.line(line)


def read_progress(path: Path) -> RunProgress:
    """Return how far a record has come, from its last lines."""
    step, loss, held_out = 0, None, None
    for record in _last_records(path):
        if record.get("kind") == "train":
            step, loss = record["step"], _number(record["loss"])
        elif record.get("kind") == "validation":
            held_out = _number(record["loss"])
    return RunProgress(step, loss, held_out)


def _last_records(path: Path) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _lines_going_back(log: Path) -> list[str]:
    """Return what a worker said of checkpoints that it passed over."""
    try:
        return [line for line in log.read_text(errors="replace").splitlines() if "going back to " in line]
    except OSError:
        return []


def _number(value: float | str) -> float | None:
    return None if isinstance(value, str) else float(value)


def _told(progress: RunProgress, job: Job) -> str:
    loss = "" if progress.loss is None else f" loss {progress.loss:.2f}"
    return f"{100 * progress.step // job.config.steps}%{loss}"
