"""The vision Transformer (arXiv 2010.11929), DeiT (arXiv 2012.12877) and their sizes: patches, positions, blocks, head.

* any topology, any norm, in their setting for vision; attention sees all patches
* a class token, or the mean of all patches, is what the head reads; the closing owns the final norm
* `ImageEncoder` is everything but the head; a masked autoencoder (`masked_autoencoder`) has the same
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.models.block import TransformerOutput, mean_losses
from siamesenorm.models.initialisation import build_embedding, build_initialised, initialise
from siamesenorm.models.transformer import TransformerConfig, config_of_size, configured, require_positive
from siamesenorm.norms import NormSpec, assign, norm_options
from siamesenorm.sublayers.sublayer import Losses, Projection
from siamesenorm.topologies import Kernels, ResidualSpec, Streams, Topology

Pooling = Literal["token", "mean"]
Positions = Literal["learned", "sine-cosine"]
OFFICIAL = "siamese-post-pre:post_norm=lazy,readout=code"
"""SiameseNorm in the form of the released vision code (arXiv 2602.08064)."""
DEIT: dict[str, Any] = {
    "norm": NormSpec.parse("layernorm:eps=1e-6"),
    "attention_norm": "none",
    "activation": "gelu",
    "bias": True,
    "initialisation": "normal",
    "token_position": True,
}
"""What ViT and DeiT of every size have in common, as published and in timm."""
SIZES: dict[str, dict[str, Any]] = {
    "vit-t": {**DEIT, "depth": 12, "dim": 192, "heads": 3, "hidden": 768},
    "vit-s": {**DEIT, "depth": 12, "dim": 384, "heads": 6, "hidden": 1536},
    "vit-b": {**DEIT, "depth": 12, "dim": 768, "heads": 12, "hidden": 3072},
    "vit-l": {**DEIT, "depth": 24, "dim": 1024, "heads": 16, "hidden": 4096},
}
"""Fields of named sizes, for images of 224 x 224 in patches of 16 x 16. T, S and B are those of DeiT, too."""


@dataclass(frozen=True, kw_only=True)
class ImageEncoderConfig(TransformerConfig):
    """What determines the function and the initial weights of an encoder of images, apart from the seed."""

    domain: ClassVar[Literal["language", "vision"]] = "vision"

    image_size: int = 224
    """Height and width of an image in pixels."""
    patch_size: int = 16
    """Height and width of a patch in pixels."""
    channels: int = 3
    """Channels of an image."""
    pooling: Pooling = "token"
    """What the head reads: a class token, or the mean of all patches."""
    positions: Positions = "learned"
    """Positions of patches: learned, or fixed sines and cosines of row and column (arXiv 2111.06377)."""
    token_position: bool = False
    """Add a position to the class token, too, as ViT and DeiT do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_patches(self)
        if self.positions == "sine-cosine" and self.dim % 4:
            raise UserError(f"dim is {self.dim}: sine-cosine positions need a multiple of 4")

    def inputs(self) -> tuple[Tensor, ...]:
        """Return one sample of the model's inputs, on the meta device: an image."""
        return (torch.zeros(1, self.channels, self.image_size, self.image_size, device="meta"),)

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: its pixels in all channels."""
        return self.channels * self.patch_size**2

    @property
    def tokens(self) -> int:
        """Tokens before the patches."""
        return int(self.pooling == "token")

    def residual_spec(self, kernels: Kernels = "plain") -> ResidualSpec:
        """Return the specification of the residual path; raises UserError for unknown kernels.

        An operator with a dropout (SeeDNorm) has the rate of stochastic depth, unless it sets its own
        (arXiv 2510.22777).
        """
        spec = super().residual_spec(kernels)
        if "dropout" in norm_options(self.norm.name) and "dropout" not in dict(self.norm.options):
            return spec.with_norm_options(dropout=self.drop_path)
        return spec


@dataclass(frozen=True, kw_only=True)
class VisionTransformerConfig(ImageEncoderConfig):
    """Everything that determines a vision Transformer's function and its initial weights, apart from the seed."""

    classes: int = 1000
    """Number of classes."""
    distillation: bool = False
    """Add DeiT's distillation token and its head; the logits are the mean of both heads'."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "classes")
        if self.distillation and self.pooling != "token":
            raise UserError(f"distillation needs a class token, not pooling {self.pooling!r}: use pooling 'token'")

    @property
    def tokens(self) -> int:
        """Tokens before the patches: class and distillation."""
        return super().tokens + self.distillation

    def build(self, *, seed: int, device: torch.device, kernels: Kernels = "plain") -> VisionTransformer:
        """Return the model with its initial weights, as `build_vision_transformer` does."""
        return build_vision_transformer(self, seed=seed, device=device, kernels=kernels)


def vision_transformer_config(
    size: str, *, topology: str | Topology = OFFICIAL, norm: str | NormSpec | None = None, **overrides: Any
) -> VisionTransformerConfig:
    """Return the configuration of a named size with a topology, a norm and overridden fields.

    Raises UserError for an unknown size, topology, norm, option or field.
    """
    return config_of_size(VisionTransformerConfig, SIZES, size, topology=topology, norm=norm, **overrides)


class ImageEncoder(nn.Module):
    """Patches with positions, tokens before them, and blocks with any topology."""

    def __init__(self, config: ImageEncoderConfig, kernels: Kernels = "plain") -> None:
        super().__init__()
        self.kernels = kernels
        self.patch_size, self.tokens, self.token_position = config.patch_size, config.tokens, config.token_position
        self.patch = Projection(config.patch_values, config.dim, role="other", bias=True)
        self.position = build_positions(config, config.tokens if config.token_position else 0)
        self.token = build_embedding(1, config.dim) if config.pooling == "token" else None
        if config.tokens > 1:
            self.distillation_token = build_embedding(1, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.opening, self.blocks, self.closing = config.build_stack(kernels)

    def encode(self, images: Tensor, visible: Tensor | None = None) -> tuple[Streams, list[Losses]]:
        """Return the streams after the last block, and the losses of each block; arguments as in `embed`."""
        streams = self.opening(self.dropout(self.embed(images, visible)))
        losses: list[Losses] = []
        for block in self.blocks:
            streams, found = block(streams)
            losses.append(found)
        return streams, losses

    def features(self, images: Tensor) -> Tensor:
        """Return what a head reads, [batch, dim], of images [batch, channels, height, width]."""
        return self.pool(self.encode(images)[0])

    def pool(self, streams: Streams) -> Tensor:
        """Return what a head reads, [batch, dim], of the streams after the last block."""
        if self.token is None:
            mean: Tensor = self.closing(streams).mean(dim=1)
            return mean
        return self.closing.select(streams, slice(1))[:, 0]

    def embed(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return [batch, tokens, dim]: the tokens, if there are any, and the patches with their positions.

        `images` are [batch, channels, height, width]. With `visible` [batch, kept], numbers of patches, only those.
        """
        patches, position = cut(images, self.patch_size), self.position.weight
        on_tokens = self.tokens if self.token_position else 0
        of_patches = position[on_tokens:]
        if visible is not None:
            patches, of_patches = take(patches, visible), of_patches[visible]
        embedded: Tensor = self.patch(patches) + of_patches
        if self.token is None:
            return embedded
        token = self.token.weight
        if self.tokens > 1:
            token = torch.cat((token, self.distillation_token.weight))
        if on_tokens:
            token = token + position[:on_tokens]
        return torch.cat((token.to(embedded.dtype).expand(len(images), -1, -1), embedded), dim=1)


