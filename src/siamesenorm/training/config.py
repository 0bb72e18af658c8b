"""The configuration of a run, and its identity.

The identity is a hash of the settings that differ from the schema's defaults:

* A field counts where its value differs from its default, under a name of its own: `FROZEN_NAMES` keeps the hash of a
  field that is renamed in Python. Removing or adding a field with a default changes no identity, because a new field's
  default means the old behaviour. `tests/identity_schema.json` pins every name and default.
* The tag of a choice (task, topology, norm) and fields without a default always count, and its revision when it is
  not 0.
* Paths, verdict thresholds and execution (device, threads, kernels, compilation) never count: their fields are marked.
  Device and versions can change the last bits: environment.json records them.
* Equal numbers have one spelling.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tyro

from siamesenorm.errors import UserError, unknown
from siamesenorm.norms import NORMS, NormSpec
from siamesenorm.tasks import task_from_json
from siamesenorm.tasks.task import TaskConfig
from siamesenorm.topologies import Kernels, Topology
from siamesenorm.training.optimizer import OptimizerConfig, OptimizerName
from siamesenorm.training.verdict import Thresholds
from siamesenorm.world import Parallelism

SCHEMA = 2
LARGEST_SEED = 2**63 - 1
Precision = Literal["float32", "bfloat16"]
Compile = Literal["auto", "on", "off"]
Recomputation = Literal["full", "selective"]
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
    parallel: Parallelism = "replicate"
    """What each process of torchrun holds: the whole model (DDP), or a shard of every block (FSDP2)."""
    recomputation: Recomputation = "full"
    """What checkpointed blocks compute again: everything, or all but matrix products and attention."""
    shards: int = 0
    """Processes that share one sharded model; 0 is all of them, fewer make replicas of it (HSDP)."""
    expert_shards: int = 1
    """Processes of a sharded model that divide the experts of each mixture and exchange tokens."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one is written at the last step too."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep while training."""
    keep_every: int = 0
    """Keep the checkpoints of steps that are multiples of this too; after the end their weights; 0 keeps none."""
    keep_states: bool = False
    """Keep the checkpoints that are there at the end, optimizer states included; by default only the last weights."""
    trackers: tuple[Tracker, ...] = ()
    """Mirrors of the record (the `track` extra); metrics.jsonl stays the record."""
    slurm: tuple[str, ...] = ()
    """Train as a job of Slurm (the `cluster` extra) with these options of sbatch: nodes=2 time=600 partition=gpu."""

    def __post_init__(self) -> None:
        leasts = {
            "threads": 0,
            "shards": 0,
            "expert_shards": 1,
            "checkpoint_every": 1,
            "keep_checkpoints": 1,
            "keep_every": 0,
        }
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least {least}")
        kinds = {"kernels": Kernels, "compile": Compile, "parallel": Parallelism, "recomputation": Recomputation}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                raise unknown(name, str(getattr(self, name)), get_args(kind))
        if self.expert_shards > 1 and (self.parallel != "shard" or self.compile == "on"):
            raise UserError(f"expert_shards is {self.expert_shards}: it needs parallel shard, and compile off or auto")
        if self.shards and self.parallel != "shard":
            raise UserError(f"shards is {self.shards}: it needs parallel shard")
        if self.keep_every % self.checkpoint_every:
            raise UserError(
                f"keep_every is {self.keep_every}: choose a multiple of checkpoint_every, {self.checkpoint_every}"
            )
        for tracker in self.trackers:
            if tracker not in get_args(Tracker):
                raise unknown("tracker", tracker, get_args(Tracker))
        self.read_slurm_options()

    def read_slurm_options(self) -> dict[str, int | str]:
        """Return the options of sbatch by name; raises UserError for words that are none."""
        options: dict[str, int | str] = {}
        for word in self.slurm:
            name, _, value = word.partition("=")
            if not (name and value):
                raise UserError(f"execution.slurm has {word!r}: write options of sbatch as NAME=VALUE, such as nodes=2")
            options[name] = int(value) if value.isdigit() else value
        if not isinstance(options.get("time", 0), int):
            raise UserError(f"execution.slurm has time={options['time']}: give minutes, such as time=600")
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The finished run whose weights another run starts from, converted to its own model.

    `run` is the identity of that run. `position` counts the samples at the front of the order of the data that it has
    read, where both have the same order: this run continues after them. `path` is its directory.
    """

    run: str
    path: Path = field(metadata={"hashed": False})
    position: int = 0

    def __post_init__(self) -> None:
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
    """The optimizer and its schedule."""
    micro_batch: int = 0
    """Samples that go through the model at once, the rest is accumulated; 0 is the whole batch."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    precision: Precision = "float32"
    """Precision of the sublayers; bfloat16 keeps fp32 weights."""
    bf16_parameters: bool = False
    """Round parameters to bfloat16 for forward and backward passes, and gather them so; streams keep their dtype."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    ema: float = 0.0
    """Decay of the average of the weights that is evaluated beside them and kept in checkpoints; 0 keeps none."""
    validation_every: int = 100
    """Steps between evaluations on held-out data."""
    stop_early: bool = True
    """End a run once it has diverged for longer than the patience."""
    warm_start: Annotated[WarmStart | None, tyro.conf.Suppress] = None
    thresholds: Annotated[Thresholds, tyro.conf.Suppress] = field(default=Thresholds(), metadata={"hashed": False})
    execution: Execution = field(default=Execution(), compare=False, metadata={"hashed": False})
    """How the run is carried out; not part of its identity."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validation_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least 1")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(f"seed is {self.seed}: choose a number from 0 to {LARGEST_SEED}")
        if self.precision not in get_args(Precision):
            raise unknown("precision", self.precision, get_args(Precision))
        if self.bf16_parameters and self.precision != "bfloat16":
            raise UserError(f"bf16_parameters with precision {self.precision}: choose bfloat16")
        if self.micro_batch < 0 or self.batch % (self.micro_batch or self.batch):
            raise UserError(f"micro_batch {self.micro_batch} does not divide batch {self.batch}: choose one that does")
        if self.execution.recomputation != "full" and not self.checkpoint_activations:
            raise UserError(f"recomputation is {self.execution.recomputation}: it needs checkpoint_activations")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema is {self.ema}: choose a decay from 0 to below 1, such as 0.999")
        self.optimizer.schedule(self.steps)

    @property
    def samples_at_once(self) -> int:
        """Samples that go through the model at once."""
        return self.micro_batch or self.batch

    def is_sharded(self, processes: int) -> bool:
        """Whether processes hold parts of the parameters (FSDP2), which rounds parameters of one process, too."""
        return self.bf16_parameters or (processes > 1 and self.execution.parallel == "shard")

    @property
    def identity(self) -> str:
        """SHA-256 of everything that determines the numbers: 64 hex digits."""
        return identity(self.resolved())

    @property
    def label(self) -> str:
        """The method as text: topology, norm, attention norm, initialisation, and the optimizer unless it is AdamW."""
        return self.task.label + ("" if self.optimizer.name == "adamw" else f" + {self.optimizer.name}")

    def with_method(self, method: str) -> Self:
        """Return the run with what a method such as "pre + qkv + muon" names; raises UserError.

        Without an optimizer or an initialisation in the text it keeps its own.
        """
        model, name = split_optimizer(method)
        optimizer = dataclasses.replace(self.optimizer, name=name) if name else self.optimizer
        return dataclasses.replace(self, task=self.task.with_method(model), optimizer=optimizer)

    def resolved(self) -> Self:
        """Return the run with automatic choices replaced; opens the data the first time."""
        return dataclasses.replace(self, task=self.task.resolved(self.precision))

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON values."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        plain = {name: dataclasses.asdict(fields[name]) for name in _PLAIN if fields[name]}
        record: dict[str, Any] = {"schema": SCHEMA, **fields, **plain}
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
                if values := fields.get(name):
                    fields[name] = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
            if start := fields.get("warm_start"):
                fields["warm_start"] = dataclasses.replace(start, path=Path(start.path))
            return cls(**{**fields, "task": task_from_json(fields["task"])})
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"this is not the configuration of a run: {error}") from error


def split_optimizer(method: str) -> tuple[str, OptimizerName | None]:
    """Return the text of a method without its optimizer, and the optimizer's name; raises UserError for two of them."""
    parts = [part.strip() for part in method.split("+")]
    names: list[OptimizerName] = [name for name in get_args(OptimizerName) for part in parts[1:] if part == name]
    if len(names) > 1:
        raise UserError(f"method {method!r} has two optimizers: write one at most")
    return " + ".join(part for part in parts if part not in names), names[0] if names else None


