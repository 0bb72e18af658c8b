"""The progress of an experiment for people: a live table on a terminal, a line a run elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from siamesenorm.comparison import formatting
from siamesenorm.comparison.experiment import ExperimentObserver, Job
from siamesenorm.comparison.report_parts import TONES
from siamesenorm.comparison.report_writer import TERMINAL_STYLES
from siamesenorm.errors import UserError
from siamesenorm.progress import ProgressDisplay, format_duration
from siamesenorm.training.metrics import read_metrics
from siamesenorm.training.run_directory import RunDirectory

TAIL_BYTES = 4096
LINE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The last step of a run with its loss, and the last held-out loss."""

    step: int
    loss: float | None
    held_out: float | None


class ExperimentConsole(ExperimentObserver):
    """Follows the records of the runs; learning rates are columns, methods rows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs: list[Job] = []
        self.running: list[Job] = []
        self.progress: dict[Job, RunProgress] = {}
        self.words: dict[Job, str] = {}
        self.first_steps: dict[Job, int] = {}
        self.notes: dict[Job, int] = {}
        self.estimated = False
        self.display = ProgressDisplay(unit="samples", line_seconds=LINE_SECONDS, above=self._table, keep=True)

    def close(self) -> None:
        """Show the last state."""
        self.running = []
        self.display.close()

    def planned(self, jobs: Sequence[Job]) -> None:
        """Add jobs, some of which may be finished."""
        self.jobs += jobs
        done = 0
        for job in jobs:
            verdict = job.verdict
            self.progress[job] = read_progress(RunDirectory(job.directory).metrics_file)
            self.first_steps[job] = self.progress[job].step
            self.notes[job] = len(read_notes(RunDirectory(job.directory)))
            if verdict is not None:
                self.words[job] = verdict.label
                done += 1
        self._print(f"{formatting.plural(len(jobs), 'run')} in {self.directory}, {done} of them finished before")

    def progressed(self, running: Sequence[Job]) -> None:
        """Read the records of the running jobs."""
        for job in running:
            self.progress[job] = read_progress(RunDirectory(job.directory).metrics_file)
            # A run that resumes from a checkpoint cuts its record back.
            self.first_steps[job] = min(self.first_steps[job], self.progress[job].step)
        self.running = list(running)
        done = self._measure()
        if running:
            now = ", ".join(f"{job.name}: {_description(self.progress[job], job)}" for job in running)
            self.display.update(done, "" if self.display.terminal else now)

    def ended(self, job: Job, error: str | None) -> None:
        """Print how a job ended, and after the first one how long the rest will take."""
        self.progress[job] = progress = read_progress(RunDirectory(job.directory).metrics_file)
        verdict = job.verdict
        self.words[job] = "failed" if verdict is None else verdict.label
        for line in read_notes(RunDirectory(job.directory))[self.notes[job] :]:
            self.note(f"{job.name}: {line}")
        self._measure()
        result = error or (verdict.sentence() if verdict else "no verdict")
        # After an error the last validation is that of an interrupted run, not a result.
        held_out = "" if error or progress.held_out is None else f", held-out {progress.held_out:.3f}"
        self._print(f"[{len(self.words)}/{len(self.jobs)}] {job.name}: {result}{held_out}; {self._time()}")
        left = len(self.jobs) - len(self.words)
        if left and not self.estimated and (time_left := self.display.time_left()):
            self.note(f"{formatting.plural(left, 'run')} of {len(self.jobs)} to train: about {time_left}")
        self.estimated = True

    def note(self, line: str) -> None:
        """Print a line, above the live table where there is one."""
        self.display.line(line)

    def _measure(self) -> int:
        """Count the samples of all runs, and return those that are done."""
        done = sum(job.config.batch * self._steps_done(job) for job in self.jobs)
        measured = sum(job.config.batch * (self.progress[job].step - self.first_steps[job]) for job in self.jobs)
        self.display.measure(done, sum(job.config.batch * job.config.steps for job in self.jobs), done - measured)
        return done

    def _table(self) -> Table:
        rates = sorted({job.planned.learning_rate for job in self.jobs})
        table = Table(title=f"runs in {self.directory}", title_justify="left", header_style="bold")
        table.add_column("method")
        for rate in rates:
            table.add_column(f"lr {rate:g}", justify="right", min_width=16)
        for method in dict.fromkeys(job.planned.method for job in self.jobs):
            of_method = [job for job in self.jobs if job.planned.method == method]
            cells = [[job for job in of_method if job.planned.learning_rate == rate] for rate in rates]
            table.add_row(of_method[0].planned.label, *map(self._cell, cells))
        return table

    def _cell(self, jobs: list[Job]) -> Text:
        """Show the running job of a cell, else the last one that ended, and how many have."""
        active = [job for job in jobs if job in self.running]
        ended = [job for job in jobs if job in self.words]
        if active:
            return Text(_description(self.progress[active[0]], active[0]), style="cyan")
        if not ended:
            return Text("·" if jobs else "", style="dim")
        job = ended[-1]
        loss, word = self.progress[job].held_out, self.words[job]
        text = word if loss is None else f"{loss:.3f} {word}"
        style = TERMINAL_STYLES[TONES.get(word, "bad")]
        return Text(text + (f" x{len(ended)}" if len(ended) > 1 else ""), style=style)

    def _steps_done(self, job: Job) -> int:
        return job.config.steps if job in self.words else self.progress[job].step

    def _time(self) -> str:
        return self.display.time_left() or format_duration(self.display.elapsed)

    def _print(self, line: str) -> None:
        """Print a line where no table shows the same."""
        if not self.display.terminal:
            self.display.line(line)


def read_progress(path: Path) -> RunProgress:
    """Return the state of a run, from the last lines of its record."""
    step, loss, held_out = 0, None, None
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        lines = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the first line is cut off, the last may be half-written
            continue
        match record:
            case {"kind": "train"}:
                step, loss = record["step"], _number(record["loss"])
            case {"kind": "validation"}:
                held_out = _number(record["loss"])
    return RunProgress(step, loss, held_out)


def read_notes(run: RunDirectory) -> list[str]:
    """Return the notes for people in the record of a run."""
    try:
        return [str(record["text"]) for record in read_metrics(run.metrics_file) if record.get("kind") == "note"]
    except UserError:  # not started, or damaged: the report says so
        return []


def _number(value: float | str) -> float | None:
    return None if isinstance(value, str) else float(value)


def _description(progress: RunProgress, job: Job) -> str:
    loss = "" if progress.loss is None else f" loss {progress.loss:.2f}"
    return f"{100 * progress.step // job.config.steps}%{loss}"
