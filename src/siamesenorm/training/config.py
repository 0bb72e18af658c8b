"""The resolved configuration of a run, and its identity.

What a run is asked to compute is in `RunConfig` and in the identity; where data and checkpoints lie, the device and how
often state is saved is not. Device and versions can change the last bits: they are recorded in environment.json. A run
that was finished is never trained twice, whoever asks for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from siamesenorm.errors import UserError, unknown
from siamesenorm.models.language_config import LanguageModelConfig
from siamesenorm.training.schedule import Schedule, Shape
from siamesenorm.training.verdict import Thresholds

SCHEMA = 1
Decay = Literal["declared", "all-but-embeddings"]
Precision = Literal["float32", "bfloat16"]
Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule; the defaults are the SiameseNorm paper's (arXiv 2602.08064, Table 4) but the warm-up."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up (the paper: 2000)."""
    shape: Shape = "cosine"
    """Shape of the schedule after the warm-up."""
    final_fraction: float = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Part of the run in which the wsd schedule decays."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squares."""
    epsilon: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay: Decay = "declared"
    """What is decayed: matrices and what declares it, or, as in OLMo, everything but embeddings."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        """Refuse numbers that are none and choices that do not exist."""
        for name in ("learning_rate", "epsilon"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} is {value}: choose a positive number, such as 1e-3")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} is {value}: choose a number of at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: choose a number from 0 to below 1")
        if self.decay not in get_args(Decay):
            raise unknown("decay", self.decay, get_args(Decay))

    def schedule(self, steps: int) -> Schedule:
        """Return the schedule of a run of this many steps; raises UserError for values that make none."""
        return Schedule(
            total_steps=steps,
            warmup_steps=self.warmup_steps,
            shape=self.shape,
            final_fraction=self.final_fraction,
            decay_fraction=self.decay_fraction,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a run is carried out; none of it changes its identity."""

    device: str = "cpu"
    """Device, such as cpu, cuda or mps."""
    threads: int = 0
    """Threads of one process on the CPU; 0 leaves it to torch."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one is written at the last step too."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep."""
    trackers: tuple[Tracker, ...] = ()
    """Mirrors of the record (the `track` extra); metrics.jsonl stays the record."""

    def __post_init__(self) -> None:
        """Refuse numbers below their least and trackers that do not exist."""
        for name, least in (("threads", 0), ("checkpoint_every", 1), ("keep_checkpoints", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least {least}")
        for tracker in self.trackers:
            if tracker not in get_args(Tracker):
                raise unknown("tracker", tracker, get_args(Tracker))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The finished run whose weights another run starts from, converted to its own model.

    `run` is the identity of that run. `position` counts the samples at the front of the order of the data that it has
    seen, where both have the same order: this run goes on behind them. `path` is where its directory lies.
    """

    run: str
    path: Path
    position: int = 0

    def __post_init__(self) -> None:
        """Refuse a position before the first sample."""
        if self.position < 0:
            raise UserError(f"position is {self.position}: choose at least 0")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run's numbers.

    `batch_tokens` is the batch of an optimizer step; `micro_batch_tokens` (0: the whole batch) is what goes through the
    model at once, and accumulation follows from the two. `seed` sets initial weights and data order. With `start` the
    initial weights are those of another run; optimizer and schedule begin anew.
    """

    model: LanguageModelConfig
    data_path: Path
    data_digest: str
    steps: int
    batch_tokens: int
    micro_batch_tokens: int = 0
    seed: int = 0
    precision: Precision = "float32"
    compile: bool = False
    checkpoint_activations: bool = False
    validation_every: int = 100
    validation_tokens: int = 65_536
    stop_early: bool = True
    optimizer: OptimizerConfig = OptimizerConfig()
    thresholds: Thresholds = Thresholds()
    start: Start | None = None
    execution: Execution = field(default=Execution(), compare=False)

    def __post_init__(self) -> None:
        """Refuse budgets that cannot be run."""
        for name in ("steps", "batch_tokens", "validation_every", "validation_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least 1")
        for name in ("seed", "micro_batch_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least 0")
        if self.precision not in get_args(Precision):
            raise unknown("precision", self.precision, get_args(Precision))
        if self.batch_tokens % self.model.context:
            raise UserError(
                f"batch_tokens {self.batch_tokens} is not a multiple of the context {self.model.context}: "
                f"choose {max(1, round(self.batch_tokens / self.model.context)) * self.model.context}"
            )
        if self.micro_batch_tokens and (
            self.micro_batch_tokens % self.model.context or self.batch_tokens % self.micro_batch_tokens
        ):
            raise UserError(
                f"micro_batch_tokens {self.micro_batch_tokens} must be a multiple of the context "
                f"{self.model.context} and divide batch_tokens {self.batch_tokens}"
            )
        self.optimizer.schedule(self.steps)

    @property
    def samples_per_batch(self) -> int:
        """Sequences in an optimizer step."""
        return self.batch_tokens // self.model.context

    @property
    def samples_per_micro_batch(self) -> int:
        """Sequences that go through the model at once."""
        return (self.micro_batch_tokens or self.batch_tokens) // self.model.context

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON values; a run that starts from scratch has no "start"."""
        record: dict[str, Any] = {"schema": SCHEMA}
        for each in dataclasses.fields(self):
            record[each.name] = getattr(self, each.name)
        if record.pop("start") and self.start:
            record["start"] = {**dataclasses.asdict(self.start), "path": str(self.start.path)}
        record["model"] = self.model.to_json()
        record["data"] = {"path": str(record.pop("data_path")), "digest": record.pop("data_digest")}
        for name in ("optimizer", "thresholds", "execution"):
            record[name] = dataclasses.asdict(record[name])
        record["execution"]["trackers"] = list(self.execution.trackers)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunConfig:
        """Read what `to_json` wrote; raises UserError when it is of another schema or not a configuration."""
        try:
            fields = dict(record)
            if fields.pop("schema") != SCHEMA:
                raise UserError(f"the configuration has schema {record['schema']}, this version reads {SCHEMA}")
            data = fields.pop("data")
            execution = {**fields["execution"], "trackers": tuple(fields["execution"]["trackers"])}
            start = fields.pop("start", None)
            return cls(
                **{
                    **fields,
                    "model": LanguageModelConfig.from_json(fields["model"]),
                    "data_path": Path(data["path"]),
                    "data_digest": data["digest"],
                    "optimizer": OptimizerConfig(**fields["optimizer"]),
                    "thresholds": Thresholds(**fields["thresholds"]),
                    "start": start and Start(**{**start, "path": Path(start["path"])}),
                    "execution": Execution(**execution),
                }
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"this is not the configuration of a run: {error}") from error

    @property
    def identity(self) -> str:
        """SHA-256 of everything that determines the numbers: 64 hex digits.

        A topology counts by its family and options: which names are registered changes no number. A start counts by
        the identity of its run, wherever that lies.
        """
        record = self.to_json()
        record.get("start", {}).pop("path", None)
        del record["execution"], record["data"]["path"], record["model"]["topology"]["name"]
        return hashlib.sha256(json.dumps(_spelled_alike(record), sort_keys=True).encode()).hexdigest()


def _spelled_alike(value: Any) -> Any:
    """Return JSON values with whole floats as integers: equal numbers have one spelling."""
    if isinstance(value, dict):
        return {key: _spelled_alike(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_spelled_alike(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
