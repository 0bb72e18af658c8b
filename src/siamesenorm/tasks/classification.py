"""Image classification: any labelled images, augmented or not; by default scikit-learn's digits."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.data.image_loader import ImageBatch
from siamesenorm.errors import UserError, unknown
from siamesenorm.models.convnext import SIZES as CONVNEXT_SIZES
from siamesenorm.models.convnext import ConvNextConfig, convnext_config
from siamesenorm.models.encoder_transfer import (
    classifier_weights,
    continued_from,
    freeze_encoder,
    layer_decay_factors,
    require_encoder,
    with_encoder_of,
)
from siamesenorm.models.vision import SIZES, ImageEncoderConfig, VisionTransformerConfig, vision_transformer_config
from siamesenorm.tasks.image_task import ImageTaskConfig, part_of
from siamesenorm.tasks.task import Losses, Metric, Task, TaskConfig
from siamesenorm.topologies import Kernels
from siamesenorm.world import World

TOP = 5
CLASSES_FOR_TOP = 20
"""From this many classes on the five most likely ones are evaluated too: among ten they say little."""
METRICS = (
    Metric(name="loss", label="loss", format=".4f", of_loss="same"),
    Metric(name="accuracy", direction="higher", format=".1%", label="accuracy"),
)
TOP_METRIC = Metric(name="top5_accuracy", direction="higher", format=".1%", label="top-5 accuracy")
OWN = ("classes", "channels", "image_size", "patch_size", "dropout", "drop_path")
"""Fields of a model that its size leaves as they are."""
Trainable = Literal["all", "head"]
DIGITS = VisionTransformerConfig(
    depth=4, dim=48, heads=4, hidden=96, image_size=8, patch_size=2, channels=1, classes=10, bias=True
)


class ImageClassifier:
    """Configurations of the models that classify images, by their tags; a vision Transformer's has none."""

    kinds: ClassVar[Mapping[str, type[Any]]] = {"": VisionTransformerConfig, ConvNextConfig.tag: ConvNextConfig}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> VisionTransformerConfig | ConvNextConfig:
        """Read what a configuration's `to_json` wrote; raises UserError for an unknown tag or field."""
        tag = str(record.get("tag", ""))
        if tag not in cls.kinds:
            raise unknown("kind of model", tag, filter(None, cls.kinds))
        config: VisionTransformerConfig | ConvNextConfig = cls.kinds[tag].from_json(record)
        return config


@dataclass(frozen=True, kw_only=True)
class ClassificationTaskConfig(ImageTaskConfig):
    """A classifier and its images."""

    tag: ClassVar[str] = "classification"
    model_type: ClassVar[type] = ImageClassifier
    available_sizes: ClassVar[tuple[str, ...]] = (*SIZES, *CONVNEXT_SIZES)

    model: Any = DIGITS
    """The model."""
    trainable: Trainable = "all"
    """What is trained: all, or the head alone on a frozen encoder (a linear probe)."""
    layer_decay: float = 1.0
    """Factor on the learning rate from each layer to the one below it, for fine-tuning; MAE's ViT-B has 0.65."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainable not in get_args(Trainable):
            raise unknown("trainable", str(self.trainable), get_args(Trainable))
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay is {self.layer_decay}: choose a number above 0, at most 1")
        if self.layer_decay < 1 or self.trainable == "head":
            self.require_transformer()

    def of_size(self, size: str) -> Self:
        """Return the configuration with the model of a named size, for the same images and with the same drop rates."""
        if size in CONVNEXT_SIZES:
            kept = {name: getattr(self.model, name) for name in ("classes", "channels", "image_size", "drop_path")}
            if isinstance(self.model, ConvNextConfig):
                kept |= {"norm": self.model.norm, "patch_size": self.model.patch_size}
            return dataclasses.replace(self, model=convnext_config(size, **kept))
        self.require_transformer()
        own = {name: getattr(self.model, name) for name in OWN}
        return dataclasses.replace(self, model=vision_transformer_config(size, **own))

    def build(self, seed: int) -> ClassificationTask:
        """Open the images and return the task; raises UserError where they do not fit the model."""
        return ClassificationTask(self, seed)

    def starting_from(self, source: TaskConfig) -> Self:
        """Return the configuration with the encoder of another run on images, and a head of its own."""
        return dataclasses.replace(self, model=with_encoder_of(self.model, self.encoder_of(source)))

    def continued(self, source: TaskConfig) -> Self:
        """Return the configuration with the attention norm of the source's model; see `TaskConfig`."""
        return dataclasses.replace(self, model=continued_from(self.model, self.encoder_of(source)))

    def require_convertible(self, source: TaskConfig) -> None:
        """Raise UserError unless the model can have the encoder of a model of `source`."""
        require_encoder(self.encoder_of(source), self.model)

    def encoder_of(self, source: TaskConfig) -> ImageEncoderConfig:
        """Return the encoder of the model of `source`; raises UserError where it or this model has none."""
        self.require_transformer()
        if not isinstance(source.model, ImageEncoderConfig):
            raise UserError(f"the run to start from trained the task {source.tag}: choose one on images")
        return source.model

    def require_transformer(self) -> None:
        """Raise UserError for a model without the layers of a vision Transformer."""
        if not isinstance(self.model, ImageEncoderConfig):
            raise UserError(
                f"the model is a {self.model.tag}: sizes, --start, layer_decay and trainable are those of a vision "
                "Transformer: leave them out"
            )


