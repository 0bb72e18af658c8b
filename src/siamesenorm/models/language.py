"""The language model: embedding, blocks, head; the residual path is the topology's.

* decoder-only, causal, rotary positions, no biases by default (OLMo)
* any topology, any norm; the attention norm is what the topology needs, else whole-width QK-norm
* untied head by default; logits in fp32 (fp64 for fp64 models)
* weights drawn by parameter name (`initialisation`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.models.block import TransformerBlock, add_losses
from siamesenorm.models.initialisation import initialise
from siamesenorm.models.language_config import LanguageModelConfig, language_model_config
from siamesenorm.norms import NORMS, DeclaredModule
from siamesenorm.sublayers.attention import Attention
from siamesenorm.sublayers.cache import AttentionCache
from siamesenorm.sublayers.mlp import build_mlp
from siamesenorm.sublayers.modulated import Losses
from siamesenorm.sublayers.projection import Projection
from siamesenorm.sublayers.rotary import Rotation, rotation
from siamesenorm.topologies import (
    Streams,
    transformer_places,
)


class LanguageModelOutput(NamedTuple):
    """Logits [batch, tokens, vocabulary] and the auxiliary losses of the sublayers, summed over blocks, by name."""

    logits: Tensor
    losses: Losses


class LanguageModel(nn.Module):
    """A decoder-only Transformer with any topology."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        spec, shape = config.residual_spec(), config.attention_shape
        places = transformer_places(config.depth)
        # Not nn.Embedding(...), whose own draw imports the compiler on the meta device: over a second.
        table = torch.empty(config.vocabulary, config.dim)
        self.embedding: nn.Embedding = nn.Embedding.from_pretrained(table, freeze=False)  # type: ignore[no-untyped-call]
        self.embedding_scale: nn.Module = EmbeddingScale(config.dim) if _scales_embedding(config) else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.opening = config.topology.opening(spec)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                Attention(shape),
                build_mlp(config.activation, config.dim, config.hidden, bias=config.bias),
                (
                    config.topology.connection(attention, spec),
                    config.topology.connection(mlp, spec),
                ),
                config.dropout,
            )
            for attention, mlp in places
        )
        self.closing = config.topology.closing(places[-1][-1], spec)
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
    ) -> LanguageModelOutput:
        """Return the logits of tokens [batch, tokens] (int64).

        `caches`, one a block, hold the past of a generation. `documents` [batch, tokens] numbers the documents of
        packed sequences, for `document_mask`. `last_only` closes and projects the last token alone. Raises UserError
        for documents together with caches: a cache does not know the documents of its past.
        """
        past = caches[0].tokens if caches else 0
        mask = self._document_mask(documents)
        if mask is not None and caches is not None:
            raise UserError("document_mask with a cache: generate one document at a time, without documents")
        streams = self.open(self.embedding(tokens))
        rotary = self._rotary(tokens.shape[1], past)
        losses: Losses = {}
        for index, block in enumerate(self.blocks):
            streams, block_losses = block(streams, rotary, mask, caches[index] if caches else None)
            losses = add_losses(losses, block_losses)
        if last_only:
            streams = tuple(stream[:, -1:] for stream in streams)
        return LanguageModelOutput(self.logits(self.closing(streams)), losses)

    def open(self, embedding: Tensor) -> Streams:
        """Return the streams of an embedding [batch, tokens, dim], which a learned scale and dropout act on first."""
        streams: Streams = self.opening(self.dropout(self.embedding_scale(embedding)))
        return streams

    def rotary(self, positions: Tensor) -> Rotation:
        """Return cos and sin of positions [tokens], or [batch, 1, tokens] where rows differ, for every block."""
        config = self.config
        return rotation(positions, config.dim // config.heads, config.rope_theta, self.embedding.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of what the closing returned, in at least fp32."""
        logits: Tensor = F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _rotary(self, tokens: int, past: int = 0) -> Rotation:
        return self.rotary(torch.arange(past, past + tokens, device=self.embedding.weight.device))

    def _document_mask(self, documents: Tensor | None) -> Tensor | None:
        """Return the mask [batch, 1, tokens, tokens] of the past in the same document, or None if not asked for."""
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


def _scales_embedding(config: LanguageModelConfig) -> bool:
    return NORMS[config.norm.name].scales_embedding


def build_language_model(
    size: str | LanguageModelConfig = "mini", *, seed: int = 0, device: str | torch.device = "cpu", **options: Any
) -> LanguageModel:
    """Return an initialised language model of a named size, or of a configuration.

    `options` are those of `language_model_config`: topology, norm, and any field of `LanguageModelConfig`. With
    `device="meta"` nothing is allocated and nothing drawn. Raises UserError for what cannot be built.
    """
    if isinstance(size, LanguageModelConfig) and options:
        raise UserError(f"a configuration and {', '.join(options)}: change the configuration by dataclasses.replace")
    config = size if isinstance(size, LanguageModelConfig) else language_model_config(size, **options)
    with torch.device("meta"):
        model = LanguageModel(config)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    model.reset_parameters(seed)
    return model
