"""Start a run from the weights of a finished one, converted to its own model.

The optimizer and the schedule start anew. The order of the data continues after the source's samples where both have
the same order: then no sample is read twice. A run with a checkpoint of its own does not need its source.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.tasks.task import Task
from siamesenorm.training.checkpoint import load_checkpoint
from siamesenorm.training.config import RunConfig, WarmStart
from siamesenorm.training.run_directory import RunDirectory


def start_after(source: RunConfig, directory: Path, config: RunConfig) -> RunConfig:
    """Return the run of `config` with the weights of the run of `source` in `directory` as its start.

    Where both read the same samples in the same order, those of the source are skipped.
    """
    before = source.warm_start.position if source.warm_start else 0
    same_order = source.seed == config.seed and config.task.same_order(source.task)
    position = before + source.steps * source.batch if same_order else 0
    start = WarmStart(run=source.identity, path=directory.resolve(), position=position)
    return dataclasses.replace(config, warm_start=start)


def continue_run(config: RunConfig, directory: Path) -> RunConfig:
    """Return the run of `config` from the weights of the finished run in `directory`.

    Its topology gets the options with which it starts where the source's model is. Raises UserError for a source that
    is not finished or cannot become the model of `config`.
    """
    source = finished_run(directory)
    config = dataclasses.replace(config, task=config.task.continued(source.task))
    return start_after(source, directory, config.resolved())


def start_defaults(config: RunConfig, directory: Path) -> RunConfig:
    """Return the run of `config` with the model of the finished run in `directory`, as its task starts from one."""
    return dataclasses.replace(config, task=config.task.starting_from(finished_run(directory).task))


def require_start(config: RunConfig) -> None:
    """Raise UserError unless the run that `config` starts from is there, finished, and can become its model."""
    if config.warm_start is not None:
        source = _source_of(config.warm_start)
        config.task.require_convertible(source.task)
        if not RunDirectory(config.warm_start.path).checkpoints.is_dir():
            raise UserError(f"{config.warm_start.path} has no checkpoints: train it again, or keep them")


def load_start(start: WarmStart, task: Task) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights that a run of `task` starts from, on the CPU, and the entry of its record on them.

    Raises UserError as `require_start` does.
    """
    source = _source_of(start)
    checkpoint = load_checkpoint(RunDirectory(start.path).checkpoints, groups=("model",))
    if checkpoint is None or checkpoint.step != source.steps:
        reached = "no checkpoint" if checkpoint is None else f"step {checkpoint.step} as its last checkpoint"
        raise UserError(
            f"{start.path} has {reached}, not its last step {source.steps}: start from a run that reached its end"
        )
    weights, differences = task.convert_weights(source.task, checkpoint.tensors["model"])
    return weights, {"run": start.run, "position": start.position, "differences": list(differences)}


def finished_run(directory: Path) -> RunConfig:
    """Return the configuration of a finished run; raises UserError for any other directory."""
    run = RunDirectory(directory)
    config = run.read_config()
    if run.read_verdict() is None:
        raise UserError(f"{directory} is not finished: train it to its end before another run starts from it")
    return config


def _source_of(start: WarmStart) -> RunConfig:
    source = finished_run(start.path)
    if source.identity != start.run:
        raise UserError(f"{start.path} holds run {source.identity[:12]}, not {start.run[:12]}: restore that run")
    return source
