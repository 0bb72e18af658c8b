"""The language model: embedding, blocks, head; the residual path is the topology's.

* decoder-only, causal, rotary positions, no biases by default (OLMo)
* any topology, any norm; the attention norm is what the topology needs, else whole-width QK-norm
* untied head by default; logits in fp32 (fp64 for fp64 models)
* weights drawn by parameter name (`initialisation`)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError, unknown
from siamesenorm.models.block import TransformerBlock, add_losses
from siamesenorm.models.initialisation import SCHEMES, Initialisation, initialise
from siamesenorm.models.sizes import size_fields
from siamesenorm.norms import NORMS, Declared, NormSpec
from siamesenorm.norms.registry import norm_options
from siamesenorm.sublayers.attention import ATTENTION_NORMS, Attention, AttentionShape
from siamesenorm.sublayers.cache import AttentionCache
from siamesenorm.sublayers.mlp import Activation, build_mlp
from siamesenorm.sublayers.modulated import Losses
from siamesenorm.sublayers.projection import Projection
from siamesenorm.sublayers.rotary import Rotation, rotation
from siamesenorm.topologies import (
    AttentionNorm,
    Kernels,
    Materials,
    Streams,
    Topology,
    build_topology,
    topology_from_json,
    topology_name,
    topology_to_json,
    transformer_places,
)

DTYPES: dict[str, torch.dtype | None] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "inherit": None,
}


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Everything that determines a language model's function and its initial weights but the seed.

    `kv_heads` 0 means as many as `heads`. `attention_norm` "auto" is what the topology needs, else "qk".
    `residual_dtype` is the dtype of the streams, `compute_dtype` that of what sublayers see; "inherit" keeps the
    embedding's; where it is not the parameters' dtype, run under autocast. `document_mask` keeps attention inside a
    document; off, as in OLMo, packed documents see each other. `kernels` is how boundaries between sublayers are
    computed: see `Materials`; a topology without fused kernels takes the plain formulas under "auto".
    """

    depth: int = 8
    dim: int = 128
    heads: int = 4
    kv_heads: int = 0
    hidden: int = 512
    vocabulary: int = 257
    context: int = 256
    topology: Topology = dataclasses.field(default_factory=lambda: build_topology("siamese"))
    norm: NormSpec = NormSpec()
    attention_norm: AttentionNorm = "auto"
    context_norm: bool = False
    activation: Activation = "swiglu"
    bias: bool = False
    tied: bool = False
    rope_theta: float = 10_000.0
    initialisation: Initialisation = "mitchell"
    dropout: float = 0.0
    document_mask: bool = False
    residual_dtype: str = "inherit"
    compute_dtype: str = "inherit"
    kernels: Kernels = "plain"

    def __post_init__(self) -> None:
        """Refuse what cannot be built, naming the value and the remedy."""
        for name in ("depth", "dim", "hidden", "vocabulary", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least 1")
        for name, known in (("residual_dtype", DTYPES), ("compute_dtype", DTYPES), ("initialisation", SCHEMES)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.attention_norm not in ("auto", *ATTENTION_NORMS):
            raise unknown("attention norm", self.attention_norm, ("auto", *ATTENTION_NORMS))
        if self.kernels not in get_args(Kernels):
            raise unknown("kernels", self.kernels, get_args(Kernels))
        available = {"fused": self.topology.has_fused_kernels, "lean": self.topology.has_lean_kernels}
        if not available.get(self.kernels, True):
            raise UserError(
                f"topology {topology_name(self.topology)} has no {self.kernels} kernels: use kernels='plain'"
            )
        if not self.rope_theta > 0:
            raise UserError(f"rope_theta is {self.rope_theta}: choose a positive number, such as 10000")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}: choose a number from 0 to below 1")
        if self.attention_shape.head_dim % 2:
            raise UserError(f"a head is {self.attention_shape.head_dim} wide: rotary positions need an even width")

    @property
    def attention_shape(self) -> AttentionShape:
        """Return the resolved attention; raises UserError when an explicit attention norm conflicts."""
        needed = self.topology.attention_norm
        if self.attention_norm == "auto":
            resolved = "qk" if needed == "auto" else needed
        elif needed in ("auto", self.attention_norm):
            resolved = self.attention_norm
        else:
            raise UserError(
                f"topology {topology_name(self.topology)} needs attention norm {needed!r}, not "
                f"{self.attention_norm!r}: use 'auto'"
            )
        return AttentionShape(
            dim=self.dim,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            attention_norm=resolved,
            context_norm=self.context_norm,
            norm=self._attention_operator(),
            bias=self.bias,
        )

    def _attention_operator(self) -> NormSpec:
        """Return RMSNorm, or LayerNorm in a model of LayerNorms, with the eps of the model's operator."""
        shared = {"layernorm": ("eps", "bias")}.get(self.norm.name, ("eps",))
        operator = "layernorm" if self.norm.name == "layernorm" else "rmsnorm"
        return NormSpec.parse(operator, **{key: value for key, value in self.norm.options if key in shared})

    @property
    def label(self) -> str:
        """A short name for tables: the topology, and the attention norm and the operator where they are not usual."""
        parts = [topology_name(self.topology)]
        attention_norm = self.attention_shape.attention_norm
        if attention_norm != ("qk" if self.topology.attention_norm == "auto" else self.topology.attention_norm):
            parts.append("qkv" if attention_norm == "qkv-head" else attention_norm)
        if self.context_norm:
            parts.append("context-norm")
        if self.norm != NormSpec():
            parts.append(str(self.norm))
        return " + ".join(parts)

    def materials(self) -> Materials:
        """Return what the topology builds from."""
        return Materials(
            dim=self.dim,
            norm=self.norm,
            residual_dtype=DTYPES[self.residual_dtype],
            compute_dtype=DTYPES[self.compute_dtype],
            kernels=self.kernels,
        )

    def to_json(self) -> dict[str, Any]:
        """Return every field, resolved, as JSON values."""
        record: dict[str, Any] = {"family": "language"}
        for field in dataclasses.fields(self):
            record[field.name] = getattr(self, field.name)
        record["topology"] = topology_to_json(self.topology)
        record["norm"] = self.norm.to_json()
        record["attention_norm"] = self.attention_shape.attention_norm
        record["kv_heads"] = self.kv_heads or self.heads
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LanguageModelConfig:
        """Read what `to_json` wrote; raises UserError for a field that does not exist."""
        fields = {key: value for key, value in record.items() if key != "family"}
        known = {field.name for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise unknown("field of a language model", name, known)
        for name in known - fields.keys():
            raise UserError(f"the configuration of a language model has no {name}: restore the field")
        fields["topology"] = topology_from_json(fields["topology"])
        fields["norm"] = NormSpec.from_json(fields["norm"])
        return cls(**fields)


def language_model_config(
    size: str, *, topology: str | Topology = "siamese", norm: str | NormSpec | None = None, **overrides: Any
) -> LanguageModelConfig:
    """Return the configuration of a named size with a topology, a norm and overridden fields.

    Raises UserError for an unknown size, topology, norm, option or field.
    """
    fields = {**size_fields(size), **overrides}
    known = {field.name for field in dataclasses.fields(LanguageModelConfig)}
    for name in fields:
        if name not in known:
            raise unknown("field of a language model", name, known)
    fields["norm"] = _norm_of_size(NormSpec.parse(fields.pop("norm", "rmsnorm")), norm)
    fields["topology"] = build_topology(topology) if isinstance(topology, str) else topology
    return LanguageModelConfig(**fields)


def _norm_of_size(usual: NormSpec, chosen: str | NormSpec | None) -> NormSpec:
    """Return the chosen operator, with the size's eps unless it has an eps of its own; without a choice, the size's."""
    if chosen is None or isinstance(chosen, NormSpec):
        return chosen or usual
    spec = NormSpec.parse(chosen)
    eps = dict(usual.options).get("eps")
    inherits = eps is not None and "eps" in norm_options(spec.name) and "eps" not in dict(spec.options)
    return NormSpec.parse(chosen, eps=eps) if inherits and eps is not None else spec


class LanguageModelOutput(NamedTuple):
    """Logits [batch, tokens, vocabulary] and the auxiliary losses of the sublayers, summed over blocks, by name."""

    logits: Tensor
    losses: Losses


class LanguageModel(nn.Module):
    """A decoder-only Transformer with any topology."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        materials, shape = config.materials(), config.attention_shape
        places = transformer_places(config.depth)
        # Not nn.Embedding(...), whose own draw imports the compiler on the meta device: over a second.
        table = torch.empty(config.vocabulary, config.dim)
        self.embedding: nn.Embedding = nn.Embedding.from_pretrained(table, freeze=False)  # type: ignore[no-untyped-call]
        self.embedding_scale: nn.Module = EmbeddingScale(config.dim) if _scales_embedding(config) else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.opening = config.topology.opening(materials)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                Attention(shape),
                build_mlp(config.activation, config.dim, config.hidden, bias=config.bias),
                (
                    config.topology.connection(attention, materials),
                    config.topology.connection(mlp, materials),
                ),
                config.dropout,
            )
            for attention, mlp in places
        )
        self.closing = config.topology.closing(places[-1][-1], materials)
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


class EmbeddingScale(Declared):
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