class VisionTransformer(ImageEncoder):
    """A classifier of images with any topology."""

    def __init__(self, config: VisionTransformerConfig, kernels: Kernels = "plain") -> None:
        super().__init__(config, kernels)
        self.config = config
        self.head = Projection(config.dim, config.classes, role="head", bias=True)
        if config.distillation:
            self.distillation_head = Projection(config.dim, config.classes, role="head", bias=True)

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the initial weights."""
        config = self.config
        initialise(self, self.blocks, scheme=config.initialisation, topology=config.topology, dim=config.dim, seed=seed)
        set_positions(self.position, config)

    def forward(self, images: Tensor) -> TransformerOutput:
        """Return the logits, in at least fp32, of images [batch, channels, height, width]."""
        streams, losses = self.encode(images)
        if self.config.distillation:
            tokens = self.closing.select(streams, slice(2))
            logits = (self.head(tokens[:, 0]) + self.distillation_head(tokens[:, 1])) / 2
        else:
            logits = self.head(self.pool(streams))
        return TransformerOutput(logits.to(torch.promote_types(logits.dtype, torch.float32)), mean_losses(losses))


def build_vision_transformer(
    size: str | VisionTransformerConfig = "vit-t",
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    kernels: Kernels = "plain",
    **options: Any,
) -> VisionTransformer:
    """Return an initialised model of a named size, or of a configuration, as `build_language_model` does."""
    config = configured(size, vision_transformer_config, options)
    return build_initialised(lambda: VisionTransformer(config, kernels), seed, device)


_FIRST = ("patch", "position", "token", "distillation_token", "opening")


def layer_of(name: str, depth: int) -> int:
    """Return the layer of a parameter of an encoder: 0 before the blocks, then the blocks, `depth` + 1 after them."""
    if found := re.match(r"blocks\.(\d+)\.", name):
        return int(found[1]) + 1
    return 0 if name.partition(".")[0] in _FIRST else depth + 1


# --- patches and their positions


def cut(images: Tensor, patch_size: int) -> Tensor:
    """Return the patches of images [batch, channels, height, width] as [batch, patches, patch values], row by row."""
    return F.unfold(images, kernel_size=patch_size, stride=patch_size).transpose(1, 2)


def take(patches: Tensor, numbers: Tensor) -> Tensor:
    """Return the patches [batch, patches, values] of the given numbers [batch, kept]."""
    return patches.gather(1, numbers.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))


def build_positions(config: ImageEncoderConfig, tokens: int) -> nn.Embedding:
    """Return a position for so many tokens and for every patch; fixed ones are not trained."""
    position = build_embedding(tokens + config.patches, config.dim)
    position.weight.requires_grad_(config.positions == "learned")
    return position


@torch.no_grad()
def set_positions(position: nn.Embedding, config: ImageEncoderConfig) -> None:
    """Set fixed positions to sines and cosines, those of tokens before the patches to 0; learned ones stay as drawn."""
    if config.positions == "learned":
        return
    table = sine_cosine_positions(config.image_size // config.patch_size, config.dim)
    before = table.new_zeros(position.num_embeddings - config.patches, config.dim)
    assign(position.weight, torch.cat((before, table)))


def sine_cosine_positions(side: int, dim: int) -> Tensor:
    """Return the fixed positions of side x side patches, row by row, [side^2, dim] in fp64.

    Of a patch in row y and column x they are [sin(x w), cos(x w), sin(y w), cos(y w)], w_i = 10000^(-4 i / dim).
    """
    frequencies = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    angles = torch.outer(torch.arange(side, dtype=torch.float64), frequencies)
    axis = torch.cat((angles.sin(), angles.cos()), dim=-1)
    return torch.cat((axis.repeat(side, 1), axis.repeat_interleave(side, dim=0)), dim=-1)


def require_patches(config: Any) -> None:
    """Raise UserError unless an image of a configuration can be cut into its patches."""
    for name in ("image_size", "patch_size", "channels"):
        require_positive(config, name)
    if config.image_size % config.patch_size:
        raise UserError(
            f"patch_size {config.patch_size} does not divide the image ({config.image_size}): choose another"
        )
