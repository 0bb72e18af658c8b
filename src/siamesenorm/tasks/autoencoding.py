"""Masked autoencoding of images (MAE, arXiv 2111.06377): the pixels of hidden patches, from the visible ones.

Which patches of a training sample are hidden is a function of the run's seed and the sample's position; those of held-
out images are the same in every run.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from siamesenorm.data.randomness import generator_at
from siamesenorm.errors import UserError
from siamesenorm.models.masked_autoencoder import (
    MAE_SIZES,
    MaskedAutoencoderConfig,
    masked_autoencoder_config,
)
from siamesenorm.models.vision import cut
from siamesenorm.tasks.image_task import ImageTaskConfig, part_of
from siamesenorm.tasks.task import Losses, Metric, Task
from siamesenorm.world import World

DIGITS = MaskedAutoencoderConfig(
    depth=4, dim=48, heads=4, hidden=96, image_size=8, patch_size=2, channels=1, bias=True,
    decoder_depth=2, decoder_dim=32, decoder_heads=4, decoder_hidden=64,
)  # fmt: skip
SURVEYED = 256
"""Held-out images, the first ones, whose patches determine the floor."""
EPS = 1e-6
"""Added to the variance of a patch, by which its pixels are normalised."""


@dataclass(frozen=True, kw_only=True)
class AutoencodingTaskConfig(ImageTaskConfig):
    """A masked autoencoder and its images."""

    tag: ClassVar[str] = "autoencoding"
    model_type: ClassVar[type] = MaskedAutoencoderConfig
    available_sizes: ClassVar[tuple[str, ...]] = tuple(MAE_SIZES)

    model: MaskedAutoencoderConfig = DIGITS
    """The model."""
    normalised_pixels: bool = True
    """Targets are the pixels of a patch with mean 0 and variance 1, else those of the normalised image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalised_pixels and self.model.patch_values == 1:
            raise UserError(
                "a patch of one pixel and one channel has no variance: choose a larger --model.patch-size, or "
                "--no-normalised-pixels"
            )
        for name in ("mixup", "cutmix", "label_smoothing"):
            if value := getattr(self.augmentation, name):
                raise UserError(f"{name} is {value}: autoencoding has no labels, leave it out")

    def of_size(self, size: str) -> Self:
        """Return the configuration with the model of a named size, for the same images and masks."""
        own = {name: getattr(self.model, name) for name in ("channels", "image_size", "patch_size", "mask_ratio")}
        return dataclasses.replace(self, model=masked_autoencoder_config(size, **own))

    def build(self, seed: int) -> AutoencodingTask:
        """Open the images and return the task; raises UserError where they do not fit the model."""
        return AutoencodingTask(self, seed)


class AutoencodingTask(Task):
    """The model, and its mean squared error on hidden patches."""

    unit = "mean squared error"
    item = "image"
    items_per_sample = 1
    metrics: tuple[Metric, ...] = (Metric(name="loss", label="loss", format=".4f", of_loss="same"),)

    def __init__(self, config: AutoencodingTaskConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.data, self.loader = config.open(seed)
        self.train_items = len(self.data.train)
        self.floor: float | None = self._floor()
        self.scale = self.floor / 4

    def loss(self, model: nn.Module, position: int, count: int) -> Losses:
        """Return the squared error on the hidden patches of `count` images, and the losses of the sublayers."""
        images = self.loader.batch(position, count).images
        visible = self.visible_patches("mask", self.seed, range(position, position + count))
        total, losses = self._squared_error(model, images, visible)
        return Losses(
            total=total,
            count=count,
            auxiliary={name: (loss, 1.0) for name, loss in losses.items()},
        )

    def evaluate(self, model: nn.Module, count: int, world: World) -> dict[str, float]:
        """Return the mean loss over all held-out images, with masks that are the same in every run."""
        total, items = 0.0, len(self.data.held_out)
        starts = ((start, (start, counts)) for start, counts in world.share_out(range(0, items, count)))
        for (images, *_), (start, counts) in self.loader.held_out(starts, count):
            visible = self.visible_patches("held-out mask", 0, range(start, start + len(images)))
            found, _ = self._squared_error(model, images, visible)
            total += float(found) if counts else 0.0
        return {"loss": world.sum(total)[0] / items, "items": items}

    def on_part(self, samples: int) -> AutoencodingTask:
        """Return the task with an evaluation of at most `samples` held-out images, at equal distances."""
        part = copy.copy(self)
        part.data, part.loader = part_of(self.data, self.loader, samples)
        return part

    def visible_patches(self, purpose: str, seed: int, positions: range) -> Tensor:
        """Return the numbers of the visible patches [positions, visible] of samples."""
        patches, visible = self.config.model.patches, self.config.model.visible
        orders = (torch.randperm(patches, generator=generator_at(seed, purpose, each)) for each in positions)
        return torch.stack([order[:visible] for order in orders])

    def targets(self, images: Tensor) -> Tensor:
        """Return what the model predicts of images: their patches [batch, patches, patch values]."""
        patches = cut(images, self.config.model.patch_size)
        if not self.config.normalised_pixels:
            return patches
        mean, variance = patches.mean(dim=-1, keepdim=True), patches.var(dim=-1, keepdim=True)
        return (patches - mean) * torch.rsqrt(variance + EPS)

    def _squared_error(self, model: nn.Module, images: Tensor, visible: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum over images of the mean squared error of hidden pixels, and auxiliary losses."""
        device = next(model.parameters()).device
        images, visible = images.to(device), visible.to(device)
        predicted, losses = model(images, visible)
        errors = (predicted - self.targets(images)).square().mean(dim=-1)
        return errors.scatter(1, visible, 0.0).sum() / self.config.model.masked, losses

    def _floor(self) -> float:
        """Return the loss of a model that predicts the same for every patch: the variance of the targets."""
        ((batch, _),) = self.loader.held_out([(0, None)], SURVEYED)
        targets = self.targets(batch.images).flatten(0, 1)
        return float((targets - targets.mean(dim=0)).square().mean())
