"""Language modelling: next-token prediction on prepared tokens."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.data import PreparedData, TokenSamples, document_ids
from siamesenorm.errors import UserError
from siamesenorm.models.conversion import FREE, convert, converted_config, require_convertible
from siamesenorm.models.language import (
    SIZES,
    LanguageModel,
    LanguageModelConfig,
    language_model_config,
)
from siamesenorm.tasks.task import Losses, Metric, Task, TaskConfig
from siamesenorm.world import World, to_device


@dataclass(frozen=True, kw_only=True)
class LanguageTaskConfig(TaskConfig):
    """A language model and its data."""

    tag: ClassVar[str] = "language"
    data_type: ClassVar[type] = Path
    model_type: ClassVar[type] = LanguageModelConfig
    available_sizes: ClassVar[tuple[str, ...]] = tuple(SIZES)

    data: Path = field(metadata={"hashed": False})
    """Directory of prepared data."""
    model: LanguageModelConfig = LanguageModelConfig()
    """The model."""
    validation_tokens: int = 65_536
    """Tokens of an evaluation."""

    def __post_init__(self) -> None:
        if self.validation_tokens < 1:
            raise UserError(f"validation_tokens is {self.validation_tokens}: choose at least 1")

    def of_size(self, size: str) -> Self:
        """Return the configuration with the model of a named size, whose vocabulary is the data's unless it has one."""
        vocabulary = SIZES.get(size, {}).get("vocabulary", 0)
        return dataclasses.replace(self, model=language_model_config(size, vocabulary=vocabulary))

    def resolved(self, precision: Literal["float32", "bfloat16"]) -> Self:
        """Return the configuration with the digest and the vocabulary of the data; see `TaskConfig`."""
        digest, path, model = self.digest, self.data, self.model
        if not digest or not model.vocabulary:
            data = PreparedData.open(path)
            model = dataclasses.replace(model, vocabulary=model.vocabulary or data.vocabulary)
            data.require_vocabulary(model.vocabulary)
            digest, path = data.digest, data.path.resolve()
        return dataclasses.replace(self, digest=digest, data=path, model=model.resolved(precision))

    def build(self, seed: int) -> LanguageTask:
        """Open the data and return the task; raises UserError where they are other data than configured."""
        return LanguageTask(self, seed)

    def continued(self, source: TaskConfig) -> Self:
        """Return the configuration with the options of the topology that keep the function of the source's model."""
        before, own = self._model_of(source), self.model
        model = converted_config(before, own.topology, own.norm, **{name: getattr(own, name) for name in FREE})
        changes: dict[str, Any] = {"topology": model.topology, "norm": model.norm}
        if own.attention_norm == "auto":
            changes["attention_norm"] = model.attention_norm
        config = dataclasses.replace(self, model=dataclasses.replace(own, **changes))
        config.require_convertible(source)
        return config

    def require_convertible(self, source: TaskConfig) -> None:
        """Raise UserError unless a model of `source` can become this configuration's; see `continued`."""
        require_convertible(self._model_of(source), self.model)

    def _model_of(self, source: TaskConfig) -> LanguageModelConfig:
        if not isinstance(source, LanguageTaskConfig):
            raise UserError(f"the run to start from trained the task {source.tag}: choose one of the task {self.tag}")
        return source.model

    def describe_data(self) -> dict[str, str]:
        """Return the source of the text, and its tokenizer."""
        manifest = PreparedData.open(self.data).manifest
        name, vocabulary = manifest.tokenizer.name, manifest.tokenizer.vocabulary
        return {"name": manifest.source, "details": f"tokenizer {name} (vocabulary {vocabulary:,})"}

    def same_order(self, other: TaskConfig) -> bool:
        """Whether both read the same data in windows of the same length."""
        same_data = isinstance(other, LanguageTaskConfig) and other.digest == self.digest
        return same_data and other.model.context == self.model.context


class LanguageTask(Task):
    """The model, its loss in nats per token, and its evaluation on the validation split."""

    unit = "nats/token"
    item = "token"
    metrics: tuple[Metric, ...] = (
        Metric(name="loss", label="loss", format=".4f", of_loss="same"),
        Metric(name="perplexity", label="PPL", format=".4g", of_loss="exp"),
    )
    scale = 1.0

    def __init__(self, config: LanguageTaskConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.data = PreparedData.open(config.data)
        if self.data.digest != config.digest:
            raise UserError(
                f"{config.data} holds other data than the run was configured for (digest "
                f"{self.data.digest[:12]}, not {config.digest[:12]}): use that data, or start a new run"
            )
        self.data.require_vocabulary(config.model.vocabulary)
        self.train = TokenSamples(self.data, "train", config.model.context, seed)
        self.validation = TokenSamples(self.data, "validation", config.model.context)
        self.train_items = self.train.targets
        self.items_per_sample = config.model.context
        self.floor: float | None = self.data.unigram_entropy

    def loss(self, model: nn.Module, position: int, count: int) -> Losses:
        """Return the cross-entropy of `count` windows of tokens, and the auxiliary losses of the sublayers."""
        batch = torch.from_numpy(self.train.batch(position, count))
        logits, losses = self._forward(model, batch)
        weights = self.config.model.loss_weights
        return Losses(
            total=_cross_entropy(logits, batch),
            count=batch[:, 1:].numel(),
            auxiliary={name: (loss, weights.get(name, 1.0)) for name, loss in losses.items()},
        )

    def evaluate(self, model: nn.Module, count: int, world: World) -> dict[str, float]:
        """Return the mean loss over the first `validation_tokens` of the validation split."""
        sums = [0.0, 0.0]
        for window, counts in world.share_out(self.validation.windows(count, self.config.validation_tokens)):
            batch = torch.from_numpy(window)
            found = float(_cross_entropy(self._forward(model, batch)[0], batch))
            if counts:
                sums = [sums[0] + found, sums[1] + batch[:, 1:].numel()]
        total, tokens = world.sum(*sums)
        loss = total / tokens
        return {**{metric.name: metric.from_loss(loss) for metric in self.metrics}, "items": int(tokens)}

    def on_part(self, samples: int) -> LanguageTask:
        """Return the task with an evaluation of the first `samples` windows of the validation split."""
        part = copy.copy(self)
        tokens = min(self.config.validation_tokens, samples * self.config.model.context)
        part.config = dataclasses.replace(self.config, validation_tokens=tokens)
        return part

    def convert_weights(
        self, source: TaskConfig, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return the weights of a model of `source` as those of this one, and the differences in its function."""
        model = LanguageModel(source.model)
        model.load_state_dict(weights)
        differences = convert(model, self.config.model)
        return dict(model.state_dict()), tuple(map(str, differences))

    def _forward(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        device, documents = next(model.parameters()).device, None
        if self.config.model.document_mask:
            documents = torch.from_numpy(document_ids(batch[:, :-1].numpy(), self.data.end_of_text)).to(device)
        logits, losses = model(to_device(batch[:, :-1], device), documents=documents)
        return logits, losses


def _cross_entropy(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the sum over the tokens after the first."""
    targets = to_device(batch[:, 1:], logits.device)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
