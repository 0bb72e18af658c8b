"""Diffusion: a Transformer predicts the noise in images or latents; classes are dropped for classifier-free guidance.

The loss is the mean squared error of the noise, 1 for a prediction of 0. Timestep, noise and dropped class of a sample
are functions of the seed and its position in the order of the data; an evaluation has the same for every run.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn

from siamesenorm.data import SampleOrder, generator_at
from siamesenorm.data.images import ImageData, open_images
from siamesenorm.data.latents import Autoencoder, Split, open_latents, open_pixels
from siamesenorm.errors import UserError, unknown
from siamesenorm.models.diffusion import (
    SIZES,
    DiffusionTransformerConfig,
    diffusion_transformer_config,
)
from siamesenorm.tasks.diffusion_process import BetaSchedule, DiffusionProcess
from siamesenorm.tasks.diffusion_samples import DiffusionSampler
from siamesenorm.tasks.task import Losses, Metric, Task, TaskConfig
from siamesenorm.world import World

EVALUATION_SEED = 0
"""Seed of timesteps and noise of an evaluation, whatever that of the run."""
DIGITS = DiffusionTransformerConfig(
    depth=4, dim=64, heads=4, hidden=256, image_size=8, patch_size=2, channels=1, classes=10
)


@dataclass(frozen=True, kw_only=True)
class DiffusionTaskConfig(TaskConfig):
    """A diffusion Transformer, its process and its images, or their latents."""

    tag: ClassVar[str] = "diffusion"
    model_type: ClassVar[type] = DiffusionTransformerConfig
    available_sizes: ClassVar[tuple[str, ...]] = tuple(SIZES)

    data: str = field(default="digits", metadata={"hashed": False})
    """The images: digits, or the path of a folder, a zip, idx or parquet files, or a saved dataset."""
    model: DiffusionTransformerConfig = DIGITS
    """The model."""
    vae: str = field(default="", metadata={"hashed": False})
    """Directory of an AutoencoderKL of diffusers, whose latents are modelled; without one, pixels are."""
    timesteps: int = 1000
    """Steps of the process."""
    beta_schedule: BetaSchedule = "linear"
    """Schedule of the noise, as diffusers names it."""
    label_dropout: float = 0.1
    """Share of the samples without their class."""
    flip: float = 0.0
    """Probability of a horizontal flip of a training image; DiT's is 0.5."""
    validation_images: int = 0
    """Held-out images of an evaluation, the first ones; 0 is all of them."""

    def __post_init__(self) -> None:
        if self.timesteps < 2:
            raise UserError(f"timesteps is {self.timesteps}: choose at least 2")
        if self.beta_schedule not in get_args(BetaSchedule):
            raise unknown("beta_schedule", self.beta_schedule, get_args(BetaSchedule))
        if not 0 <= self.label_dropout < 1:
            raise UserError(f"label_dropout is {self.label_dropout}: choose a number from 0 to below 1")
        if not 0 <= self.flip <= 1:
            raise UserError(f"flip is {self.flip}: choose a number from 0 to 1")
        if self.validation_images < 0:
            raise UserError(f"validation_images is {self.validation_images}: choose at least 0")

    def open_autoencoder(self) -> Autoencoder | None:
        """Return the autoencoder, None for pixels; raises UserError where it does not fit the model."""
        if not self.vae:
            return None
        autoencoder = Autoencoder(Path(self.vae).expanduser())
        if autoencoder.channels != self.model.channels:
            raise UserError(
                f"the latents of {self.vae} have {autoencoder.channels} channels, the model reads "
                f"{self.model.channels}: give --model.channels {autoencoder.channels}, or another autoencoder"
            )
        return autoencoder

    def of_size(self, size: str) -> Self:
        """Return the configuration with the model of a named size, for these images, channels and classes."""
        kept = {name: getattr(self.model, name) for name in ("image_size", "channels", "classes")}
        return dataclasses.replace(self, model=diffusion_transformer_config(size, **kept))

    def resolved(self, precision: Literal["float32", "bfloat16"]) -> Self:
        """Return the configuration with the digest of the images, or of their latents; see `TaskConfig`."""
        digest = self.digest or digest_of(open_images(self.data), self.open_autoencoder())
        return dataclasses.replace(self, digest=digest, model=self.model.resolved(precision))

    def build(self, seed: int) -> DiffusionTask:
        """Open the images and return the task; raises UserError where they do not fit the model."""
        return DiffusionTask(self, seed)

    def build_process(self) -> DiffusionProcess:
        """Return the process of noise; raises UserError without diffusers."""
        return DiffusionProcess(self.timesteps, self.beta_schedule)

    def build_sampler(self) -> DiffusionSampler:
        """Return what draws samples from a model of this configuration, without the images it was trained on."""
        return DiffusionSampler(self.model, self.build_process(), self.open_autoencoder())

    def same_order(self, other: TaskConfig) -> bool:
        """Whether both read the same images."""
        return isinstance(other, DiffusionTaskConfig) and other.digest == self.digest

    def describe_data(self) -> dict[str, str]:
        """Return what the images are."""
        images = open_images(self.data)
        count, classes = len(images.train) + len(images.held_out), len(images.classes)
        details = f"{count:,} images of {classes} classes, {len(images.held_out):,} of them held out"
        return {"name": images.name, "details": details + (f", latents of {Path(self.vae).name}" if self.vae else "")}


def digest_of(images: ImageData, autoencoder: Autoencoder | None) -> str:
    """Return the digest of the images, or of their latents."""
    if autoencoder is None:
        return images.digest
    return hashlib.sha256(f"{images.digest}:{autoencoder.digest}".encode()).hexdigest()


