"""What all Transformers have in common: the configuration of a stack of blocks, and methods as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import nn

from siamesenorm.errors import UserError, unknown
from siamesenorm.models.block import Block, build_drop_path, build_residual_path
from siamesenorm.models.initialisation import Initialisation
from siamesenorm.norms import NORMS, NormSpec, available_norms, norm_options
from siamesenorm.sublayers.attention import ATTENTION_NORMS, Attention, AttentionShape
from siamesenorm.sublayers.mlp import Activation, build_mlp
from siamesenorm.topologies import (
    AttentionNorm,
    Closing,
    Kernels,
    Opening,
    Place,
    ResidualSpec,
    Topology,
    build_topology,
    topology_from_json,
    topology_name,
    topology_to_json,
    transformer_places,
)

StreamDtype = Literal["inherit", "float32", "bfloat16", "float64"]
DTYPES: dict[str, torch.dtype | None] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "inherit": None,
}


INITIAL = "init-"
"""Before the name of an initialisation in the text of a method."""
Config = TypeVar("Config", bound="TransformerConfig")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Everything that determines the function and the initial weights of a stack of blocks, apart from the seed.

    "inherit" as a dtype keeps the embedding's. Where `compute_dtype` is not the parameters' dtype, run under autocast.
    Raises UserError for values from which no model can be built.
    """

    domain: ClassVar[Literal["language", "vision"]] = "language"
    """Domain of the recipes of norms; attention is causal in language."""
    usual_attention_norm: ClassVar[Literal["none", "qk"]] = "qk"
    """Norm inside the attention where neither the topology nor the configuration names one."""

    depth: int = 8
    """Number of blocks."""
    dim: int = 128
    """Width of the residual streams."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 0
    """Key and value heads; 0 is as many as heads."""
    hidden: int = 512
    """Width of the MLP."""
    topology: Topology = dataclasses.field(default_factory=lambda: build_topology("siamese"))
    """Residual topology, with options as in dhc-2:streams=4; `siamesenorm explain` lists them."""
    norm: NormSpec = NormSpec()
    """Norm operator, with options as in seednorm:heads=4; `siamesenorm explain` lists them."""
    attention_norm: AttentionNorm = "auto"
    """Norm inside the attention; auto is what the topology needs, else what is usual for the model."""
    context_norm: bool = False
    """Normalise the attention's output per head."""
    activation: Activation = "swiglu"
    """Kind of MLP."""
    bias: bool = False
    """Add biases to attention and MLP."""
    initialisation: Initialisation = "mitchell"
    """Distribution of the initial weights."""
    dropout: float = 0.0
    """Dropout on the embedding and on the output of every sublayer."""
    drop_path: float = 0.0
    """Stochastic depth: the rate of the last block, linear from 0 at the first."""
    residual_dtype: StreamDtype = "inherit"
    """Dtype of the residual streams; inherit is float32 in a run."""
    compute_dtype: StreamDtype = "inherit"
    """Dtype of the input of sublayers; inherit is the precision of a run."""

    def __post_init__(self) -> None:
        for name in ("depth", "dim", "hidden"):
            require_positive(self, name)
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise unknown(name, str(getattr(self, name)), get_args(hint))
        for name in ("dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: choose a number from 0 to below 1")
        self.attention_shape  # noqa: B018 - refuses widths and attention norms

    @property
    def attention_shape(self) -> AttentionShape:
        """Return the resolved attention; raises UserError when an explicit attention norm conflicts."""
        needed = self.topology.attention_norm
        if self.attention_norm == "auto":
            resolved = self.usual_attention_norm if needed == "auto" else needed
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
            causal=self.domain == "language",
        )

    def _attention_operator(self) -> NormSpec:
        """Return RMSNorm, or LayerNorm in a model of LayerNorms, with the eps of the model's operator."""
        operator = "layernorm" if self.norm.name == "layernorm" else "rmsnorm"
        shared = ("eps", "bias") if operator == "layernorm" else ("eps",)
        options = {key: value for key, value in self.norm.options if key in shared} if has_eps(self.norm) else {}
        return NormSpec.parse(operator, **options)

    @property
    def label(self) -> str:
        """A short name for tables: the topology, and attention norm, operator and initialisation unless usual."""
        parts = [topology_name(self.topology)]
        attention_norm = self.attention_shape.attention_norm
        needed = self.topology.attention_norm
        if attention_norm != (self.usual_attention_norm if needed == "auto" else needed):
            parts.append("qkv" if attention_norm == "qkv-head" else attention_norm)
        if self.context_norm:
            parts.append("context-norm")
        if self.norm != type(self).norm:
            parts.append(str(self.norm))
        if self.initialisation != type(self).initialisation:
            parts.append(f"{INITIAL}{self.initialisation}")
        return " + ".join(parts)

    def with_method(self, method: str) -> Self:
        """Return the configuration with the topology and the norms that a text such as "siamese + seednorm" names.

        An operator has the eps and the offset of this configuration's, unless the text sets them. Without an attention
        norm in the text it is "auto", without an operator or an initialisation this configuration's. Raises UserError.
        """
        fields = read_method(method)
        if "norm" in fields:
            fields["norm"] = inherited_operator(self.norm, fields["norm"])
        return dataclasses.replace(self, **{"attention_norm": "auto", **fields})

    def resolved(self, precision: StreamDtype = "float32") -> Self:
        """Return the configuration with automatic choices replaced by their values in a run."""
        return dataclasses.replace(
            self,
            attention_norm=self.attention_shape.attention_norm,
            kv_heads=self.kv_heads or self.heads,
            residual_dtype="float32" if self.residual_dtype == "inherit" else self.residual_dtype,
            compute_dtype=precision if self.compute_dtype == "inherit" else self.compute_dtype,
        )

    def build_stack(self, kernels: Kernels = "plain") -> tuple[Opening, nn.ModuleList, Closing]:
        """Return the opening, the blocks of attention and MLP, and the closing.

        Raises UserError for kernels that the topology does not have.
        """
        path = build_residual_path(self.topology, self.residual_spec(kernels), self.places())
        blocks = nn.ModuleList(
            Block(
                self.build_sublayers(kernels),
                connections,
                self.dropout,
                build_drop_path(self.drop_path, index, self.depth),
            )
            for index, connections in enumerate(path.connections)
        )
        return path.opening, blocks, path.closing

    def places(self) -> list[tuple[Place, ...]]:
        """Return the places of the sublayers of each block."""
        return transformer_places(self.depth)

    def build_sublayers(self, kernels: Kernels) -> dict[str, nn.Module]:
        """Return the sublayers of a block by name."""
        return {"attention": Attention(self.attention_shape, kernels), "mlp": self.build_mlp()}

    def build_mlp(self) -> nn.Module:
        """Return the MLP of a block."""
        return build_mlp(self.activation, self.dim, self.hidden, bias=self.bias)

    def residual_spec(self, kernels: Kernels = "plain") -> ResidualSpec:
        """Return the specification of the residual path; raises UserError for unknown kernels."""
        return ResidualSpec(
            dim=self.dim,
            norm=self.norm,
            domain=self.domain,
            residual_dtype=DTYPES[self.residual_dtype],
            compute_dtype=DTYPES[self.compute_dtype],
            kernels=kernels,
        )

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON values, the attention resolved."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "topology": topology_to_json(self.topology),
            "norm": self.norm.to_json(),
            "attention_norm": self.attention_shape.attention_norm,
            "kv_heads": self.kv_heads or self.heads,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Read a record of `to_json`; a missing field has its default. Raises UserError for an unknown field."""
        fields = dict(record)
        known = {field.name for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise unknown("field of a model", name, known)
        if "topology" in fields:
            fields["topology"] = topology_from_json(fields["topology"])
        if "norm" in fields:
            fields["norm"] = NormSpec.from_json(fields["norm"])
        return cls(**fields)


# --- methods as text


def read_method(text: str) -> dict[str, Any]:
    """Return the fields that a method sets: the topology, and what else the text names.

    A method is a topology, then a norm, an attention norm or an initialisation after plus signs: "siamese",
    "pre + qkv", "dhc-2:streams=4 + seednorm", "ln-scaling + init-normal". Raises UserError for an unknown name and for
    two of a kind.
    """
    topology, *others = (part.strip() for part in text.split("+"))
    fields: dict[str, Any] = {"topology": build_topology(topology)}
    for part in others:
        field: dict[str, Any]
        if part.partition(":")[0] in available_norms():
            field = {"norm": NormSpec.parse(part)}
        elif part in (*ATTENTION_NORMS, "qkv"):
            field = {"attention_norm": "qkv-head" if part == "qkv" else part}
        elif part.startswith(INITIAL) and part.removeprefix(INITIAL) in get_args(Initialisation):
            field = {"initialisation": part.removeprefix(INITIAL)}
        elif part == "context-norm":
            field = {"context_norm": True}
        else:
            initialisations = [f"{INITIAL}{name}" for name in get_args(Initialisation)]
            raise unknown("part of a method", part, [*available_norms(), *ATTENTION_NORMS, "qkv", *initialisations])
        if fields.keys() & field.keys():
            raise UserError(
                f"method {text!r} has two of a kind: write one norm, attention norm and initialisation at most"
            )
        fields |= field
    return fields


def has_eps(norm: NormSpec) -> bool:
    """Return whether an operator's eps is added to a mean square; ScaleNorm's is a least length."""
    return NORMS[norm.name].eps_in_mean_square


def inherited_operator(own: NormSpec, chosen: str | NormSpec) -> NormSpec:
    """Return the chosen operator with the eps and the offset of the model's own, unless it sets them itself."""
    spec = NormSpec.parse(chosen) if isinstance(chosen, str) else chosen
    named, known = dict(spec.options), norm_options(spec.name)
    shared = ("eps", "offset") if has_eps(own) and has_eps(spec) else ("offset",)
    inherited = {name: value for name, value in own.to_json().items() if name in shared}
    return spec.with_options(**{name: v for name, v in inherited.items() if name in known and name not in named})


