"""Give a model another residual topology: find its blocks, exchange their residual path, carry its norms over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.foreign_norms import Unreadable, looks_like_norm, read_norm
from siamesenorm.interop.rewire.anatomy import Anatomy, Host, find_host
from siamesenorm.interop.rewire.attention_norms import (
    adds_qkv_norm,
    attention_operator,
    normalise_projections,
    refuse_fused_projections,
    scale_initial_weights,
)
from siamesenorm.interop.rewire.block import RewiredBlock, RewiredClosing, rewired_class
from siamesenorm.interop.rewire.families import FAMILIES
from siamesenorm.interop.rewire.native import rewire_native
from siamesenorm.interop.rewire.report import NormFate, RewireReport, describe_gain
from siamesenorm.interop.surgery import record_step
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import NORMS, Norm, NormFunction, NormSpec
from siamesenorm.topologies import (
    Connection,
    Materials,
    Place,
    Topology,
    build_topology,
    topology_from_json,
    topology_name,
    topology_to_json,
)


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

    New parameters are made: build the optimizer afterwards. Raises UserError, with the model untouched, for a structure
    that is not understood, a model that was rewired before, a norm shared between sublayers, and a topology that cannot
    keep the function.
    """
    if isinstance(model, LanguageModel):
        return rewire_native(model, topology, preserve=preserve, norm=norm)
    host = find_host(model, FAMILIES)
    wanted = build_topology(topology) if isinstance(topology, str) else topology
    resolved = resolve(wanted, host, preserve=preserve)
    old = read_norms(host)
    wiring = Wiring(
        topology=resolved,
        norm=new_norm(norm, old.first),
        attention_norm=attention_operator(old.first) if adds_qkv_norm(resolved, preserve=preserve) else None,
    )
    parts = Parts.build(host, wiring, old)
    differences = parts.become_pre_norm(old, wiring) if preserve else None
    fates = fates_of_norms(model, host, parts, preserve=preserve)
    install(host, parts, wiring)
    if not preserve:
        scale_initial_weights(host, resolved)
    record_step(model, wiring.to_json())
    return RewireReport(topology=resolved, blocks=host.name, norms=fates, differences=differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Everything beside the model itself that determines the structure of a rewired model."""

    topology: Topology
    norm: NormSpec
    attention_norm: NormSpec | None

    def to_json(self) -> dict[str, Any]:
        """Return what `replay` reads."""
        return {
            "operation": "rewire",
            "topology": topology_to_json(self.topology),
            "norm": self.norm.to_json(),
            "attention_norm": self.attention_norm and self.attention_norm.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Wiring:
        """Read what `to_json` wrote."""
        return cls(
            topology=topology_from_json(record["topology"]),
            norm=NormSpec.from_json(record["norm"]),
            attention_norm=record["attention_norm"] and NormSpec.from_json(record["attention_norm"]),
        )


def replay(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Repeat on a freshly built host the structural part of a rewiring, for weights to be loaded into."""
    host, wiring = find_host(model, FAMILIES), Wiring.from_json(record)
    install(host, Parts.build(host, wiring, read_norms(host)), wiring)


def resolve(topology: Topology, host: Host, *, preserve: bool) -> Topology:
    """Return the topology with the options that the host needs; raises UserError where the two do not compose."""
    anatomy, what = host.anatomy, type(host.blocks[0]).__name__
    if anatomy.parallel and topology.tells_sublayers_apart:
        raise UserError(
            f"{topology_name(topology)} has different connections for attention and MLP, but {what} computes the two "
            "in parallel: use siamese-post-pre, or another topology with one kind of connection"
        )
    if anatomy.keeps_final_norm and topology.modulation_refusal:
        raise UserError(f"{topology_name(topology)} on {what}: {topology.modulation_refusal}")
    if not preserve:
        refuse_fused_projections(host, topology)
        return topology
    if anatomy.pre_norm_refusal:
        raise UserError(
            f"{host.name} has blocks of class {what}, {anatomy.pre_norm_refusal}: no function-preserving "
            f"{topology_name(topology)} exists; use preserve=False to start from scratch"
        )
    return topology.preserving()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNorms:
    """The functions of a host's norms: one a connection, None where the sublayer keeps its own, and the final one.

    `first` is one that is there, which tells the width and the operator.
    """

    inputs: tuple[NormFunction | None, ...]
    final: NormFunction | None
    first: NormFunction


def read_norms(host: Host) -> HostNorms:
    """Return the functions of the norms on the residual path; raises UserError, naming the norm that has none."""
    anatomy = host.anatomy

    def read(owner: nn.Module, prefix: str, path: str) -> NormFunction:
        try:
            return read_norm(owner.get_submodule(path))
        except (Unreadable, AttributeError) as reason:
            raise UserError(f"{prefix}{path} is no norm that rewire understands: {reason}") from reason

    inputs, kept = [], []
    for index, block in enumerate(host.blocks):
        for slot in anatomy.slots:
            prefix = f"{host.name}.{index}."
            inputs.append(read(block, prefix, slot.norm) if slot.norm else None)
            kept.extend(read(block, prefix, path) for path in slot.kept if index == 0)
    backbone = host.name.rpartition(".")[0]
    final = read(host.backbone, f"{backbone}." if backbone else "", anatomy.final_norm)
    first = next((norm for norm in (*inputs, *kept) if norm is not None), final)
    return HostNorms(inputs=tuple(inputs), final=None if anatomy.keeps_final_norm else final, first=first)


def new_norm(chosen: str | NormSpec | None, host: NormFunction) -> NormSpec:
    """Return the operator of the new norms: the host's own, or the chosen one with what it inherits of the host's."""
    spec = NormSpec(host.statistic) if chosen is None else NormSpec.parse(chosen) if isinstance(chosen, str) else chosen
    inherited = {"eps": host.eps, "offset": host.offset if host.gain is not None else None}
    if chosen is None and host.gain is not None and host.bias is None:
        inherited["bias"] = False
    known, given = NORMS[spec.name].option_defaults(), dict(spec.options)
    return spec.with_options(**{k: v for k, v in inherited.items() if v is not None and k in known and k not in given})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The modules that a topology makes for a host: nothing is installed yet."""

    opening: nn.Module
    connections: tuple[tuple[Connection, ...], ...]
    closing: nn.Module

    @classmethod
    def build(cls, host: Host, wiring: Wiring, old: HostNorms) -> Parts:
        """Build the opening, the connections of every block, and the closing, where and as the host's weights are."""
        materials = Materials(
            dim=old.first.dim,
            norm=wiring.norm,
            domain=host.anatomy.domain,
            final_norm=not host.anatomy.keeps_final_norm,
        )
        topology, places = wiring.topology, places_of(host.anatomy, len(host.blocks))
        parts = cls(
            opening=topology.opening(materials),
            connections=tuple(tuple(topology.connection(place, materials) for place in block) for block in places),
            closing=topology.closing(places[-1][-1], materials),
        )
        for block, connections in zip(host.blocks, parts.connections, strict=True):
            for connection in connections:
                connection.to(**like(block))
        parts.opening.to(**like(host.blocks[0]))
        parts.closing.to(**like(host.blocks[-1]))
        return parts

    def become_pre_norm(self, old: HostNorms, wiring: Wiring) -> tuple[str, ...]:
        """Set the parts to where the rewired model computes what the host does; return what differs, each way once.

        Raises UserError where the operator itself differs.
        """
        self.opening.become_pre_norm()  # type: ignore[operator]
        connections = [connection for block in self.connections for connection in block]
        found: dict[str, None] = {}
        for part, norm in zip([*connections, self.closing], [*old.inputs, old.final], strict=True):
            found.update(dict.fromkeys(part.become_pre_norm(norm)))  # type: ignore[operator]
        if NORMS[wiring.norm.name].statistic not in _keepers(old.first.statistic):
            raise UserError(
                f"norm {wiring.norm} cannot keep the function of the host's {old.first.statistic}: leave norm out, or "
                "use preserve=False"
            )
        return tuple(found)


def _keepers(statistic: str) -> tuple[str, ...]:
    """Return the operators that contain one: at beta = 0 SeeDNorm is RMSNorm."""
    return (statistic, "seednorm") if statistic == "rmsnorm" else (statistic,)


def like(module: nn.Module) -> dict[str, Any]:
    """Return the device and floating dtype of a module's parameters."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return {"device": parameter.device, "dtype": parameter.dtype}
    return {"device": torch.get_default_device(), "dtype": torch.get_default_dtype()}


def places_of(anatomy: Anatomy, depth: int) -> list[tuple[Place, ...]]:
    """Return the places of every block's slots."""
    places: list[tuple[Place, ...]] = []
    previous: Place | None = None
    for block in range(depth):
        row: list[Place] = []
        for number, slot in enumerate(anatomy.slots):
            previous = Place(
                index=block * len(anatomy.slots) + number, block=block, slot=number, kind=slot.kind, depth=depth,
                previous=previous, normalises_input=bool(slot.kept),
            )  # fmt: skip
            row.append(previous)
        places.append(tuple(row))
    return places


def install(host: Host, parts: Parts, wiring: Wiring) -> None:
    """Exchange the residual path; from here on nothing can fail."""
    anatomy = host.anatomy
    if wiring.attention_norm:
        normalise_projections(host, wiring.attention_norm)
    for index, (block, connections) in enumerate(zip(host.blocks, parts.connections, strict=True)):
        mode = block.training
        block.__class__ = rewired_class(anatomy.rewired, type(block))
        assert isinstance(block, RewiredBlock)
        block.topology = wiring.topology
        block.opening = parts.opening if index == 0 else None  # type: ignore[assignment]
        for slot, connection in zip(anatomy.slots, connections, strict=True):
            setattr(block, slot.connection, connection)
            if slot.norm:
                delattr(block, slot.norm)
        for norm in anatomy.output_norms:
            delattr(block, norm)
        block.train(mode)
    final = getattr(host.backbone, anatomy.final_norm)
    closing = RewiredClosing(wiring.topology, parts.closing, final if anatomy.keeps_final_norm else None)  # type: ignore[arg-type]
    setattr(host.backbone, anatomy.final_norm, closing.train(final.training))
    if anatomy.adapt_backbone:
        anatomy.adapt_backbone(host.backbone)


def fates_of_norms(model: nn.Module, host: Host, parts: Parts, *, preserve: bool) -> tuple[NormFate, ...]:
    """Say of every norm of the host, and of every new one, what becomes of it."""
    anatomy, backbone = host.anatomy, host.name.rpartition(".")[0]
    final = f"{backbone}.{anatomy.final_norm}".lstrip(".")
    gain = "its gain and bias go to the last norm before the sublayer" if preserve else "replaced by fresh norms"
    outcomes: dict[str, tuple[str, str]] = {}
    for index in range(len(host.blocks)):
        for slot in anatomy.slots:
            if slot.norm:
                outcomes[f"{host.name}.{index}.{slot.norm}"] = ("moved" if preserve else "dropped", gain)
            for path in slot.kept:
                outcomes[f"{host.name}.{index}.{path}"] = ("kept", "the sublayer normalises its own input with it")
        for path in anatomy.output_norms:
            outcomes[f"{host.name}.{index}.{path}"] = ("dropped", "the topology decides where outputs are normalised")
    final_gain = "its gain and bias go to the last norm of the closing" if preserve else "replaced by fresh norms"
    outcomes[final] = ("kept", "after the closing") if anatomy.keeps_final_norm else ("moved", final_gain)
    fates = [
        NormFate(name=name, outcome=outcome, detail=detail)
        for name, module in model.named_modules()
        if looks_like_norm(module)
        for outcome, detail in [outcomes.get(name, ("kept", "not on the residual path"))]
    ]
    for index, connections in enumerate(parts.connections):
        for slot, connection in zip(anatomy.slots, connections, strict=True):
            fates.extend(_new_norms(f"{host.name}.{index}.{slot.connection}", connection))
    return (*fates, *_new_norms(f"{final}.closing", parts.closing))


def _new_norms(prefix: str, part: nn.Module) -> list[NormFate]:
    norms = [(name, module) for name, module in part.named_modules() if isinstance(module, Norm)]
    return [NormFate(name=f"{prefix}.{name}", outcome="new", detail=describe_gain(norm)) for name, norm in norms]
