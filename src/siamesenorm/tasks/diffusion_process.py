"""The process of diffusion: noise of a schedule over T steps, its variational bound, and the samplers of diffusers.

    x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e        e ~ N(0, 1), a_t the product of 1 - b_s over the steps s <= t

diffusers is imported when a process is made: it takes seconds.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from siamesenorm.errors import optional

BetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]
Sampler = Literal["ddpm", "ddim", "dpm-solver"]
HALF_LEVEL = 1 / 255
"""Half the distance of two of the 256 levels of a pixel in [-1, 1]."""
LEAST_PROBABILITY = 1e-12


class DiffusionProcess:
    """The forward process of `timesteps` steps with a schedule of diffusers, and the samplers that reverse it."""

    def __init__(self, timesteps: int, beta_schedule: BetaSchedule) -> None:
        self.options: dict[str, Any] = {"num_train_timesteps": timesteps, "beta_schedule": beta_schedule}
        self.schedulers = optional("diffusers", "diffusion", "a diffusion model")
        betas = self.schedulers.DDPMScheduler(**self.options).betas
        self.kept = (1 - betas.double()).cumprod(0)
        """The products a_t, [timesteps] in fp64."""

    def noisy(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return x_t of images [batch, ...], noise of that shape, and timesteps [batch]."""
        signal, deviation = self._at(timesteps, images, self.kept.sqrt(), (1 - self.kept).sqrt())
        return signal * images + deviation * noise

    def bound(self, images: Tensor, noisy: Tensor, timesteps: Tensor, noise: Tensor, variance: Tensor) -> Tensor:
        """Return the term of the variational bound at each timestep, in bits a value, [batch] (arXiv 2102.09672).

        `noise` and `variance` are the model's: KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)), and at t = 0 minus the
        log likelihood of the 256 levels of x_0. Only the variance has a gradient.
        """
        of_x, of_noise, of_start, of_noisy, least, most = self._at(timesteps, images, *self._reverse)
        start = of_x * noisy - of_noise * noise.detach()
        mean, true_mean = of_start * start + of_noisy * noisy, of_start * images + of_noisy * noisy
        share = (variance + 1) / 2
        log_variance = share * most + (1 - share) * least
        divergence = gaussian_divergence(true_mean, least, mean, log_variance)
        likelihood = level_log_likelihood(images, mean, log_variance / 2)
        first = (timesteps == 0).view(-1, *(1,) * (images.ndim - 1))
        return torch.where(first, -likelihood, divergence).flatten(1).mean(dim=1) / math.log(2)

    def build_sampler(self, name: str, steps: int, *, clip: bool, learned_sigma: bool) -> Any:
        """Return a scheduler of diffusers, set to `steps` steps; `clip` keeps its estimates of x_0 within [-1, 1].

        That of "ddpm" takes a learned variance behind the noise in the channels, the others the noise alone;
        "dpm-solver" does not clip.
        """
        classes, variance = self.schedulers, "learned_range" if learned_sigma else "fixed_small"
        clipped = {"clip_sample": clip, "timestep_spacing": "trailing"}
        if name == "dpm-solver":
            scheduler = classes.DPMSolverMultistepScheduler(**self.options)
        elif name == "ddim":
            scheduler = classes.DDIMScheduler(**self.options, **clipped)
        else:
            scheduler = classes.DDPMScheduler(**self.options, **clipped, variance_type=variance)
        scheduler.set_timesteps(steps)
        return scheduler

    @cached_property
    def _reverse(self) -> tuple[Tensor, ...]:
        """The factors of a step back, each [timesteps] in fp64.

        Those of x_t and of the noise in x_0, those of x_0 and of x_t in the mean of q(x_{t-1} | x_t, x_0), and the
        logarithms of its variance, whose first is 0 and taken as the second, and of b_t.
        """
        kept = self.kept
        before = torch.cat((kept.new_ones(1), kept[:-1]))
        betas = 1 - kept / before
        posterior = betas * (1 - before) / (1 - kept)
        of_start, of_noisy = before.sqrt() * betas / (1 - kept), (1 - betas).sqrt() * (1 - before) / (1 - kept)
        least = torch.cat((posterior[1:2], posterior[1:])).log()
        return kept.rsqrt(), (1 / kept - 1).sqrt(), of_start, of_noisy, least, betas.log()

    @staticmethod
    def _at(timesteps: Tensor, like: Tensor, *values: Tensor) -> list[Tensor]:
        """Return the values of timesteps [batch], shaped to broadcast with `like` and in its dtype."""
        shape = (-1, *(1,) * (like.ndim - 1))
        return [each.to(like.device)[timesteps].to(like.dtype).view(shape) for each in values]


def gaussian_divergence(mean: Tensor, log_variance: Tensor, other: Tensor, other_log_variance: Tensor) -> Tensor:
    """Return KL(N(mean, variance) || N(other, other variance)) in nats, element by element."""
    ratio = log_variance - other_log_variance
    return 0.5 * (ratio.exp() - 1 - ratio + (mean - other).square() * (-other_log_variance).exp())


def level_log_likelihood(images: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the log probability in nats that N(mean, std^2) falls into the level of each pixel in [-1, 1].

    The first and the last level reach to minus and plus infinity.
    """
    scale = (-log_std).exp()
    below = torch.special.ndtr((images - mean - HALF_LEVEL) * scale)
    above = torch.special.ndtr((images - mean + HALF_LEVEL) * scale)
    above = torch.where(images > 1 - HALF_LEVEL, 1.0, above)
    below = torch.where(images < -1 + HALF_LEVEL, 0.0, below)
    return (above - below).clamp(min=LEAST_PROBABILITY).log()
