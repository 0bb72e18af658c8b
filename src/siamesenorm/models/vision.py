"""The vision Transformer (arXiv 2010.11929): patches, learned positions, blocks, and a linear head on images.

* any topology, any norm, in their setting for vision; attention sees all patches
* a class token, or the mean of all patches, is what the head reads; the closing owns the final norm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.models.block import TransformerOutput, mean_losses
from siamesenorm.models.initialisation import build_embedding, build_initialised, initialise
from siamesenorm.models.transformer import TransformerConfig, require_positive
from siamesenorm.sublayers.sublayer import Losses, Projection
from siamesenorm.topologies import Kernels

Pooling = Literal["token", "mean"]


@dataclass(frozen=True, kw_only=True)
class VisionTransformerConfig(TransformerConfig):
    """Everything that determines a vision Transformer's function and its initial weights, apart from the seed."""

    domain: ClassVar[Literal["language", "vision"]] = "vision"

    image_size: int = 224
    """Height and width of an image in pixels."""
    patch_size: int = 16
    """Height and width of a patch in pixels."""
    channels: int = 3
    """Channels of an image."""
    classes: int = 1000
    """Number of classes."""
    pooling: Pooling = "token"
    """What the head reads: a class token, or the mean of all patches."""

    def __post_init__(self) -> None:
        """Raise UserError for values from which no model can be built."""
        super().__post_init__()
        for name in ("image_size", "patch_size", "channels", "classes"):
            require_positive(self, name)
        if self.image_size % self.patch_size:
            raise UserError(
                f"patch_size {self.patch_size} does not divide the image ({self.image_size}): choose another"
            )

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def build(self, *, seed: int, device: torch.device, kernels: Kernels = "plain") -> VisionTransformer:
        """Return the model with its initial weights, as `build_vision_transformer` does."""
        return build_vision_transformer(self, seed=seed, device=device, kernels=kernels)


class VisionTransformer(nn.Module):
    """A classifier of images with any topology."""

    def __init__(self, config: VisionTransformerConfig, kernels: Kernels = "plain") -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.patch = Projection(config.channels * config.patch_size**2, config.dim, role="other", bias=True)
        self.position = build_embedding(config.patches, config.dim)
        self.token = build_embedding(1, config.dim) if config.pooling == "token" else None
        self.dropout = nn.Dropout(config.dropout)
        self.opening, self.blocks, self.closing = config.build_stack(kernels)
        self.head = Projection(config.dim, config.classes, role="head", bias=True)

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the initial weights."""
        config = self.config
        initialise(self, self.blocks, scheme=config.initialisation, topology=config.topology, dim=config.dim, seed=seed)

    def forward(self, images: Tensor) -> TransformerOutput:
        """Return the logits, in at least fp32, of images [batch, channels, height, width]."""
        streams = self.opening(self.dropout(self.embed(images)))
        losses: list[Losses] = []
        for block in self.blocks:
            streams, found = block(streams)
            losses.append(found)
        if self.token is not None:
            pooled = self.closing(tuple(stream[:, 0] for stream in streams))
        else:
            pooled = self.closing(streams).mean(dim=1)
        logits = self.head(pooled)
        return TransformerOutput(logits.to(torch.promote_types(logits.dtype, torch.float32)), mean_losses(losses))

    def embed(self, images: Tensor) -> Tensor:
        """Return [batch, tokens, dim]: the class token, if there is one, and the patches with their positions."""
        size = self.config.patch_size
        patches = F.unfold(images, kernel_size=size, stride=size).transpose(1, 2)
        embedded: Tensor = self.patch(patches) + self.position.weight
        if self.token is None:
            return embedded
        token = self.token.weight.to(embedded.dtype).expand(len(images), 1, -1)
        return torch.cat((token, embedded), dim=1)


def build_vision_transformer(
    config: VisionTransformerConfig, *, seed: int = 0, device: str | torch.device = "cpu", kernels: Kernels = "plain"
) -> VisionTransformer:
    """Return an initialised model; with `device="meta"` nothing is allocated and nothing drawn."""
    return build_initialised(lambda: VisionTransformer(config, kernels), seed, device)
