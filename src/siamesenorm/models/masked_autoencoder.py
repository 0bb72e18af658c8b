"""The masked autoencoder (MAE, arXiv 2111.06377): an encoder of the visible patches, a small decoder of all of them.

* the encoder is the vision Transformer's, its parameters have the same names; the class token is an auxiliary one
* the decoder is a second stack of the same topology and norm, with mask tokens in the place of hidden patches
* both have fixed sine-cosine positions by default; the output is the pixels of every patch
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.models.block import TransformerOutput, mean_losses
from siamesenorm.models.initialisation import build_embedding, build_initialised, initialise
from siamesenorm.models.transformer import config_of_size, configured, require_positive
from siamesenorm.models.vision import (
    OFFICIAL,
    SIZES,
    ImageEncoder,
    ImageEncoderConfig,
    Positions,
    build_positions,
    set_positions,
)
from siamesenorm.norms import NormSpec
from siamesenorm.sublayers.sublayer import Losses, Projection
from siamesenorm.topologies import Kernels, Topology

MAE_SIZES = {size.replace("vit", "mae"): {**fields, "token_position": False} for size, fields in SIZES.items()}
"""The encoders' sizes; every decoder has 8 blocks of width 512. The token's position would be 0."""


@dataclass(frozen=True, kw_only=True)
class MaskedAutoencoderConfig(ImageEncoderConfig):
    """Everything that determines a masked autoencoder's function and its initial weights, apart from the seed."""

    positions: Positions = "sine-cosine"
    """Positions of patches in the encoder; those of the decoder are sine-cosine."""
    mask_ratio: float = 0.75
    """Share of the patches that are hidden; their number is rounded."""
    decoder_depth: int = 8
    """Number of blocks of the decoder."""
    decoder_dim: int = 512
    """Width of the decoder."""
    decoder_heads: int = 16
    """Attention heads of the decoder."""
    decoder_hidden: int = 2048
    """Width of the decoder's MLP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("decoder_depth", "decoder_dim", "decoder_heads", "decoder_hidden"):
            require_positive(self, name)
        if not 0 < self.mask_ratio < 1:
            raise UserError(f"mask_ratio is {self.mask_ratio}: choose a number between 0 and 1, such as 0.75")
        if not 0 < self.masked < self.patches:
            raise UserError(
                f"mask_ratio {self.mask_ratio} hides {self.masked} of {self.patches} patches: choose one that hides "
                "some and leaves some, or smaller patches"
            )
        try:
            self.decoder  # noqa: B018 - refuses widths and heads
        except UserError as error:
            raise UserError(f"decoder: {error}") from error

    def build(self, *, seed: int, device: torch.device, kernels: Kernels = "plain") -> MaskedAutoencoder:
        """Return the model with its initial weights, as `build_masked_autoencoder` does."""
        return build_masked_autoencoder(self, seed=seed, device=device, kernels=kernels)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return one sample of the model's inputs, on the meta device: an image and its visible patches."""
        return (*super().inputs(), torch.zeros(1, self.visible, dtype=torch.int64, device="meta"))

    @property
    def masked(self) -> int:
        """Number of hidden patches of an image."""
        return round(self.patches * self.mask_ratio)

    @property
    def visible(self) -> int:
        """Number of visible patches of an image."""
        return self.patches - self.masked

    @property
    def decoder(self) -> ImageEncoderConfig:
        """The decoder's stack: as the encoder's, with its own depth and widths, and without stochastic depth."""
        shared = {each.name: getattr(self, each.name) for each in dataclasses.fields(ImageEncoderConfig)}
        own: dict[str, Any] = {"positions": "sine-cosine", "kv_heads": 0, "token_position": False, "drop_path": 0.0}
        of_decoder = {name: getattr(self, f"decoder_{name}") for name in ("depth", "dim", "heads", "hidden")}
        return ImageEncoderConfig(**{**shared, **own, **of_decoder})