_PLAIN: dict[str, type] = {
    "optimizer": OptimizerConfig,
    "thresholds": Thresholds,
    "warm_start": WarmStart,
    "execution": Execution,
}
"""Fields whose values are dataclasses of plain values."""


# --- identity

FROZEN_NAMES: dict[tuple[str, str], str] = {
    ("SiamesePostPre", "post_norm"): "settle",
    ("RunConfig", "warm_start"): "start",
}
"""Names in the hash that differ from those in Python, by class and field."""


def identity(config: Any) -> str:
    """Return the SHA-256 of a resolved run configuration: 64 hex digits."""
    return hashlib.sha256(json.dumps(described(config), sort_keys=True).encode()).hexdigest()


def described(value: Any) -> Any:
    """Return what counts of a value: of a dataclass, its tag and the fields that differ from their defaults."""
    if isinstance(value, NormSpec):
        return {**_tag(NORMS[value.name], value.name), **{name: _spelled(each) for name, each in value.options}}
    if not dataclasses.is_dataclass(value):
        return _spelled(value)
    kind = type(value)
    tag = kind.__name__ if isinstance(value, Topology) else getattr(kind, "tag", "")
    record = _tag(kind, tag) if tag else {}
    for each in dataclasses.fields(value):
        found, default = getattr(value, each.name), default_of(each)
        part = described(found)
        beyond = part != {} if isinstance(part, dict) else found != default
        if each.metadata.get("hashed", True) and (beyond or default is dataclasses.MISSING):
            record[FROZEN_NAMES.get((kind.__name__, each.name), each.name)] = part
    return record


def first_difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any]:
    """Return the name and both values of the first setting in which two descriptions differ."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return name, "its default" if old is None else old, "its default" if new is None else new
    differing = next(key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key))
    return first_difference(old.get(differing), new.get(differing), f"{name}.{differing}".lstrip("."))


def _tag(kind: type, tag: str) -> dict[str, Any]:
    revision = getattr(kind, "revision", 0)
    return {"tag": tag, **({"revision": revision} if revision else {})}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; MISSING of a required one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _spelled(value: Any) -> Any:
    """Return a plain value with whole floats as integers."""
    if isinstance(value, (list, tuple)):
        return [_spelled(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
