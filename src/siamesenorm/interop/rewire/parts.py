"""The modules that a topology makes for a host, and their installation in the place of its residual path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from siamesenorm.interop.derived_class import derive
from siamesenorm.interop.rewire.anatomy import Anatomy, Host
from siamesenorm.interop.rewire.block import RewiredBlock, RewiredClosing
from siamesenorm.interop.rewire.host_norms import HostNorms
from siamesenorm.norms import Inexact, NormFunction, NormSpec
from siamesenorm.topologies import Closing, Connection, Opening, Place, ResidualSpec, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The opening, the connections of every block, and the closing: nothing is installed yet."""

    topology: Topology
    opening: Opening
    connections: tuple[tuple[Connection, ...], ...]
    closing: Closing

    @classmethod
    def build(cls, host: Host, topology: Topology, norm: NormSpec, old: HostNorms) -> Parts:
        """Build all parts where and as the host's weights are."""
        spec = ResidualSpec(
            dim=old.first.dim,
            norm=norm,
            domain=host.anatomy.domain,
            final_norm=not host.anatomy.keeps_final_norm,
        )
        places = places_of(host.anatomy, len(host.blocks))
        parts = cls(
            topology=topology,
            opening=topology.opening(spec),
            connections=tuple(tuple(topology.connection(place, spec) for place in block) for block in places),
            closing=topology.closing(places[-1][-1], spec),
        )
        norms = iter(old.inputs.values())
        for block, connections in zip(host.blocks, parts.connections, strict=True):
            for connection in connections:
                connection.to(**like(block, next(norms)))
        parts.opening.to(**like(host.blocks[0]))
        parts.closing.to(**like(host.blocks[-1], old.final))
        return parts

    def init_as_pre_norm(self, host: Host, old: HostNorms) -> dict[str, list[Inexact]]:
        """Set the parts to where the rewired model computes what the host does; return what differs at each norm."""
        self.opening.init_as_pre_norm()
        connections = [connection for block in self.connections for connection in block]
        found = {
            name: connection.init_as_pre_norm(norm)
            for connection, (name, norm) in zip(connections, old.inputs.items(), strict=True)
        }
        return {**found, host.final_norm: self.closing.init_as_pre_norm(old.final)}

    def install(self, host: Host) -> None:
        """Exchange the residual path of the host: nothing here can fail."""
        anatomy = host.anatomy
        for index, (block, connections) in enumerate(zip(host.blocks, self.connections, strict=True)):
            block.__class__ = derive(anatomy.rewired, type(block))
            assert isinstance(block, RewiredBlock)
            block.topology = self.topology
            block.opening = self.opening.train(block.training) if index == 0 else None
            for slot, connection in zip(anatomy.slots, connections, strict=True):
                setattr(block, slot.connection, connection.train(block.training))
                if slot.norm:
                    delattr(block, slot.norm)
            for norm in anatomy.output_norms:
                delattr(block, norm)
        final = host.backbone.get_submodule(anatomy.final_norm)
        closing = RewiredClosing(self.topology, self.closing, final if anatomy.keeps_final_norm else None)
        setattr(host.backbone, anatomy.final_norm, closing.train(final.training))
        if anatomy.adapt_backbone:
            anatomy.adapt_backbone(host.backbone)


def like(module: nn.Module, norm: NormFunction | None = None) -> dict[str, Any]:
    """Return the device and dtype of a norm's gain; without one those of a module's parameters, quantised ones apart.

    Norms may be wider than what they stand between: a gain in fp32 is not rounded to the bf16 of the projections.
    """
    gains = () if norm is None or norm.gain is None else (norm.gain,)
    for parameter in (*gains, *module.parameters()):
        if parameter.is_floating_point() and parameter.dtype.itemsize >= 2:
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
