"""The configuration of a language model: everything that determines its function, of a named size or field by field."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

import torch

from siamesenorm.errors import UserError, unknown
from siamesenorm.models.initialisation import SCHEMES, Initialisation
from siamesenorm.models.sizes import size_fields
from siamesenorm.norms import NormSpec
from siamesenorm.norms.registry import norm_options
from siamesenorm.sublayers.attention import ATTENTION_NORMS, AttentionShape
from siamesenorm.sublayers.mlp import Activation
from siamesenorm.topologies import (
    AttentionNorm,
    Kernels,
    ResidualSpec,
    Topology,
    build_topology,
    topology_from_json,
    topology_name,
    topology_to_json,
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
    computed: see `ResidualSpec`; a topology without fused kernels takes the plain formulas under "auto".
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

    def residual_spec(self) -> ResidualSpec:
        """Return what the topology builds from."""
        return ResidualSpec(
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
