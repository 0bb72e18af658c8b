"""The language model: configuration, named sizes, embedding, blocks, head, generation.

* decoder-only, causal, any topology, any norm; rotary positions, no biases and an untied head by default (OLMo)
* logits in fp32 (fp64 for fp64 models); initial weights drawn from a key for each parameter (`initialisation`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.models.block import TransformerOutput, mean_losses
from siamesenorm.models.initialisation import build_embedding, build_initialised, initialise
from siamesenorm.models.transformer import TransformerConfig, config_of_size, configured, require_positive
from siamesenorm.norms import NORMS, DeclaredModule, NormSpec
from siamesenorm.sublayers.attention import AttentionCache, rotation
from siamesenorm.sublayers.moe import STATISTICS, MixtureOfExperts, MixtureShape
from siamesenorm.sublayers.sublayer import Context, Losses, Projection, Rotation
from siamesenorm.topologies import Kernels, Streams, Topology

Positions = Literal["rotary", "none"]
SIZES: dict[str, dict[str, Any]] = {
    "nano": {"depth": 4, "dim": 64, "heads": 4, "hidden": 256, "context": 128},
    "mini": {"depth": 8, "dim": 128, "heads": 4, "hidden": 352, "context": 128},
    "small": {"depth": 12, "dim": 256, "heads": 4, "hidden": 704, "context": 512},
    "390m-l10": {"depth": 10, "dim": 1280, "heads": 10, "hidden": 5120, "vocabulary": 50304, "context": 2048},
    "390m-l17": {"depth": 17, "dim": 1024, "heads": 8, "hidden": 4096, "vocabulary": 50304, "context": 2048},
    "390m-l33": {"depth": 33, "dim": 768, "heads": 6, "hidden": 3072, "vocabulary": 50304, "context": 2048},
    "390m-l80": {"depth": 80, "dim": 512, "heads": 4, "hidden": 2048, "vocabulary": 50304, "context": 2048},
    "olmo-1.3b": {"depth": 16, "dim": 2048, "heads": 16, "hidden": 8192, "vocabulary": 50304, "context": 2048},
    "olmo2-1b": {
        "depth": 16,
        "dim": 2048,
        "heads": 16,
        "hidden": 8192,
        "vocabulary": 100352,
        "context": 4096,
        "rope_theta": 500_000.0,
        "initialisation": "normal",
        "norm": NormSpec.parse("rmsnorm:eps=1e-6"),
    },
    "mini-moe": {
        "depth": 4,
        "dim": 192,
        "heads": 4,
        "hidden": 224,
        "context": 128,
        "experts": 16,
        "active_experts": 2,
    },
    "olmoe-1b-7b": {
        "depth": 16,
        "dim": 2048,
        "heads": 16,
        "hidden": 1024,
        "vocabulary": 50304,
        "context": 4096,
        "initialisation": "normal",
        "experts": 64,
        "active_experts": 8,
    },
    "olmoe-1.3b": {
        "depth": 12,
        "dim": 1024,
        "heads": 16,
        "hidden": 512,
        "vocabulary": 50304,
        "context": 4096,
        "initialisation": "normal",
        "experts": 64,
        "active_experts": 8,
    },
    "moe-15b-a2b": {
        "depth": 28,
        "dim": 2048,
        "heads": 16,
        "hidden": 1024,
        "vocabulary": 50304,
        "context": 4096,
        "initialisation": "normal",
        "experts": 80,
        "active_experts": 8,
    },
}
"""Fields of named sizes: `olmo-1.3b` is the SiameseNorm paper's (arXiv 2602.08064, Table 4); `olmo2-1b` and
`olmoe-1b-7b` are the published shapes of OLMo 2 and OLMoE (arXiv 2409.02060). `mini`, `small`, `nano` and `mini-moe`
are for a CPU; their vocabulary is that of the data."""
GUESSED_SIZES = ("390m-l10", "390m-l17", "390m-l33", "390m-l80", "olmoe-1.3b", "moe-15b-a2b")
"""Sizes whose shapes are not published and fit the published numbers of parameters: the `390m` depths with an MLP of
4 d and heads of 128 (SiameseNorm), `olmoe-1.3b` (SeeDNorm, arXiv 2510.22777) and `moe-15b-a2b` (SiameseNorm) after
OLMoE."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TransformerConfig):
    """Everything that determines a language model's function and its initial weights, apart from the seed.

    `document_mask` keeps attention inside a document; off, as in OLMo, tokens of packed documents see each other.
    """

    vocabulary: int = 257
    """Number of token ids; in a run 0 is that of the data."""
    context: int = 256
    """Tokens of a sequence."""
    tied: bool = False
    """Share the embedding's weights with the head."""
    positions: Positions = "rotary"
    """Position embedding."""
    rope_theta: float = 10_000.0
    """Base of the rotary angles."""
    document_mask: bool = False
    """Keep attention inside a document of a packed sequence."""
    experts: int = 0
    """Experts in place of each MLP, each of the MLP's width (mixture of experts); 0 is a dense MLP."""
    active_experts: int = 2
    """Experts that a token passes through, if there are experts."""
    renormalise_experts: bool = False
    """Divide the weights of a token's experts by their sum: a softmax after the choice in place of one before."""
    load_balancing_weight: float = 0.01
    """Weight of the load-balancing loss of the experts in the objective, a mean over blocks."""
    router_z_weight: float = 0.001
    """Weight of the z loss of the routers in the objective, a mean over blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "context")
        if self.vocabulary < 0:
            raise UserError(f"vocabulary is {self.vocabulary}: choose at least 1, or 0 for that of a run's data")
        if not self.rope_theta > 0:
            raise UserError(f"rope_theta is {self.rope_theta}: choose a positive number, such as 10000")
        if self.positions == "rotary" and self.attention_shape.head_dim % 2:
            raise UserError(f"a head is {self.attention_shape.head_dim} wide: rotary positions need an even width")
        if self.experts:
            self._check_experts()

    def _check_experts(self) -> None:
        self.mixture_shape  # noqa: B018 - refuses numbers of experts
        if self.activation != "swiglu" or self.bias:
            chosen = "bias" if self.bias else f"activation {self.activation}"
            raise UserError(f"{chosen} with experts: they are SwiGLU without biases, leave it out")
        for name in ("load_balancing_weight", "router_z_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} is {value}: choose a number of at least 0")

    def build(self, *, seed: int, device: torch.device, kernels: Kernels = "plain") -> LanguageModel:
        """Return the model with its initial weights, as `build_language_model` does."""
        return build_language_model(self, seed=seed, device=device, kernels=kernels)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return one sample of the model's inputs, on the meta device: tokens."""
        return (torch.zeros(1, self.context, dtype=torch.int64, device="meta"),)

    @property
    def mixture_shape(self) -> MixtureShape:
        """Return the shape of the experts; raises UserError where nothing can be chosen from them."""
        return MixtureShape(
            dim=self.dim,
            hidden=self.hidden,
            experts=self.experts,
            active=self.active_experts,
            renormalise=self.renormalise_experts,
        )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the scalars of the experts in the objective; losses of other sublayers count as they are."""
        weights = {"load_balancing_loss": self.load_balancing_weight, "router_z_loss": self.router_z_weight}
        return {**weights, **dict.fromkeys(STATISTICS, 0.0)}

    def build_mlp(self) -> nn.Module:
        """Return the MLP of a block, or its experts."""
        return MixtureOfExperts(self.mixture_shape) if self.experts else super().build_mlp()


def language_model_config(
    size: str, *, topology: str | Topology = "siamese", norm: str | NormSpec | None = None, **overrides: Any
) -> LanguageModelConfig:
    """Return the configuration of a named size with a topology, a norm and overridden fields.

    Raises UserError for an unknown size, topology, norm, option or field.
    """
    return config_of_size(LanguageModelConfig, SIZES, size, topology=topology, norm=norm, **overrides)


class LanguageModel(nn.Module):
    """A decoder-only Transformer with any topology."""

    def __init__(self, config: LanguageModelConfig, kernels: Kernels = "plain") -> None:
        super().__init__()
        require_positive(config, "vocabulary")
        self.config, self.kernels = config, kernels
        self.embedding = build_embedding(config.vocabulary, config.dim)
        self.embedding_scale: nn.Module = nn.Identity()
        if NORMS[config.norm.name].scales_embedding:
            self.embedding_scale = EmbeddingScale(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.opening, self.blocks, self.closing = config.build_stack(kernels)
        # A tied head is the embedding: no second name for the same weights.
        self.head = None if config.tied else Projection(config.dim, config.vocabulary, role="head")

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the initial weights."""
        config = self.config
        initialise(self, self.blocks, scheme=config.initialisation, topology=config.topology, dim=config.dim, seed=seed)

    def forward(
        self,
        tokens: Tensor,
        *,
        caches: Sequence[AttentionCache] | None = None,
        documents: Tensor | None = None,
        last_only: bool = False,
    ) -> TransformerOutput:
        """Return the logits of tokens [batch, tokens] (int64).

        `caches`, one a block, hold the past of a generation. `documents` [batch, tokens] numbers the documents of
        packed sequences, for `document_mask`. `last_only` closes and projects the last token alone. Raises UserError
        for documents together with caches: a cache does not record the documents of its past.
        """
        past = caches[0].tokens if caches else 0
        mask = self._document_mask(documents)
        if mask is not None and caches is not None:
            raise UserError("document_mask with a cache: generate one document at a time, without documents")
        positions = torch.arange(past, past + tokens.shape[1], device=self.embedding.weight.device)
        streams, losses = self._streams(tokens, positions, mask, caches)
        hidden = self.closing.select(streams, slice(-1, None)) if last_only else self.closing(streams)
        return TransformerOutput(self.logits(hidden), mean_losses(losses))

    def hidden(self, tokens: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return what `logits` reads, [batch, tokens, dim], of tokens [batch, tokens].

        For several sequences in one row, `positions` [batch, tokens] are those inside each of them, and `mask`
        [batch, tokens, tokens] is True where a token (row) may attend to another (column).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=self.embedding.weight.device)
        else:
            positions = positions[:, None]
        streams, _ = self._streams(tokens, positions, None if mask is None else mask[:, None], None)
        hidden: Tensor = self.closing(streams)
        return hidden

    def _streams(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, caches: Sequence[AttentionCache] | None
    ) -> tuple[Streams, list[Losses]]:
        """Return the streams after the last block, and the losses of the blocks."""
        streams = self.open(self.embedding(tokens))
        rotary = self.rotary(positions)
        losses: list[Losses] = []
        for index, block in enumerate(self.blocks):
            context = Context(rotary, mask, caches[index] if caches else None)
            streams, block_losses = block(streams, context)
            losses.append(block_losses)
        return streams, losses

    def open(self, embedding: Tensor) -> Streams:
        """Return the streams of an embedding [batch, tokens, dim], which a learned scale and dropout act on first."""
        streams: Streams = self.opening(self.dropout(self.embedding_scale(embedding)))
        return streams

    def rotary(self, positions: Tensor) -> Rotation | None:
        """Return cos and sin of positions [tokens], or [batch, 1, tokens] where rows differ; None without rotation."""
        config = self.config
        if config.positions == "none":
            return None
        return rotation(positions, config.dim // config.heads, config.rope_theta, self.embedding.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of what the closing returned, in at least fp32."""
        logits: Tensor = F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _document_mask(self, documents: Tensor | None) -> Tensor | None:
        """Return the mask [batch, 1, tokens, tokens] of the past in the same document, or None if not configured."""
        if not self.config.document_mask or documents is None:
            return None
        tokens = documents.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=documents.device).tril()
        return (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return tokens [batch, prompt + count], greedy at temperature 0, else sampled from softmax(logits / T).

        Runs without dropout and leaves the model in evaluation mode.
        """
        new = islice(self.continuation(tokens, temperature=temperature, generator=generator), count)
        return torch.cat((tokens, *new), dim=1)

    @torch.no_grad()
    def continuation(
        self, tokens: Tensor, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        """Yield one token after another, [batch, 1] each, without end; otherwise as `generate`."""
        self.eval()
        caches = [AttentionCache() for _ in self.blocks]
        while True:
            logits = self(tokens, caches=caches, last_only=True).logits[:, -1]
            if temperature > 0:
                tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                tokens = logits.argmax(-1, keepdim=True)
            yield tokens


class EmbeddingScale(DeclaredModule):
    """A learned scalar of initial value sqrt(d) on the embedding (DyT's recipe for language models)."""

    scale: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.declare("scale", (1,), initial=math.sqrt(dim))

    def forward(self, embedding: Tensor) -> Tensor:
        """Return the scaled embedding."""
        return embedding * self.scale


def build_language_model(
    size: str | LanguageModelConfig = "mini",
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    kernels: Kernels = "plain",
    **options: Any,
) -> LanguageModel:
    """Return an initialised language model of a named size, or of a configuration.

    `options` are those of `language_model_config`: topology, norm, and any field of `LanguageModelConfig`. `kernels`
    selects the kernels of boundaries and norms: see `ResidualSpec`. With `device="meta"` nothing is allocated and
    nothing drawn. Raises UserError for values from which no model can be built.
    """
    config = configured(size, language_model_config, options)
    return build_initialised(lambda: LanguageModel(config, kernels), seed, device)