def masked_autoencoder_config(
    size: str, *, topology: str | Topology = OFFICIAL, norm: str | NormSpec | None = None, **overrides: Any
) -> MaskedAutoencoderConfig:
    """Return the configuration of a named size with a topology, a norm and overridden fields.

    Raises UserError for an unknown size, topology, norm, option or field.
    """
    return config_of_size(MaskedAutoencoderConfig, MAE_SIZES, size, topology=topology, norm=norm, **overrides)


class MaskedAutoencoder(ImageEncoder):
    """An encoder of visible patches and a decoder of the pixels of all patches, with any topology."""

    def __init__(self, config: MaskedAutoencoderConfig, kernels: Kernels = "plain") -> None:
        super().__init__(config, kernels)
        self.config = config
        self.decoder = Decoder(config, kernels)

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the initial weights: the encoder's are those of a vision Transformer of the same seed."""
        config = self.config
        initialise(self, self.blocks, scheme=config.initialisation, topology=config.topology, dim=config.dim, seed=seed)
        set_positions(self.position, config)
        self.decoder.reset_parameters(seed)

    def forward(self, images: Tensor, visible: Tensor) -> TransformerOutput:
        """Return the pixels of all patches [batch, patches, patch values], in at least fp32.

        `images` are [batch, channels, height, width], `visible` the numbers of their visible patches [batch, kept].
        """
        streams, losses = self.encode(images, visible)
        pixels, found = self.decoder(self.closing(streams), visible)
        wide = torch.promote_types(pixels.dtype, torch.float32)
        return TransformerOutput(pixels.to(wide), mean_losses([*losses, *found]))


class Decoder(nn.Module):
    """From the encoder's visible patches to the pixels of all of them."""

    def __init__(self, config: MaskedAutoencoderConfig, kernels: Kernels = "plain") -> None:
        super().__init__()
        self.config, self.tokens = config.decoder, config.tokens
        dim = self.config.dim
        self.input = Projection(config.dim, dim, role="other", bias=True)
        self.mask_token = build_embedding(1, dim)
        self.position = build_positions(self.config, 0)
        self.opening, self.blocks, self.closing = self.config.build_stack(kernels)
        self.output = Projection(dim, config.patch_values, role="head", bias=True)

    def reset_parameters(self, seed: int) -> None:
        """Draw the initial weights, other ones than the encoder's."""
        config = self.config
        initialise(
            self, self.blocks, scheme=config.initialisation, topology=config.topology, dim=config.dim, seed=seed,
            prefix="decoder.",
        )  # fmt: skip
        set_positions(self.position, config)

    def forward(self, encoded: Tensor, visible: Tensor) -> tuple[Tensor, list[Losses]]:
        """Return the pixels of all patches and the losses of each block, of `encoded` [batch, tokens + kept, dim]."""
        embedded = self.input(encoded)
        tokens, patches = embedded[:, : self.tokens], embedded[:, self.tokens :]
        batch, _, dim = patches.shape
        everywhere = self.mask_token.weight.to(patches.dtype).expand(batch, self.config.patches, dim)
        filled = everywhere.scatter(1, visible.unsqueeze(-1).expand(-1, -1, dim), patches)
        streams = self.opening(torch.cat((tokens, filled + self.position.weight), dim=1))
        losses: list[Losses] = []
        for block in self.blocks:
            streams, found = block(streams)
            losses.append(found)
        decoded = self.closing(streams)[:, self.tokens :]
        return self.output(decoded), losses


def build_masked_autoencoder(
    size: str | MaskedAutoencoderConfig = "mae-b",
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    kernels: Kernels = "plain",
    **options: Any,
) -> MaskedAutoencoder:
    """Return an initialised model of a named size, or of a configuration, as `build_language_model` does."""
    config = configured(size, masked_autoencoder_config, options)
    return build_initialised(lambda: MaskedAutoencoder(config, kernels), seed, device)
