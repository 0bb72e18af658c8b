"""The diffusion Transformer (DiT, arXiv 2212.09748): patches, conditioned blocks, a modulated head.

* timestep and class give one condition c; every sublayer is `Modulated` by it (AdaLN-Zero), and so is the head
* the last norm before each sublayer, and the one before the head, have no gain: the condition gives it
* any topology that composes with a gate on the sublayer's output, any norm: with SeeDNorm the blocks are AdaSeeDNorm's
* at the start all gates and the head are 0, so that the prediction is 0
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.models.block import add_losses
from siamesenorm.models.initialisation import build_embedding, build_initialised, initialise
from siamesenorm.models.transformer import TransformerConfig, config_of_size, configured, require_positive
from siamesenorm.models.vision import OFFICIAL, cut, require_patches, sine_cosine_positions
from siamesenorm.norms import AdaLN, NormSpec
from siamesenorm.sublayers.mlp import Activation
from siamesenorm.sublayers.sublayer import Context, Losses, Modulated, Projection
from siamesenorm.topologies import (
    Kernels,
    Place,
    ResidualSpec,
    Topology,
    build_topology,
    topology_name,
    transformer_places,
)

NORM = NormSpec.parse("layernorm:eps=1e-6")
WIDTHS: dict[str, dict[str, int]] = {
    "s": {"depth": 12, "dim": 384, "heads": 6, "hidden": 1536},
    "b": {"depth": 12, "dim": 768, "heads": 12, "hidden": 3072},
    "l": {"depth": 24, "dim": 1024, "heads": 16, "hidden": 4096},
    "xl": {"depth": 28, "dim": 1152, "heads": 16, "hidden": 4608},
}
SIZES: dict[str, dict[str, Any]] = {
    f"dit-{name}-{patch}": {**width, "norm": NORM, "patch_size": patch, "learned_sigma": True}
    for name, width in WIDTHS.items()
    for patch in (2, 4, 8)
}
"""Fields of the paper's sizes, for latents of 4 x 32 x 32 (images of 256 x 256 pixels) in 1,000 classes."""
FREQUENCIES = 128
"""Frequencies of the timestep's sinusoids; there is a sine and a cosine of each."""


@dataclass(frozen=True, kw_only=True)
class DiffusionTransformerConfig(TransformerConfig):
    """Everything that determines a diffusion Transformer's function and its initial weights, apart from the seed.

    Raises UserError for a topology that does not compose with AdaLN-Zero, with its reason.
    """

    domain: ClassVar[Literal["language", "vision"]] = "vision"
    usual_attention_norm: ClassVar[Literal["none", "qk"]] = "none"

    topology: Topology = dataclasses.field(default_factory=lambda: build_topology(OFFICIAL))
    """Residual topology, with options as in dhc-2:streams=4; `siamesenorm explain` lists them."""
    norm: NormSpec = NORM
    """Norm operator, with options as in seednorm:heads=4; `siamesenorm explain` lists them."""
    activation: Activation = "gelu-tanh"
    """Kind of MLP."""
    bias: bool = True
    """Add biases to attention and MLP."""
    image_size: int = 32
    """Height and width of an image, or of its latents."""
    patch_size: int = 2
    """Height and width of a patch."""
    channels: int = 4
    """Channels of an image, or of its latents."""
    classes: int = 1000
    """Number of classes; the label of no class is this number."""
    learned_sigma: bool = False
    """Predict the variance of every step, too (arXiv 2102.09672): twice the channels."""
    frequencies: Literal["dit", "diffusers"] = "dit"
    """The i-th of the timestep's 128 frequencies: 10000^(-i/128) as in DiT's code, 10000^(-i/127) as in diffusers'."""
    condition_embeddings: Literal["shared", "per-block"] = "shared"
    """One embedding of timestep and class for the model, or one for every block, as diffusers stores them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_patches(self)
        require_positive(self, "classes")
        if self.dim % 4:
            raise UserError(f"dim is {self.dim}: sine-cosine positions need a multiple of 4")
        if self.topology.modulation_refusal is not None:
            raise UserError(
                f"topology {topology_name(self.topology)} does not compose with AdaLN-Zero: "
                f"{self.topology.modulation_refusal}; use pre or siamese"
            )

    @property
    def frequency_span(self) -> int:
        """Index of the frequency 1/10000."""
        return FREQUENCIES if self.frequencies == "dit" else FREQUENCIES - 1

    @property
    def grid(self) -> int:
        """Patches in a row or a column of an image."""
        return self.image_size // self.patch_size

    @property
    def outputs(self) -> int:
        """Channels of the prediction: those of the noise, and of the variance if it is learned."""
        return self.channels * (2 if self.learned_sigma else 1)

    def build(self, *, seed: int, device: torch.device, kernels: Kernels = "plain") -> DiffusionTransformer:
        """Return the model with its initial weights, as `build_diffusion_transformer` does."""
        return build_diffusion_transformer(self, seed=seed, device=device, kernels=kernels)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return one sample of the model's inputs, on the meta device: an image, its timestep and its class."""
        number = torch.zeros(1, dtype=torch.int64, device="meta")
        return torch.zeros(1, self.channels, self.image_size, self.image_size, device="meta"), number, number

    def places(self) -> list[tuple[Place, ...]]:
        """Return the places of the sublayers of each block: conditioned ones."""
        return transformer_places(self.depth, conditioned=True)

    def build_sublayers(self, kernels: Kernels) -> dict[str, nn.Module]:
        """Return attention and MLP of a block, each scaled, shifted and gated by the condition."""
        sublayers = super().build_sublayers(kernels)
        return {name: Modulated(sublayer, self.dim, self.dim) for name, sublayer in sublayers.items()}

    def residual_spec(self, kernels: Kernels = "plain") -> ResidualSpec:
        """Return the specification of the residual path, whose last norm is the head's."""
        return dataclasses.replace(super().residual_spec(kernels), final_norm=False)