class Noised(NamedTuple):
    """Samples of the process [count, channels, size, size]: images, their noise, timesteps and labels [count]."""

    images: Tensor
    noise: Tensor
    timesteps: Tensor
    labels: Tensor


class DiffusionTask(Task):
    """The model, the squared error of its noise, and the same on held-out images."""

    unit = "squared error of the noise"
    item = "image"
    items_per_sample = 1
    metrics: tuple[Metric, ...] = (Metric(name="loss", label="loss", format=".4f", of_loss="same"),)
    floor: float | None = 1.0
    scale = 0.25

    def __init__(self, config: DiffusionTaskConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        images, self.autoencoder = open_images(config.data), config.open_autoencoder()
        digest = digest_of(images, self.autoencoder)
        if digest != config.digest:
            raise UserError(
                f"{config.data}{config.vae and f' with {config.vae}'} is other data than the run was configured for "
                f"(digest {digest[:12]}, not {config.digest[:12]}): use that data, or start a new run"
            )
        if len(images.classes) != config.model.classes:
            raise UserError(
                f"the images of {config.data} are of {len(images.classes)} classes, the model is for "
                f"{config.model.classes}: give --model.classes {len(images.classes)}"
            )
        self.process = config.build_process()
        self.train, self.held_out = self._open_splits(images)
        self.evaluated = min(config.validation_images or len(self.held_out), len(self.held_out))
        self.train_items = len(self.train)
        self.order = SampleOrder(self.train_items, seed)

    def _open_splits(self, images: ImageData) -> tuple[Split, Split]:
        model = self.config.model
        if self.autoencoder is not None:
            return open_latents(images, self.autoencoder, model.image_size, self.config.flip)
        if images.channels != model.channels:
            raise UserError(
                f"the images of {self.config.data} have {images.channels} channels, the model reads {model.channels}: "
                f"give --model.channels {images.channels}"
            )
        return open_pixels(images, model.image_size, self.config.flip)

    def loss(self, model: nn.Module, position: int, count: int) -> Losses:
        """Return the squared error of the noise in `count` images, and of a learned variance the variational bound."""
        indices = self.order.indices(position, count)
        generators = [generator_at(self.seed, "diffusion", position + each) for each in range(count)]
        drawn = self._draw(self.train, [int(index) for index in indices], generators, self.config.label_dropout)
        errors, auxiliary = self._errors(model, drawn)
        return Losses(total=errors.sum(), count=count, auxiliary=auxiliary)

    def evaluate(self, model: nn.Module, count: int, world: World) -> dict[str, float]:
        """Return the mean squared error over the first held-out images, at one timestep each, with their classes."""
        total = 0.0
        for start, counts in world.share_out(range(0, self.evaluated, count)):
            indices = list(range(start, min(start + count, self.evaluated)))
            generators = [generator_at(EVALUATION_SEED, "diffusion evaluation", index) for index in indices]
            errors, _ = self._errors(model, self._draw(self.held_out, indices, generators, 0.0))
            if counts:
                total += float(errors.sum())
        (total,) = world.sum(total)
        return {"loss": total / self.evaluated, "items": self.evaluated}

    def on_part(self, samples: int) -> DiffusionTask:
        """Return the task with an evaluation of the first `samples` held-out images."""
        part = copy.copy(self)
        part.evaluated = min(samples, self.evaluated)
        return part

    def sample(self, model: nn.Module, classes: Sequence[int], guidance: float, seed: int, **options: Any) -> Tensor:
        """Return images of the classes, uint8 [count, channels, height, width]; see `DiffusionSampler.sample`."""
        return self._sampler.sample(model, classes, guidance=guidance, seed=seed, **options)

    def require_sampling(self, guidance: float, **options: Any) -> None:
        """Raise UserError for what no images can be drawn with; see `DiffusionSampler.require`."""
        self._sampler.require(guidance=guidance, **options)

    @property
    def _sampler(self) -> DiffusionSampler:
        return DiffusionSampler(self.config.model, self.process, self.autoencoder)

    def _draw(
        self, split: Split, indices: Sequence[int], generators: Sequence[torch.Generator], dropped: float
    ) -> Noised:
        """Return samples of images at the indices: of each, in this order, label, timestep, noise, flip and latents."""
        rows = []
        for index, generator in zip(indices, generators, strict=True):
            label = int(split.labels[index])
            if float(torch.rand((), generator=generator)) < dropped:
                label = self.config.model.classes
            timestep = int(torch.randint(self.config.timesteps, (), generator=generator))
            noise = torch.randn(self._shape, generator=generator)
            rows.append((split.draw(index, generator), noise, timestep, label))
        images, noises, timesteps, labels = zip(*rows, strict=True)
        return Noised(torch.stack(images), torch.stack(noises), torch.tensor(timesteps), torch.tensor(labels))

    @property
    def _shape(self) -> tuple[int, int, int]:
        model = self.config.model
        return model.channels, model.image_size, model.image_size

    def _errors(self, model: nn.Module, drawn: Noised) -> tuple[Tensor, dict[str, tuple[Tensor, float]]]:
        """Return the squared error of each sample's noise, and the auxiliary losses of the batch."""
        device = next(model.parameters()).device
        images, noise, timesteps, labels = (part.to(device) for part in drawn)
        noisy = self.process.noisy(images, noise, timesteps)
        found, variance, losses = model(noisy, timesteps, labels)
        auxiliary = {name: (loss, 1.0) for name, loss in losses.items()}
        if variance is not None:
            bound = self.process.bound(images, noisy, timesteps, found, variance)
            auxiliary["variational_bound"] = (bound.mean(), 1.0)
        return (found - noise).square().flatten(1).mean(dim=1), auxiliary
