"""Image classification: any labelled images, augmented or not; by default scikit-learn's digits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.data.augmentation import Augmentation, Fit
from siamesenorm.data.image_loader import ImageBatch, ImageLoader
from siamesenorm.data.images import open_images
from siamesenorm.errors import UserError, unknown
from siamesenorm.models.convnext import ConvNextConfig
from siamesenorm.models.transformer import TransformerConfig
from siamesenorm.models.vision import VisionTransformerConfig
from siamesenorm.tasks.task import Losses, Metric, TaskConfig, describe_model
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
class ClassificationTaskConfig(TaskConfig):
    """A classifier and its images."""

    tag: ClassVar[str] = "classification"
    model_type: ClassVar[type] = ImageClassifier

    data: str = field(default="digits", metadata={"hashed": False})
    """Images: digits, or the path of a folder, a zip, idx or parquet files, or a saved dataset."""
    model: Any = DIGITS
    """The model."""
    fit: Fit = "exact"
    """Images of another size than the model's: exact refuses them, resize resizes them and uses their centre."""
    crop_fraction: float = 1.0
    """Part of the resized shorter side that the centre has; 0.875 is usual for 224 of 256 pixels."""
    augmentation: Augmentation = Augmentation()
    """Changes of the training images."""

    def __post_init__(self) -> None:
        """Refuse choices that do not exist and numbers out of range."""
        if self.fit not in get_args(Fit):
            raise unknown("fit", str(self.fit), get_args(Fit))
        if not 0 < self.crop_fraction <= 1:
            raise UserError(f"crop_fraction is {self.crop_fraction}: choose a number above 0, at most 1")

    def resolved(self, precision: Literal["float32", "bfloat16"]) -> Self:
        """Return the configuration with the digest of the images; see `TaskConfig`."""
        digest = self.digest or open_images(self.data).digest
        return dataclasses.replace(self, digest=digest, model=self.model.resolved(precision))

    def build(self, seed: int) -> ClassificationTask:
        """Open the images and return the task; raises UserError where they do not fit the model."""
        return ClassificationTask(self, seed)

    def describe_data(self) -> dict[str, str]:
        """Return the name of the images, their number and their classes."""
        data = open_images(self.data)
        name = "scikit-learn's digits" if self.data == "digits" else data.name
        count, (height, width) = len(data.train) + len(data.held_out), data.train.image(0).shape[1:]
        return {
            "name": name,
            "details": f"{count:,} images of {height} x {width} pixels, {len(data.classes)} classes",
        }

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON values, with the tag."""
        return {**super().to_json(), "augmentation": dataclasses.asdict(self.augmentation)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; raises UserError for a field of the model that does not exist."""
        return super().from_json({**record, "augmentation": Augmentation(**record.get("augmentation", {}))})


class ClassificationTask:
    """The model, its loss in nats an image, and loss and accuracy on held-out images."""

    unit = "nats/image"
    item = "image"
    items_per_sample = 1
    metrics: tuple[Metric, ...]
    scale = 1.0

    def __init__(self, config: ClassificationTaskConfig, seed: int) -> None:
        self.config, self.seed, model = config, seed, config.model
        self.data = open_images(config.data)
        if self.data.digest != config.digest:
            raise UserError(
                f"{config.data} holds other images than the run was configured for (digest {self.data.digest[:12]}, "
                f"not {config.digest[:12]}): use those images, or start a new run"
            )
        found, expected = (self.data.channels, len(self.data.classes)), (model.channels, model.classes)
        if found != expected:
            raise UserError(
                f"{config.data} has images of {found[0]} channels in {found[1]} classes, the model reads {expected[0]} "
                f"channels and has {expected[1]} classes: set --model.channels and --model.classes"
            )
        self.loader = ImageLoader(
            self.data,
            size=model.image_size,
            augmentation=config.augmentation,
            fit=config.fit,
            crop_fraction=config.crop_fraction,
            seed=seed,
        )
        self.loader.require_size()
        self.floor: float | None = math.log(model.classes)
        self.metrics = METRICS if model.classes < CLASSES_FOR_TOP else (*METRICS, TOP_METRIC)

    def build_model(self, device: torch.device, kernels: Kernels = "plain") -> nn.Module:
        """Return the model with its initial weights."""
        return self.config.model.build(seed=self.seed, device=device, kernels=kernels)

    def rate_factors(self, model: nn.Module) -> Mapping[str, float]:
        """Return no factors: all parameters have one learning rate."""
        return {}

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Return the entries of a run's first record on data and model, which is on the meta device."""
        config = self.config.model
        images = torch.zeros(1, config.channels, config.image_size, config.image_size, device="meta")
        attention = config.attention_shape.attention_norm if isinstance(config, TransformerConfig) else "none"
        described = describe_model(model, attention, images)
        return {**described, "train_items": len(self.data.train)}

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

    def convert_weights(
        self, source: TaskConfig, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Refuse: `TaskConfig.continued` does so before a run starts."""
        raise UserError("a classifier of images cannot start from the weights of another run: leave out --start")


def _classify(model: nn.Module, batch: ImageBatch) -> tuple[Tensor, ImageBatch, dict[str, Tensor]]:
    """Return logits, the batch on their device, and auxiliary losses."""
    batch = batch.to(next(model.parameters()).device)
    logits, losses = model(batch.images)
    return logits, batch, losses