class ClassificationTask(Task):
    """The model, its loss in nats per image, and loss and accuracy on held-out images."""

    unit = "nats/image"
    item = "image"
    items_per_sample = 1
    metrics: tuple[Metric, ...]
    scale = 1.0

    def __init__(self, config: ClassificationTaskConfig, seed: int) -> None:
        self.config, self.seed, model = config, seed, config.model
        self.data, self.loader = config.open(seed)
        if len(self.data.classes) != model.classes:
            raise UserError(
                f"{config.data} has {len(self.data.classes)} classes, the model {model.classes}: set --model.classes"
            )
        self.train_items = len(self.data.train)
        self.floor: float | None = math.log(model.classes)
        self.metrics = METRICS if model.classes < CLASSES_FOR_TOP else (*METRICS, TOP_METRIC)

    def build_model(self, device: torch.device, kernels: Kernels = "plain") -> nn.Module:
        """Return the model with its initial weights."""
        model = super().build_model(device, kernels)
        if self.config.trainable == "head":
            freeze_encoder(model)
        return model

    def rate_factors(self, model: nn.Module) -> Mapping[str, float]:
        """Return factors that decay from the head to the patches by `layer_decay`."""
        config = self.config
        return layer_decay_factors(model, config.model.depth, config.layer_decay) if config.layer_decay < 1 else {}

    def loss(self, model: nn.Module, position: int, count: int) -> Losses:
        """Return the cross-entropy of `count` images, and the auxiliary losses of the sublayers."""
        logits, batch, losses = _classify(model, self.loader.batch(position, count))
        smoothing = self.config.augmentation.label_smoothing
        if batch.others is None or batch.parts is None:
            total = F.cross_entropy(logits, batch.labels, reduction="sum", label_smoothing=smoothing)
        else:
            own, other = (
                F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
                for labels in (batch.labels, batch.others)
            )
            total = (batch.parts * own + (1 - batch.parts) * other).sum()
        return Losses(total=total, count=count, auxiliary={name: (loss, 1.0) for name, loss in losses.items()})

    def evaluate(self, model: nn.Module, count: int, world: World) -> dict[str, float]:
        """Return mean loss and accuracies over all held-out images."""
        sums = [0.0, 0.0, 0.0]
        items = len(self.data.held_out)
        for images, counts in self.loader.held_out(world.share_out(range(0, items, count)), count):
            logits, (_, labels, *_), _ = _classify(model, images)
            if counts:
                best = logits.topk(min(TOP, logits.shape[-1])).indices == labels[:, None]
                sums[0] += float(F.cross_entropy(logits, labels, reduction="sum"))
                sums[1] += int((logits.argmax(dim=-1) == labels).sum())
                sums[2] += int(best.sum())
        means = [each / items for each in world.sum(*sums)]
        return {**{metric.name: mean for metric, mean in zip(self.metrics, means, strict=False)}, "items": items}

    def on_part(self, samples: int) -> ClassificationTask:
        """Return the task with an evaluation of at most `samples` held-out images, at equal distances."""
        part = copy.copy(self)
        part.data, part.loader = part_of(self.data, self.loader, samples)
        return part

    def convert_weights(
        self, source: TaskConfig, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return the weights of a model of `source` with its encoder, and what is new in it."""
        return classifier_weights(self.config.encoder_of(source), weights, self.config.model, self.seed)


def _classify(model: nn.Module, batch: ImageBatch) -> tuple[Tensor, ImageBatch, dict[str, Tensor]]:
    """Return logits, the batch on their device, and auxiliary losses."""
    batch = batch.to(next(model.parameters()).device)
    logits, losses = model(batch.images)
    return logits, batch, losses
