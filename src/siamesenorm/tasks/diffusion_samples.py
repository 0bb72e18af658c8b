"""Samples of a diffusion model: the samplers of diffusers, with classifier-free guidance (arXiv 2207.12598)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from siamesenorm.data import generator_at
from siamesenorm.data.latents import Autoencoder
from siamesenorm.errors import UserError, unknown
from siamesenorm.models.diffusion import DiffusionTransformer, DiffusionTransformerConfig, build_diffusion_transformer
from siamesenorm.tasks.diffusion_process import DiffusionProcess, Sampler


class DiffusionSampler:
    """Draws images from models of one configuration, decoded where they are latents of an autoencoder."""

    samplers: tuple[str, ...] = get_args(Sampler)

    def __init__(
        self, config: DiffusionTransformerConfig, process: DiffusionProcess, autoencoder: Autoencoder | None
    ) -> None:
        self.config, self.process, self.autoencoder = config, process, autoencoder
        self.classes = config.classes

    def build_model(self, device: torch.device) -> DiffusionTransformer:
        """Return a model to load weights into."""
        return build_diffusion_transformer(self.config, device=device)

    @torch.no_grad()
    def sample(
        self,
        model: nn.Module,
        classes: Sequence[int],
        *,
        guidance: float = 1.0,
        seed: int = 0,
        first: int = 0,
        steps: int = 250,
        sampler: str = "ddpm",
        progress: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Return one image for each of `classes` [count]: uint8 [count, channels, height, width].

            e = e(x, no class) + guidance (e(x, class) - e(x, no class))

        At guidance 1 that is the prediction for the class alone. All draws of the i-th image are from a generator of
        (seed, first + i): it is the same in any batch, up to the rounding of the model's matrix products. `progress`
        is called after every step. Raises UserError for classes, steps and samplers that do not exist, and where the
        model returns no finite numbers.
        """
        self.require(classes, guidance=guidance, steps=steps, sampler=sampler)
        device, config = next(model.parameters()).device, self.config
        generators = [generator_at(seed, "sample", first + index) for index in range(len(classes))]
        shape = (config.channels, config.image_size, config.image_size)
        x = torch.stack([torch.randn(shape, generator=generator) for generator in generators]).to(device)
        labels = torch.tensor(classes, device=device)
        scheduler = self.process.build_sampler(
            sampler, steps, clip=self.autoencoder is None, learned_sigma=config.learned_sigma
        )
        was_training = model.training
        model.eval()
        for timestep in scheduler.timesteps.tolist():
            noise, variance = guided(model, x, timestep, labels, config.classes, guidance)
            output = torch.cat((noise, variance), dim=1) if variance is not None and sampler == "ddpm" else noise
            drawn = {} if sampler == "dpm-solver" else {"generator": generators}
            x = scheduler.step(output, timestep, x, **drawn).prev_sample
            progress()
        model.train(was_training)
        if not x.isfinite().all():
            raise UserError("the model's samples are not finite: its training has diverged, use another run")
        pixels = x if self.autoencoder is None else self.autoencoder.decode(x)
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()

    def require(
        self, classes: Sequence[int] = (), *, guidance: float = 1.0, steps: int = 250, sampler: str = "ddpm"
    ) -> None:
        """Raise UserError for classes, steps and samplers that do not exist."""
        for label in classes:
            if not 0 <= label < self.classes:
                raise UserError(f"class {label}: the model has classes 0 to {self.classes - 1}")
        if not 0 <= guidance < math.inf:
            raise UserError(f"guidance is {guidance}: choose 1, which is none, or a number such as 1.5 or 4")
        if not 1 <= steps <= len(self.process.kept):
            raise UserError(f"steps is {steps}: choose from 1 to the {len(self.process.kept)} of the training")
        if sampler not in self.samplers:
            raise unknown("sampler", sampler, self.samplers)


def guided(
    model: nn.Module, x: Tensor, timestep: int, labels: Tensor, no_class: int, guidance: float
) -> tuple[Tensor, Tensor | None]:
    """Return the guided noise at x [batch, ...], and the variance for the classes, None where none is learned."""
    timesteps = torch.full_like(labels, timestep)
    if guidance == 1:
        noise, variance, _ = model(x, timesteps, labels)
        return noise, variance
    both = torch.cat((labels, torch.full_like(labels, no_class)))
    noise, variance, _ = model(x.repeat(2, 1, 1, 1), timesteps.repeat(2), both)
    conditional, free = noise.chunk(2)
    return free + guidance * (conditional - free), None if variance is None else variance[: len(labels)]
