"""Instruments watch a run: the console, the log of a worker, TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from siamesenorm.errors import optional
from siamesenorm.progress import ProgressDisplay
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loop import Instrument, Record, TrainingLoop
from siamesenorm.training.verdict import Reason, Verdict

SCALARS = ("loss", "learning_rate", "gradient_norm", "step_seconds")


class Console(Instrument):
    """Shows step, loss, rate and time left on standard error."""

    display: ProgressDisplay
    held_out = ""

    def on_start(self, loop: TrainingLoop, step: int) -> None:
        """Show where the run starts or resumes."""
        config, item = loop.config, f"{loop.task.item}s"
        self.display = ProgressDisplay(unit=item)
        self.items = config.batch * loop.task.items_per_sample
        where = "starts" if step == 0 else f"resumes after step {step}"
        self.display.line(
            f"{config.label} @ {config.optimizer.learning_rate:g}, seed {config.seed}: "
            f"{config.steps} steps of {self.items:,} {item}, {where}"
        )
        self.display.start(config.steps * self.items, step * self.items)

    def on_step(self, loop: TrainingLoop, record: Record) -> None:
        """Show the newest loss."""
        validated = f"{self.held_out} (step {self.validated})" if self.held_out else ""
        text = f"step {record['step']}/{loop.config.steps}: loss {record['loss']:.3f}{validated}"
        self.display.update(record["step"] * self.items, text)

    def on_validation(self, loop: TrainingLoop, record: Record) -> None:
        """Keep the metrics for the next line."""
        found = (f", held-out {metric.label} {record[metric.name]:{metric.format}}" for metric in loop.task.metrics)
        self.held_out, self.validated = "".join(found), record["step"]

    def on_note(self, loop: TrainingLoop, line: str) -> None:
        """Show a line."""
        self.display.line(line)

    def on_end(self, loop: TrainingLoop, verdict: Verdict) -> None:
        """Show the verdict."""
        self.close()
        self.display.line(verdict.sentence() + ("" if Reason.NOT_LEARNED in verdict.reasons[:1] else self.held_out))

    def close(self) -> None:
        """Remove the live line, if the run was started."""
        if hasattr(self, "display"):
            self.display.close()


class WorkerLog(Instrument):
    """Prints notes to standard output, which an experiment keeps as the run's log."""

    def on_note(self, loop: TrainingLoop, line: str) -> None:
        """Print the line at once: what is on standard error comes after it."""
        print(line, flush=True)


class TensorBoardTracker(Instrument):
    """Writes the numbers of every record as TensorBoard events."""

    def __init__(self, directory: Path) -> None:
        self.module, self.directory = optional("torch.utils.tensorboard", "track", "tensorboard"), directory
        self.writer: Any = None

    def on_start(self, loop: TrainingLoop, step: int) -> None:
        """Open the file, without what an interrupted process wrote of the steps that are repeated."""
        self.writer = self.module.SummaryWriter(str(self.directory / "tensorboard"), purge_step=step + 1)

    def on_record(self, loop: TrainingLoop, record: Record) -> None:
        """Write the numbers of a record."""
        for name, value in _scalars(loop, record).items():
            self.writer.add_scalar(name, value, record["step"])

    def on_note(self, loop: TrainingLoop, line: str) -> None:
        """Write the line as text."""
        self.writer.add_text("notes", line)

    def on_end(self, loop: TrainingLoop, verdict: Verdict) -> None:
        """Write the verdict."""
        self.writer.add_text("verdict", verdict.sentence())

    def close(self) -> None:
        """Write what is queued, of a run that stops before its end, too."""
        if self.writer is not None:
            self.writer.close()


class WandbTracker(Instrument):
    """Mirrors the numbers of every record to Weights & Biases; a resumed run continues under its name."""

    def __init__(self, directory: Path) -> None:
        self.module, self.directory = optional("wandb", "track", "the tracker"), directory
        self.run: Any = None

    def on_start(self, loop: TrainingLoop, step: int) -> None:
        """Open the run, new or resumed."""
        config = loop.config
        self.run = self.module.init(
            project="siamesenorm", id=config.identity[:12], name=config.label, config=config.to_json(),
            dir=str(self.directory), resume="allow",
        )  # fmt: skip

    def on_record(self, loop: TrainingLoop, record: Record) -> None:
        """Log the numbers of a record."""
        if values := _scalars(loop, record):
            self.run.log(values, step=record["step"])

    def on_end(self, loop: TrainingLoop, verdict: Verdict) -> None:
        """Log the verdict."""
        self.run.summary["verdict"] = verdict.sentence()

    def close(self) -> None:
        """Send what is queued, of a run that stops before its end, too."""
        if self.run is not None:
            self.run.finish()


TRACKERS: dict[str, Callable[[Path], Instrument]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}


def build_trackers(config: RunConfig, directory: Path) -> tuple[Instrument, ...]:
    """Return the trackers that the configuration names; raises UserError where one is not installed."""
    return tuple(TRACKERS[name](directory) for name in config.execution.trackers)


def _scalars(loop: TrainingLoop, record: Record) -> dict[str, float]:
    names = {*SCALARS, *(metric.name for metric in loop.task.metrics)}
    return {f"{record['kind']}/{name}": record[name] for name in sorted(names & record.keys()) if "step" in record}
