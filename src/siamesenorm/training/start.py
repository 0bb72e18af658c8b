"""Start a run from the weights of a finished one, converted to its own model.

The optimizer and the schedule begin anew. The order of the data goes on where the source stopped, if it is the same
order: then no sample is seen twice. Once a run has a checkpoint of its own it needs its source no more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from siamesenorm.data import PreparedData
from siamesenorm.errors import UserError
from siamesenorm.models.conversion import FREE, PATH, convert, converted_config, require_convertible
from siamesenorm.models.language import LanguageModel
from siamesenorm.models.language_config import LanguageModelConfig
from siamesenorm.training.checkpoint import Checkpoint, load_checkpoint
from siamesenorm.training.config import RunConfig, Start
from siamesenorm.training.plan import ModelPlan, RunPlan
from siamesenorm.training.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """The weights that a run starts from, and what their model's function differs in from the source's."""

    weights: dict[str, Tensor]
    differences: tuple[str, ...]


def start_behind(source: RunConfig, directory: Path, *, data_digest: str, seed: int, context: int) -> Start:
    """Return the start from the run of `source` in `directory`, for a run on these data with this seed and context.

    Where the source had the same order of the data, its own samples are passed over.
    """
    same_order = (source.data_digest, source.seed, source.model.context) == (data_digest, seed, context)
    before = source.start.position if source.start else 0
    position = before + source.steps * source.samples_per_batch if same_order else 0
    return Start(run=source.identity, path=directory.resolve(), position=position)


def resolve_continued(plan: RunPlan, directory: Path) -> RunConfig:
    """Return the run that a plan asks for, from the weights of the finished run in `directory`.

    The model is the source's, with the plan's topology and, where it names one, its operator. Raises UserError for a
    source that is not finished or cannot become that model, and for a plan that asks for another size.
    """
    data, source = PreparedData.open(plan.data), _finished_run(directory)
    model = continued_model(source.model, plan.model, compute_dtype=plan.precision)
    start = start_behind(source, directory, data_digest=data.digest, seed=plan.seed, context=model.context)
    return dataclasses.replace(plan.of_model(data, model), start=start)


def continued_model(source: LanguageModelConfig, plan: ModelPlan, *, compute_dtype: str) -> LanguageModelConfig:
    """Return the source's configuration with what a plan changes; raises UserError for what belongs to the weights."""
    attention_norm, own = plan.attention_norm, source.attention_shape.attention_norm
    if attention_norm not in ("auto", own):
        raise UserError(f"attention norm {attention_norm!r}: the run to start from has {own!r}: leave it out")
    for each in dataclasses.fields(plan):
        given = getattr(plan, each.name)
        if each.name not in (*FREE, *PATH, "attention_norm") and given != each.default:
            raise UserError(f"{each.name} {given}: it belongs to the weights of the run to start from: leave it out")
    free = {name: getattr(plan, name, None) for name in FREE}
    changes = {name: value for name, value in free.items() if value is not None}
    return converted_config(source, plan.topology, plan.norm, **{**changes, "compute_dtype": compute_dtype})


def require_start(config: RunConfig) -> None:
    """Raise UserError unless the run that `config` starts from is at hand, finished, and can become its model."""
    if config.start is not None:
        source = _source_of(config.start)
        require_convertible(source.model, config.model)
        if not RunDirectory(config.start.path).checkpoints.is_dir():
            raise UserError(f"{config.start.path} has no checkpoints: train it again, or keep them")


def inherit(config: RunConfig) -> Inheritance:
    """Return the weights that the run of `config` starts from, on the CPU; raises UserError as `require_start`."""
    assert config.start is not None
    source = _source_of(config.start)
    checkpoint = _last_checkpoint(config.start.path, source.steps)
    model = LanguageModel(source.model)
    model.load_state_dict(checkpoint.tensors["model"])
    differences = convert(model, config.model)
    return Inheritance(weights=dict(model.state_dict()), differences=tuple(map(str, differences)))


def describe_start(config: RunConfig, inheritance: Inheritance) -> dict[str, Any]:
    """Return what the record of a run says of its start."""
    assert config.start is not None
    return {
        "run": config.start.run,
        "position": config.start.position,
        "differences": list(inheritance.differences),
    }


def _source_of(start: Start) -> RunConfig:
    source = _finished_run(start.path)
    if source.identity != start.run:
        raise UserError(f"{start.path} holds run {source.identity[:12]}, not {start.run[:12]}: restore that run")
    return source


def _finished_run(directory: Path) -> RunConfig:
    run = RunDirectory(directory)
    config = run.read_config()
    verdict = run.read_verdict()
    if verdict is None:
        raise UserError(f"{directory} is not finished: train it to its end before another run starts from it")
    return config


def _last_checkpoint(directory: Path, step: int) -> Checkpoint:
    checkpoint = load_checkpoint(RunDirectory(directory).checkpoints)
    if checkpoint is None or checkpoint.step != step:
        reached = "no checkpoint" if checkpoint is None else f"step {checkpoint.step} as its last checkpoint"
        raise UserError(f"{directory} has {reached}, not its last step {step}: start from a run that reached its end")
    return checkpoint
