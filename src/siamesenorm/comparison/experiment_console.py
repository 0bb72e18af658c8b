"""The progress of an experiment for people: a live table on a terminal, a line a run elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from siamesenorm.comparison import formatting
from siamesenorm.comparison.experiment_runner import ExperimentObserver, Job
from siamesenorm.comparison.report_parts import Pill
from siamesenorm.comparison.report_writer import TERMINAL_STYLES
from siamesenorm.comparison.results import NOT_LEARNED
from siamesenorm.errors import UserError
from siamesenorm.progress import ProgressDisplay, format_duration
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import read_metrics

TAIL_BYTES = 4096
LINE_SECONDS = 30.0


@dataclass(slots=True)
class RunProgress:
    """The last step of a job with its loss, the last held-out loss, and once it has ended its verdict.

    `first_step` is where this process began to train it, `notes` counts the notes in its record before that.
    """

    job: Job
    first_step: int
    notes: int
    step: int = 0
    loss: float | None = None
    held_out: float | None = None
    verdict: str | None = None

    def read(self) -> None:
        """Read the state from the last lines of the record."""
        path = RunDirectory(self.job.directory).metrics_file
        self.step, self.loss, self.held_out = 0, None, None
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
                    self.step, self.loss = record["step"], _number(record["loss"])
                case {"kind": "validation"}:
                    self.held_out = _number(record["loss"])
        # A run that resumes from a checkpoint cuts its record back.
        self.first_step = min(self.first_step, self.step)

    @property
    def steps_done(self) -> int:
        """The steps that need no more time."""
        return self.step if self.verdict is None else self.job.config.steps

    def __str__(self) -> str:
        """Write the part that is done, and the loss."""
        loss = "" if self.loss is None else f" loss {self.loss:.2f}"
        return f"{100 * self.step // self.job.config.steps}%{loss}"


class ExperimentConsole(ExperimentObserver):
    """Follows the records of the runs; learning rates are columns, methods rows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs: dict[Job, RunProgress] = {}
        self.running: list[Job] = []
        self.estimated = False
        self.display = ProgressDisplay(unit="samples", line_seconds=LINE_SECONDS, above=self._table, keep=True)

    def close(self) -> None:
        """Show the last state."""
        self.running = []
        self.display.close()

    def planned(self, jobs: Sequence[Job]) -> None:
        """Add jobs, some of which may be finished."""
        what = "further run" if self.runs else "run"
        for job in jobs:
            self.runs[job] = run = RunProgress(job, job.config.steps, len(read_notes(job)))
            run.read()
            if verdict := job.verdict:
                run.verdict = verdict.label
        done = sum(self.runs[job].verdict is not None for job in jobs)
        self._print(f"{formatting.plural(len(jobs), what)} in {self.directory}, {done} of them finished before")

    def progressed(self, running: Sequence[Job]) -> None:
        """Read the records of the running jobs."""
        for job in running:
            self.runs[job].read()
        self.running = list(running)
        done = self._measure()
        if running:
            now = ", ".join(f"{job.name}: {self.runs[job]}" for job in running)
            self.display.update(done, "" if self.display.terminal else now)

    def ended(self, job: Job, error: str | None) -> None:
        """Print how a job ended, and after the first one how long the rest will take."""
        run, verdict = self.runs[job], job.verdict
        run.read()
        run.verdict = "failed" if verdict is None else verdict.label
        for line in read_notes(job)[run.notes :]:
            self.note(f"{job.name}: {line}")
        self._measure()
        result = error or (verdict.sentence() if verdict else "no verdict")
        # After an error the last validation is that of an interrupted run, not a result; what has not learned says it.
        left_out = error or run.held_out is None or run.verdict == NOT_LEARNED
        held_out = "" if left_out else f", held-out {run.held_out:.3f}"
        left = sum(each.verdict is None for each in self.runs.values())
        total, time_left = len(self.runs), self.display.time_left()
        duration = time_left or format_duration(self.display.elapsed)
        self._print(f"[{total - left}/{total}] {job.name}: {result}{held_out}; {duration}")
        if left and not self.estimated and time_left:
            self.note(f"{formatting.plural(left, 'run')} of {total} to train: about {time_left}")
        self.estimated = True

    def note(self, line: str) -> None:
        """Print a line, above the live table where there is one."""
        self.display.line(line)

    def _measure(self) -> int:
        """Count the samples of all runs, and return those that are done."""
        runs = [(run.job.config, run) for run in self.runs.values()]
        done = sum(config.batch * run.steps_done for config, run in runs)
        measured = sum(config.batch * (run.step - run.first_step) for config, run in runs)
        self.display.measure(done, sum(config.batch * config.steps for config, _ in runs), done - measured)
        return done

    def _table(self) -> Table:
        rates = sorted({job.planned.learning_rate for job in self.runs})
        table = Table(title=f"runs in {self.directory}", title_justify="left", header_style="bold")
        table.add_column("method")
        for rate in rates:
            table.add_column(f"lr {rate:g}", justify="right", min_width=16)
        for method in dict.fromkeys(job.planned.method for job in self.runs):
            of_method = [run for job, run in self.runs.items() if job.planned.method == method]
            cells = [[run for run in of_method if run.job.planned.learning_rate == rate] for rate in rates]
            table.add_row(of_method[0].job.planned.label, *map(self._cell, cells))
        return table

    def _cell(self, runs: list[RunProgress]) -> Text:
        """Show the running run of a cell, else the last one that ended, and how many have."""
        active = [run for run in runs if run.job in self.running]
        ended = [run for run in runs if run.verdict is not None]
        if active:
            return Text(str(active[0]), style="cyan")
        if not ended:
            return Text("·" if runs else "", style="dim")
        loss, word = ended[-1].held_out, ended[-1].verdict or ""
        text = word if loss is None else f"{loss:.3f} {word}"
        style = TERMINAL_STYLES[Pill(word, word).tone or "bad"]
        return Text(text + (f" x{len(ended)}" if len(ended) > 1 else ""), style=style)

    def _print(self, line: str) -> None:
        """Print a line where no table shows the same."""
        if not self.display.terminal:
            self.display.line(line)


def read_notes(job: Job) -> list[str]:
    """Return the notes for people in the record of a run."""
    try:
        records = read_metrics(RunDirectory(job.directory).metrics_file)
    except UserError:  # not started, or damaged: the report says so
        return []
    return [str(record["text"]) for record in records if record.get("kind") == "note"]


def _number(value: float | str) -> float | None:
    return None if isinstance(value, str) else float(value)
