"""Mirrors of the record for people who watch elsewhere: TensorBoard and Weights & Biases (the `track` extra)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loop import Observer
from siamesenorm.training.verdict import Verdict

SCALARS = ("loss", "learning_rate", "gradient_norm", "step_seconds")


class TensorBoardTracker:
    """Writes the numbers of every step as TensorBoard events."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.module = _import("torch.utils.tensorboard", "tensorboard")
        self.directory = directory

    def started(self, config: RunConfig, step: int) -> None:
        """Open the file, without what an interrupted process wrote of the steps that come again."""
        self.writer = self.module.SummaryWriter(str(self.directory / "tensorboard"), purge_step=step + 1)

    def recorded(self, record: dict[str, Any]) -> None:
        """Write the numbers of a record."""
        for name in SCALARS:
            if name in record and "step" in record:
                self.writer.add_scalar(f"{record['kind']}/{name}", record[name], record["step"])

    def told(self, line: str) -> None:
        """Write the line as text."""
        self.writer.add_text("notes", line)

    def ended(self, verdict: Verdict) -> None:
        """Write the verdict and close."""
        self.writer.add_text("verdict", verdict.sentence())
        self.writer.close()


class WandbTracker:
    """Mirrors the numbers of every step to Weights & Biases; a resumed run goes on under its name."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.module = _import("wandb", "wandb")
        self.directory = directory

    def started(self, config: RunConfig, step: int) -> None:
        """Open the run, new or to go on."""
        self.run = self.module.init(
            project="siamesenorm",
            id=config.identity[:12],
            name=config.model.label,
            config=config.to_json(),
            dir=str(self.directory),
            resume="allow",
        )

    def recorded(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record."""
        if "step" in record:
            values = {f"{record['kind']}/{name}": record[name] for name in SCALARS if name in record}
            self.run.log(values, step=record["step"])

    def told(self, line: str) -> None:
        """Nothing to say."""

    def ended(self, verdict: Verdict) -> None:
        """Log the verdict and close."""
        self.run.summary["verdict"] = verdict.sentence()
        self.run.finish()


def build_trackers(config: RunConfig, directory: Path) -> list[Observer]:
    """Return the trackers that the configuration names; raises UserError where one is not installed."""
    classes: dict[str, Callable[[RunConfig, Path], Observer]] = {
        "tensorboard": TensorBoardTracker,
        "wandb": WandbTracker,
    }
    return [classes[name](config, directory) for name in config.execution.trackers]


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"tracker {package} is not installed: pip install 'siamesenorm[track]'") from error
