"""The contract of a task: its configuration, its model, its loss and its evaluation.

A run's configuration holds one task configuration. The train loop, sweeps and reports use this contract alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import torch
import tyro
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.models.cost import count_active_parameters, count_flops, count_parameters
from siamesenorm.models.transformer import TransformerConfig
from siamesenorm.topologies import Kernels
from siamesenorm.world import World

LARGEST_EXPONENT = 709.0
"""The largest whole x for which e^x is a double."""


def perplexity(loss: float) -> float:
    """Return exp(loss); infinite where a double cannot hold it, NaN of NaN."""
    return math.inf if loss >= LARGEST_EXPONENT else math.exp(loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number of an evaluation: its name in the record, which direction is better, its format and its label.

    `of_loss` is how it follows from a loss, where it does, so that it can be computed from the training loss as well.
    """

    name: str
    direction: Literal["lower", "higher"] = "lower"
    format: str = ".3f"
    label: str
    of_loss: Literal["", "same", "exp"] = ""

    def from_loss(self, loss: float) -> float:
        """Return the metric of a loss."""
        return loss if self.of_loss == "same" else perplexity(loss)

    def to_json(self) -> dict[str, str]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The loss of some samples: the sum over their `count` items, and auxiliary means with their weights, by name.

    Samples of the same number have the same `count`, so that micro-batches weigh alike.
    """

    total: Tensor
    count: int
    auxiliary: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)

    @property
    def mean(self) -> Tensor:
        """The main loss per item."""
        return self.total / self.count

    @property
    def objective(self) -> Tensor:
        """What the optimizer minimises: the mean and the weighted auxiliary losses."""
        return sum((weight * value for value, weight in self.auxiliary.values()), start=self.mean)


class Task(Protocol):
    """A model with its data, built from a `TaskConfig`.

    `unit` is that of the loss, such as "nats/token"; `item` is what the loss is a mean over, and `items_per_sample` how
    many of them a sample has. `metrics` are the numbers of an evaluation, the loss first. `floor` is the loss of a
    model that has learned nothing, `scale` the unit of the verdict's thresholds. `train_items` are those of the
    training data.
    """

    config: TaskConfig
    seed: int
    unit: str
    item: str
    items_per_sample: int
    train_items: int
    metrics: tuple[Metric, ...]
    floor: float | None
    scale: float

    def build_model(self, device: torch.device, kernels: Kernels = "plain") -> nn.Module:
        """Return the model with its initial weights; on the meta device nothing is allocated."""
        model: nn.Module = self.config.model.build(seed=self.seed, device=device, kernels=kernels)
        return model

    def rate_factors(self, model: nn.Module) -> Mapping[str, float]:
        """Return factors on the learning rate by parameter name; a missing one is 1: none by default."""
        return {}

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Return the entries of a run's first record on data and model, which is on the meta device."""
        return {**describe_model(model, self.config.model), "train_items": self.train_items}

    def loss(self, model: nn.Module, position: int, count: int) -> Losses:
        """Return the loss of `count` samples from a position in the order of the training data."""

    def evaluate(self, model: nn.Module, count: int, world: World) -> dict[str, float]:
        """Return the metrics on held-out data, `count` samples at a time, and the number of items.

        The processes of the world share the work; each returns the metrics of all data.
        """

    def on_part(self, samples: int) -> Task:
        """Return the task with an evaluation of at most so many held-out samples.

        By default raises UserError.
        """
        raise UserError("this task has no evaluation of a part of its held-out data: it cannot be analysed")

    def convert_weights(
        self, source: TaskConfig, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return weights of a model of `source` as weights of this model, and the differences in its function.

        By default raises UserError, as `TaskConfig.continued` does before a run starts.
        """
        raise UserError("this task's model cannot start from the weights of another run: leave out --start")


class ImageSampler(Protocol):
    """What draws images from a model of a generative task; it needs none of the data that the model was trained on."""

    classes: int

    def build_model(self, device: torch.device) -> nn.Module:
        """Return a model to load weights into."""

    def sample(
        self,
        model: nn.Module,
        classes: Sequence[int],
        *,
        guidance: float,
        seed: int,
        first: int,
        steps: int,
        sampler: str,
        progress: Callable[[], None],
    ) -> Tensor:
        """Return one image for each of `classes`, uint8 [count, channels, height, width].

        The i-th depends on seed and `first` + i. `progress` is called after each of the steps.
        """


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What every task's configuration has: frozen dataclasses, registered by their tag in `tasks.TASKS`.

    `data` names the data and `digest` is that of its content, which a run is identified by.
    `revision` is raised when a mended defect changes numbers: runs of an earlier revision are other runs.
    """

    tag: ClassVar[str]
    revision: ClassVar[int] = 0
    data_type: ClassVar[type] = str
    model_type: ClassVar[Any]
    """The classes of `data` and `model`."""
    available_sizes: ClassVar[tuple[str, ...]] = ()
    """Names of sizes of the model, for `of_size`."""

    data: Any = field(metadata={"hashed": False})
    digest: Annotated[str, tyro.conf.Suppress] = ""
    model: Any

    def of_size(self, size: str) -> Self:
        """Return the configuration with the model's fields of a named size; raises UserError for an unknown one."""
        raise UserError(f"the task {self.tag} has no sizes: give the model's fields, such as --model.depth")

    def resolved(self, precision: Literal["float32", "bfloat16"]) -> Self:
        """Return the configuration with automatic choices replaced; opens the data unless that was done before."""
        raise NotImplementedError

    def build(self, seed: int) -> Task:
        """Open the data and return the task; raises UserError where data and configuration do not fit."""
        raise NotImplementedError

    def build_sampler(self) -> ImageSampler:
        """Return what draws images from a model of this configuration; raises UserError for a task that has none."""
        raise UserError(f"a run of the task {self.tag} generates no images: name a run of a task that does")

    def starting_from(self, source: TaskConfig) -> Self:
        """Return the configuration with the model that a run starting from one of `source` has by default.

        Its attention norm and dtypes are open. Raises UserError where no model can have the source's weights.
        """
        if not isinstance(source, type(self)):
            raise UserError(f"the run to start from trained the task {source.tag}: choose one of the task {self.tag}")
        model = dataclasses.replace(
            source.model, attention_norm="auto", residual_dtype="inherit", compute_dtype="inherit"
        )
        return dataclasses.replace(self, model=model)

    def continued(self, source: TaskConfig) -> Self:
        """Return the configuration with the options that its model needs to start from weights of `source`.

        Raises UserError where that is impossible, as `require_convertible` does.
        """
        raise UserError(f"a run of the task {self.tag} cannot start from the weights of another run: leave out --start")

    def require_convertible(self, source: TaskConfig) -> None:
        """Raise UserError unless weights of a model of `source` can become weights of this model."""
        self.continued(source)

    def same_order(self, other: TaskConfig) -> bool:
        """Whether a run of `other` with the same seed reads the same samples in the same order."""
        return False

    def describe_data(self) -> dict[str, str]:
        """Return the name of the data, and details of it, for people."""
        return {}

    @property
    def label(self) -> str:
        """A short name for tables: that of the method."""
        return str(self.model.label)

    def with_method(self, method: str) -> Self:
        """Return the configuration with the topology and the norms of a method such as "siamese + seednorm"."""
        return dataclasses.replace(self, model=self.model.with_method(method))

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON values, with the tag."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {**fields, "tag": self.tag, "data": str(fields["data"]), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; raises UserError for a field of the model that does not exist."""
        fields = {name: value for name, value in record.items() if name != "tag"}
        return cls(
            **fields | {"data": cls.data_type(fields["data"]), "model": cls.model_type.from_json(fields["model"])}
        )


def describe_model(model: nn.Module, config: Any) -> dict[str, Any]:
    """Return the entries of a run's first record on a model, which is on the meta device, of its configuration."""
    parameters, embedding = count_parameters(model)
    active = count_active_parameters(model)
    return {
        "attention_norm": config.attention_shape.attention_norm if isinstance(config, TransformerConfig) else "none",
        "parameters": parameters,
        "non_embedding_parameters": parameters - embedding,
        **({"active_parameters": active} if active != parameters else {}),
        "flops_per_sample": count_flops(model, *config.inputs()),
        "notes": sorted({module.note for module in model.modules() if getattr(module, "note", "")}),
    }