def config_of_size(
    kind: type[Config],
    sizes: Mapping[str, Mapping[str, Any]],
    size: str,
    *,
    topology: str | Topology,
    norm: str | NormSpec | None,
    **overrides: Any,
) -> Config:
    """Return the configuration of a named size with a topology, a norm and overridden fields.

    A norm given as text has the eps and the offset of the size's. The attention norm is the size's unless the topology
    needs another one. Raises UserError for an unknown size, topology, norm, option or field.
    """
    if size not in sizes:
        raise unknown("size", size, sizes)
    fields = {**sizes[size], **overrides}
    known = {field.name for field in dataclasses.fields(kind)}
    for name in fields:
        if name not in known:
            raise unknown(f"field of a {kind.domain} model", name, known)
    usual = fields.pop("norm", NormSpec())
    fields["norm"] = inherited_operator(usual, norm) if isinstance(norm, str) else norm or usual
    built = build_topology(topology) if isinstance(topology, str) else topology
    if "attention_norm" not in overrides and built.attention_norm != "auto":
        fields["attention_norm"] = "auto"
    return kind(**fields, topology=built)


def configured(size: str | Config, of_size: Callable[..., Config], options: Mapping[str, Any]) -> Config:
    """Return a configuration as it is, or that of a named size; raises UserError for a configuration with options."""
    if isinstance(size, str):
        return of_size(size, **options)
    if options:
        raise UserError(f"a configuration and {', '.join(options)}: change the configuration by dataclasses.replace")
    return size


def require_positive(config: object, name: str) -> None:
    """Raise UserError unless a field is at least 1."""
    if getattr(config, name) < 1:
        raise UserError(f"{name} is {getattr(config, name)}: choose at least 1")
