"""Image classification: scikit-learn's digits, 1,797 images of 8 x 8 pixels of handwritten digits."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.data import SampleOrder
from siamesenorm.errors import UserError, unknown
from siamesenorm.models.vision import VisionTransformer, VisionTransformerConfig, build_vision_transformer
from siamesenorm.tasks.task import Losses, Metric, TaskConfig, describe_model
from siamesenorm.topologies import Kernels
from siamesenorm.world import World

HELD_OUT = 360
"""Images that are held out: the first of a fixed order, whatever the seed of a run."""
DIGITS = VisionTransformerConfig(
    depth=4, dim=48, heads=4, hidden=96, image_size=8, patch_size=2, channels=1, classes=10, bias=True
)


class LabelledImages(NamedTuple):
    """Images [count, channels, height, width] in fp32, of mean 0 and variance 1, and their classes [count]."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class ClassificationTaskConfig(TaskConfig):
    """A vision Transformer and its images."""

    tag: ClassVar[str] = "classification"
    model_type: ClassVar[type] = VisionTransformerConfig

    data: str = field(default="digits", metadata={"hashed": False})
    """Name of the images: digits."""
    model: VisionTransformerConfig = DIGITS
    """The model."""

    def __post_init__(self) -> None:
        """Refuse images that do not exist."""
        if self.data != "digits":
            raise unknown("images", str(self.data), ("digits",))

    def resolved(self, precision: Literal["float32", "bfloat16"]) -> Self:
        """Return the configuration with the digest of the images; see `TaskConfig`."""
        digest = self.digest or _read_digits()[1]
        return dataclasses.replace(self, digest=digest, model=self.model.resolved(precision))

    def build(self, seed: int) -> ClassificationTask:
        """Read the images and return the task; raises UserError where they do not fit the model."""
        return ClassificationTask(self, seed)

    def describe_data(self) -> dict[str, str]:
        """Return what the images are."""
        return {"name": "scikit-learn's digits", "details": "1,797 images of 8 x 8 pixels, 10 classes"}


class ClassificationTask:
    """The model, its loss in nats an image, and loss and accuracy on held-out images."""

    unit = "nats/image"
    item = "image"
    items_per_sample = 1
    metrics: tuple[Metric, ...] = (
        Metric(name="loss", label="loss", format=".4f", of_loss="same"),
        Metric(name="accuracy", direction="higher", format=".1%", label="accuracy"),
    )
    scale = 1.0

    def __init__(self, config: ClassificationTaskConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        data, digest = _read_digits()
        if digest != config.digest:
            raise UserError(
                f"scikit-learn's digits are other images than the run was configured for (digest {digest[:12]}, not "
                f"{config.digest[:12]}): start a new run"
            )
        expected = (config.model.channels, config.model.image_size, config.model.image_size)
        classes = int(data.labels.max()) + 1
        if data.images.shape[1:] != expected or classes != config.model.classes:
            raise UserError(
                f"the images are {list(data.images.shape[1:])} of {classes} classes, the model reads {list(expected)} "
                f"of {config.model.classes}: give it their --model.image-size, --model.channels and --model.classes"
            )
        shuffled = torch.from_numpy(SampleOrder(len(data.images), 0).indices(0, len(data.images)))
        held_out, train = shuffled[:HELD_OUT], shuffled[HELD_OUT:]
        self.held_out = LabelledImages(data.images[held_out], data.labels[held_out])
        self.train = LabelledImages(data.images[train], data.labels[train])
        self.order = SampleOrder(len(train), seed)
        self.floor: float | None = math.log(classes)

    def build_model(self, device: torch.device, kernels: Kernels = "plain") -> VisionTransformer:
        """Return the model with its initial weights."""
        return build_vision_transformer(self.config.model, seed=self.seed, device=device, kernels=kernels)

    def rate_factors(self, model: nn.Module) -> Mapping[str, float]:
        """Return no factors: all parameters have one learning rate."""
        return {}

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Return the entries of a run's first record on data and model, which is on the meta device."""
        norm = self.config.model.attention_shape.attention_norm
        described = describe_model(model, norm, self.train.images[:1].to("meta"))
        return {**described, "train_items": len(self.train.images)}

    def loss(self, model: nn.Module, position: int, count: int) -> Losses:
        """Return the cross-entropy of `count` images, and the auxiliary losses of the sublayers."""
        indices = torch.from_numpy(self.order.indices(position, count))
        logits, labels, losses = _classify(model, self.train.images[indices], self.train.labels[indices])
        return Losses(
            total=F.cross_entropy(logits, labels, reduction="sum"),
            count=count,
            auxiliary={name: (loss, 1.0) for name, loss in losses.items()},
        )

    def evaluate(self, model: nn.Module, count: int, world: World) -> dict[str, float]:
        """Return mean loss and accuracy over all held-out images."""
        sums = [0.0, 0.0]
        for start, counts in world.share_out(range(0, HELD_OUT, count)):
            images, labels = (part[start : start + count] for part in self.held_out)
            logits, labels, _ = _classify(model, images, labels)
            if counts:
                sums[0] += float(F.cross_entropy(logits, labels, reduction="sum"))
                sums[1] += int((logits.argmax(dim=-1) == labels).sum())
        total, correct = world.sum(*sums)
        items = len(self.held_out.labels)
        return {"loss": total / items, "accuracy": correct / items, "items": items}

    def convert_weights(
        self, source: TaskConfig, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Refuse: `TaskConfig.continued` does so before a run starts."""
        raise UserError("a vision Transformer cannot start from the weights of another run: leave out --start")


def _classify(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, labels on their device, and auxiliary losses."""
    device = next(model.parameters()).device
    logits, losses = model(images.to(device))
    return logits, labels.to(device), losses


@cache
def _read_digits() -> tuple[LabelledImages, str]:
    """Return the images and the digest of their content, read from scikit-learn's file without importing it."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError("scikit-learn, which has the digits, is not installed: pip install 'siamesenorm[lab]'")
    rows = np.loadtxt(Path(spec.origin).parent / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.uint8)
    pixels = torch.from_numpy(rows[:, :-1].astype(np.float32)).view(-1, 1, 8, 8)
    images = (pixels - pixels.mean()) / pixels.std()
    labels = torch.from_numpy(rows[:, -1].astype(np.int64))
    return LabelledImages(images, labels), hashlib.sha256(rows.tobytes()).hexdigest()
