"""Give a model another residual topology: find its blocks, exchange their residual path, carry its norms over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewire.anatomy import Host
from siamesenorm.interop.rewire.attention_norms import (
    adds_qkv_norm,
    attention_operator,
    normalise_projections,
    refuse_fused_projections,
    scale_initial_weights,
)
from siamesenorm.interop.rewire.families import FAMILIES
from siamesenorm.interop.rewire.host import find_host
from siamesenorm.interop.rewire.host_norms import new_norm, read_norms, refuse_other_functions
from siamesenorm.interop.rewire.native import refuse_native_inside, rewire_native
from siamesenorm.interop.rewire.parts import Parts
from siamesenorm.interop.rewire.report import RewireReport, fates_of_new_norms, fates_of_old_norms, norms_of
from siamesenorm.interop.surgery import record_step, refuse_unsavable
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import Topology, build_topology, topology_from_json, topology_name, topology_to_json


def rewire(
    model: nn.Module, topology: str | Topology = "siamese", *, preserve: bool = True, norm: str | NormSpec | None = None
) -> RewireReport:
    """Give `model`, in place, another residual topology ("siamese", "dhc-2:streams=4", ...), and return a report.

    Knows the blocks of Hugging Face's Llama, Qwen3, Mistral, Gemma 2 and 3, GPT-2, GPT-NeoX, OLMo, OLMoE and OLMo 2,
    timm's ViT and DeiT, and diffusers' DiT. Attention, MLP, cache, the names of their weights, checkpointing and hooks
    stay; blocks hand on the streams packed, [batch, tokens, streams, dim]. A `LanguageModel` of this library is
    rewired too, with its configuration, and packs nothing.

    `preserve=True` keeps the function: exactly where the topology allows it, else up to the eps of a norm of a norm
    (SiameseNorm with normalised input), as the report says; the attention is not touched. `preserve=False` leaves the
    new norms and gates at their initial values, adds the attention norm that the topology asks for, and multiplies
    weights by the factors that it declares for their initialisation (DeepNorm): that is for a model that was not
    trained. `norm` is the operator of the new norms; the host's own, with its eps, by default.

    New parameters are made: build the optimizer afterwards. A Hugging Face or diffusers model gets a class and a copy
    of its configuration that save it as what it is. Raises UserError, with the model untouched, for a structure that is
    not understood, a model that was rewired before, a norm shared between sublayers, and a topology that cannot keep
    the function.
    """
    if isinstance(model, LanguageModel):
        return rewire_native(model, topology, preserve=preserve, norm=norm)
    refuse_native_inside(model, "rewire")
    host = find_host(model, FAMILIES)
    refuse_unsavable(model, "rewire")
    wanted = build_topology(topology) if isinstance(topology, str) else topology
    resolved = resolve(wanted, host, preserve=preserve)
    old = read_norms(host)
    operator = new_norm(norm, old)
    parts = Parts.build(host, resolved, operator, old)
    differences = None
    if preserve:
        found = parts.init_as_pre_norm(host, old)
        refuse_other_functions(operator, found, chosen=norm)
        differences = tuple(dict.fromkeys(map(str, chain.from_iterable(found.values()))))
    attention_norm = attention_operator(old.first) if adds_qkv_norm(resolved, preserve=preserve) else None
    before = fates_of_old_norms(model, host, old, preserve=preserve)
    known = norms_of(model)
    # Nothing of the model was touched above, and nothing can fail below.
    wiring = Wiring(topology=resolved, norm=operator, attention_norm=attention_norm, preserve=preserve)
    wiring.install(host, parts)
    record_step(model, wiring.to_json())
    fates = (*before, *fates_of_new_norms(model, known.values(), preserve=preserve))
    return RewireReport(topology=resolved, blocks=host.name, norms=fates, differences=differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Everything beside the model itself that determines the structure of a rewired model."""

    topology: Topology
    norm: NormSpec
    attention_norm: NormSpec | None
    preserve: bool

    def to_json(self) -> dict[str, Any]:
        """Return what `replay` reads."""
        return {
            "operation": "rewire",
            "topology": topology_to_json(self.topology),
            "norm": self.norm.to_json(),
            "attention_norm": self.attention_norm and self.attention_norm.to_json(),
            "preserve": self.preserve,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Wiring:
        """Read what `to_json` wrote; raises UserError for anything else."""
        for name in ("topology", "norm", "attention_norm"):
            if not isinstance(record[name], Mapping) and not (name == "attention_norm" and record[name] is None):
                raise UserError(f"{name} in the record of rewire is {record[name]!r}: the configuration is damaged")
        return cls(
            topology=topology_from_json(record["topology"]),
            norm=NormSpec.from_json(record["norm"]),
            attention_norm=record["attention_norm"] and NormSpec.from_json(record["attention_norm"]),
            preserve=record["preserve"],
        )

    def install(self, host: Host, parts: Parts) -> None:
        """Put the parts in the place of the host's residual path, and norms into its attention.

        Unless a function is to be preserved, weights are multiplied by the topology's factors for their initialisation.
        """
        if not self.preserve:
            scale_initial_weights(host, self.topology)
        if self.attention_norm:
            normalise_projections(host, self.attention_norm)
        parts.install(host)


def replay(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Repeat a rewiring on a freshly built host, for weights to be loaded into, or to be trained from scratch."""
    host, wiring = find_host(model, FAMILIES), Wiring.from_json(record)
    wiring.install(host, Parts.build(host, wiring.topology, wiring.norm, read_norms(host)))


def resolve(topology: Topology, host: Host, *, preserve: bool) -> Topology:
    """Return the topology with the options that the host needs; raises UserError where the two do not compose."""
    anatomy, what = host.anatomy, type(host.blocks[0]).__name__
    if anatomy.parallel and topology.tells_sublayers_apart:
        raise UserError(
            f"{topology_name(topology)} has different connections for attention and MLP, but {what} ({host.name}) "
            "computes the two in parallel: use siamese-post-pre, or another topology with one kind of connection"
        )
    if anatomy.keeps_final_norm and topology.modulation_refusal:
        raise UserError(f"{topology_name(topology)} on {what}: {topology.modulation_refusal}")
    if not preserve:
        refuse_fused_projections(host, topology)
        return topology
    resolved = topology.preserving()
    if anatomy.pre_norm_refusal:
        raise UserError(
            f"{host.name} has blocks of class {what}, {anatomy.pre_norm_refusal}: no function-preserving "
            f"{topology_name(topology)} exists; use preserve=False to start from scratch"
        )
    if any(parameter.is_meta for parameter in host.backbone.parameters()):
        raise UserError(
            f"{host.name} is on the meta device, so that there is no function to preserve: load the weights first, or "
            "use preserve=False"
        )
    return resolved
