"""The configuration of a run: one task, and what all tasks have in common.

What determines a run's numbers is in its identity (`training.identity`); where data and checkpoints are, the device and
how often state is saved is not. Device and versions can change the last bits: environment.json records them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tyro

from siamesenorm.errors import UserError, unknown
from siamesenorm.tasks.registry import task_from_json
from siamesenorm.tasks.task import TaskConfig
from siamesenorm.topologies import Kernels
from siamesenorm.training.identity import identity
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.verdict import Thresholds

SCHEMA = 2
LARGEST_SEED = 2**63 - 1
Precision = Literal["float32", "bfloat16"]
Compile = Literal["auto", "on", "off"]
Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a run is carried out; none of it changes its identity."""

    device: str = "cpu"
    """Device, such as cpu, cuda or mps."""
    threads: int = 0
    """Threads of one process on the CPU; 0 leaves it to torch."""
    kernels: Kernels = "auto"
    """Boundaries between sublayers: plain PyTorch, fused or lean operators; auto is fused on a GPU, plain on a CPU."""
    compile: Compile = "auto"
    """Compile the blocks; auto does on a CPU with a C++ compiler, for runs so long that it pays."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one is written at the last step too."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep while training."""
    keep_states: bool = False
    """Keep all checkpoints of a finished run with their optimizer states; by default only its last weights stay."""
    trackers: tuple[Tracker, ...] = ()
    """Mirrors of the record (the `track` extra); metrics.jsonl stays the record."""

    def __post_init__(self) -> None:
        """Refuse numbers below their least and choices that do not exist."""
        for name, least in (("threads", 0), ("checkpoint_every", 1), ("keep_checkpoints", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least {least}")
        for name, choices in (("kernels", get_args(Kernels)), ("compile", get_args(Compile))):
            if getattr(self, name) not in choices:
                raise unknown(name, str(getattr(self, name)), choices)
        for tracker in self.trackers:
            if tracker not in get_args(Tracker):
                raise unknown("tracker", tracker, get_args(Tracker))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The finished run whose weights another run starts from, converted to its own model.

    `run` is the identity of that run. `position` counts the samples at the front of the order of the data that it has
    seen, where both have the same order: this run continues after them. `path` is its directory.
    """

    run: str
    path: Path = field(metadata={"hashed": False})
    position: int = 0

    def __post_init__(self) -> None:
        """Refuse a position before the first sample."""
        if self.position < 0:
            raise UserError(f"position is {self.position}: choose at least 0")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run's numbers, and how it is executed.

    `batch` is in samples. `seed` sets initial weights and data order. With `warm_start` the initial weights are those
    of another run; optimizer and schedule start anew. Raises UserError for what cannot be run.
    """

    task: Annotated[TaskConfig, tyro.conf.arg(name="")]
    steps: int
    """Optimizer steps."""
    batch: int
    """Samples of an optimizer step."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    micro_batch: int = 0
    """Samples that go through the model at once, the rest is accumulated; 0 is the whole batch."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    precision: Precision = "float32"
    """Precision of the sublayers; bfloat16 keeps fp32 weights."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    validation_every: int = 100
    """Steps between evaluations on held-out data."""
    stop_early: bool = True
    """End a run once it has diverged for longer than the patience."""
    warm_start: Annotated[WarmStart | None, tyro.conf.Suppress] = None
    thresholds: Annotated[Thresholds, tyro.conf.Suppress] = field(default=Thresholds(), metadata={"hashed": False})
    execution: Execution = field(default=Execution(), compare=False, metadata={"hashed": False})
    """How the run is carried out; not part of its identity."""

    def __post_init__(self) -> None:
        """Refuse budgets that cannot be run."""
        for name in ("steps", "batch", "validation_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least 1")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(f"seed is {self.seed}: choose a number from 0 to {LARGEST_SEED}")
        if self.precision not in get_args(Precision):
            raise unknown("precision", self.precision, get_args(Precision))
        if self.micro_batch < 0 or self.batch % (self.micro_batch or self.batch):
            raise UserError(f"micro_batch {self.micro_batch} does not divide batch {self.batch}: choose one that does")
        self.optimizer.schedule(self.steps)

    @property
    def samples_at_once(self) -> int:
        """Samples that go through the model at once."""
        return self.micro_batch or self.batch

    @property
    def identity(self) -> str:
        """SHA-256 of everything that determines the numbers: 64 hex digits; see `training.identity`."""
        return identity(self.resolved())

    @property
    def label(self) -> str:
        """The method as text: topology, norm, attention norm."""
        return self.task.label

    def with_method(self, method: str) -> Self:
        """Return the run with the topology and the norms of a method such as "pre + qkv"; raises UserError."""
        return dataclasses.replace(self, task=self.task.with_method(method))

    def resolved(self) -> Self:
        """Return the run with automatic choices replaced; opens the data the first time."""
        return dataclasses.replace(self, task=self.task.resolved(self.precision))

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON values."""
        record: dict[str, Any] = {"schema": SCHEMA}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            record[each.name] = dataclasses.asdict(value) if each.name in _PLAIN and value else value
        if self.warm_start:
            record["warm_start"]["path"] = str(self.warm_start.path)
        record["execution"]["trackers"] = list(self.execution.trackers)
        record["task"] = self.task.to_json()
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; a field that is missing has its default.

        Raises UserError when the record is of another schema or not a configuration.
        """
        try:
            fields = dict(record)
            if fields.pop("schema") != SCHEMA:
                raise UserError(f"the configuration has schema {record['schema']}, this version reads {SCHEMA}")
            for name, kind in _PLAIN.items():
                if fields.get(name):
                    fields[name] = kind(**_with_types(fields[name]))
            return cls(**{**fields, "task": task_from_json(fields["task"])})
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"this is not the configuration of a run: {error}") from error


_PLAIN: dict[str, type] = {
    "optimizer": OptimizerConfig,
    "thresholds": Thresholds,
    "warm_start": WarmStart,
    "execution": Execution,
}
"""Fields whose values are dataclasses of plain values."""


def _with_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values with lists as tuples and paths as paths."""
    typed: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return {name: Path(value) if name == "path" else value for name, value in typed.items()}