def diffusion_transformer_config(
    size: str, *, topology: str | Topology = OFFICIAL, norm: str | NormSpec | None = None, **overrides: Any
) -> DiffusionTransformerConfig:
    """Return the configuration of a named size, such as "dit-l-4", with a topology, a norm and overridden fields.

    Raises UserError for an unknown size, topology, norm, option or field.
    """
    return config_of_size(DiffusionTransformerConfig, SIZES, size, topology=topology, norm=norm, **overrides)


class DiffusionOutput(NamedTuple):
    """The predicted noise, the raw variance in [-1, 1] where it is learned, and the losses of the sublayers.

    Both are [batch, channels, height, width] in at least fp32. Variance v stands for the log variance
    (1 + v)/2 log b + (1 - v)/2 log b~, b and b~ the variances of the forward process and of its posterior.
    """

    noise: Tensor
    variance: Tensor | None
    losses: Losses


class ConditionEmbedding(nn.Module):
    """c = MLP(sinusoids of the timestep) + embedding of the class, for timesteps and classes [batch]; c [batch, dim].

    The last class is that of no class, for classifier-free guidance (arXiv 2207.12598).
    """

    def __init__(self, dim: int, classes: int, frequency_span: int) -> None:
        super().__init__()
        self.frequency_span = frequency_span
        self.timestep_up = Projection(2 * FREQUENCIES, dim, role="other", bias=True)
        self.timestep_output = Projection(dim, dim, role="other", bias=True)
        self.label = build_embedding(classes + 1, dim)

    def forward(self, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Return c."""
        sinusoids = timestep_sinusoids(timesteps, self.frequency_span).to(self.label.weight.dtype)
        embedded: Tensor = self.timestep_output(F.silu(self.timestep_up(sinusoids))) + self.label(labels)
        return embedded


class DiffusionTransformer(nn.Module):
    """A model of the noise in images, with any topology that composes with AdaLN-Zero."""

    position: Tensor

    def __init__(self, config: DiffusionTransformerConfig, kernels: Kernels = "plain") -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.patch = Projection(config.channels * config.patch_size**2, config.dim, role="other", bias=True)
        self.register_buffer("position", torch.empty(config.grid**2, config.dim), persistent=False)
        embeddings = config.depth if config.condition_embeddings == "per-block" else 1
        self.conditions = nn.ModuleList(
            ConditionEmbedding(config.dim, config.classes, config.frequency_span) for _ in range(embeddings)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.opening, self.blocks, self.closing = config.build_stack(kernels)
        self.final_norm = AdaLN(config.dim, config.dim, config.norm)
        self.final_norm.norm.select_kernels(kernels)
        self.head = Projection(config.dim, config.outputs * config.patch_size**2, role="head", bias=True)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the initial weights; the head is 0, as the gates are."""
        config = self.config
        initialise(self, self.blocks, scheme=config.initialisation, topology=config.topology, dim=config.dim, seed=seed)
        self.head.weight.zero_()
        self.position.copy_(sine_cosine_positions(config.grid, config.dim))

    def forward(self, images: Tensor, timesteps: Tensor, labels: Tensor) -> DiffusionOutput:
        """Return the prediction for noisy images [batch, channels, height, width] at timesteps [batch] (int64).

        `labels` [batch] (int64) are classes; that of no class is `config.classes`.
        """
        config = self.config
        conditions = [embedding(timesteps, labels) for embedding in self.conditions]
        embedded = self.patch(cut(images, config.patch_size))
        streams = self.opening(self.dropout(embedded + self.position.to(embedded.dtype)))
        losses: Losses = {}
        for index, block in enumerate(self.blocks):
            streams, found = block(streams, Context(condition=conditions[index % len(conditions)]))
            losses = add_losses(losses, found)
        hidden = self.final_norm(self.closing(streams), conditions[0])
        prediction = self.join(self.head(hidden))
        noise, *variance = torch.split(prediction, config.channels, dim=1)
        return DiffusionOutput(noise, variance[0] if variance else None, losses)

    def join(self, patches: Tensor) -> Tensor:
        """Return [batch, outputs, height, width], in at least fp32, of patches [batch, patches, values].

        The values of a patch are those of its first pixel in all channels, then of the next in its row, as in DiT.
        """
        config = self.config
        wide = patches.to(torch.promote_types(patches.dtype, torch.float32))
        cells = wide.view(-1, config.grid, config.grid, config.patch_size, config.patch_size, config.outputs)
        return cells.permute(0, 5, 1, 3, 2, 4).reshape(-1, config.outputs, config.image_size, config.image_size)


def build_diffusion_transformer(
    size: str | DiffusionTransformerConfig = "dit-s-4",
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    kernels: Kernels = "plain",
    **options: Any,
) -> DiffusionTransformer:
    """Return an initialised model of a named size, or of a configuration, as `build_language_model` does."""
    config = configured(size, diffusion_transformer_config, options)
    return build_initialised(lambda: DiffusionTransformer(config, kernels), seed, device)


def timestep_sinusoids(timesteps: Tensor, frequency_span: int = FREQUENCIES) -> Tensor:
    """Return [cos(t w), sin(t w)] of timesteps [batch], w_i = 10000^(-i/span), i < 128: [batch, 256] in fp32."""
    # In this order, as in other implementations: at timestep 1000 the rounding of a frequency moves the angle by 1e-4.
    exponents = -math.log(10_000) * torch.arange(FREQUENCIES, device=timesteps.device, dtype=torch.float32)
    angles = timesteps.to(torch.float32)[:, None] * torch.exp(exponents / frequency_span)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
