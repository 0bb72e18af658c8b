"""The residual path of a stack of blocks, and the block: sublayers with their connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from siamesenorm.norms import DeclaredModule
from siamesenorm.sublayers.sublayer import NO_CONTEXT, Context, Losses
from siamesenorm.topologies import Closing, Connection, Opening, Place, ResidualSpec, Streams, Topology


class ResidualPath(NamedTuple):
    """The modules of a topology for a stack of blocks; `connections` holds those of each block, in order."""

    opening: Opening
    connections: tuple[tuple[Connection, ...], ...]
    closing: Closing

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """All modules in the order of the forward pass."""
        return (self.opening, *(each for block in self.connections for each in block), self.closing)


def build_residual_path(topology: Topology, spec: ResidualSpec, places: Sequence[Sequence[Place]]) -> ResidualPath:
    """Return opening, connections and closing of a stack whose blocks have sublayers at `places`."""
    return ResidualPath(
        opening=topology.opening(spec),
        connections=tuple(tuple(topology.connection(place, spec) for place in block) for block in places),
        closing=topology.closing(places[-1][-1], spec),
    )


class Block(nn.Module):
    """A list of sublayers with their connections: the unit of sharding, compilation and checkpointing.

    A sublayer `sublayer(h, context)` returns a tensor, or a tensor and its scalar losses by name. Its attribute has its
    name, that of its connection ends in `_connection`. Dropout and stochastic depth act on the output before the write,
    so that every stream drops the same elements.
    """

    def __init__(
        self,
        sublayers: Mapping[str, nn.Module],
        connections: Sequence[Connection],
        dropout: float = 0.0,
        drop_path: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.names = tuple(sublayers)
        for name, sublayer in sublayers.items():
            self.add_module(name, sublayer)
        self.set_connections(connections)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = drop_path or nn.Identity()

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections of the sublayers, in order."""
        return tuple(getattr(self, f"{name}_connection") for name in self.names)

    def set_connections(self, connections: Sequence[Connection]) -> None:
        """Set the connections of the sublayers, in order."""
        for name, connection in zip(self.names, connections, strict=True):
            self.add_module(f"{name}_connection", connection)

    def forward(self, streams: Streams, context: Context = NO_CONTEXT) -> tuple[Streams, Losses]:
        """Return the streams after all sublayers, and the sums of their losses by name."""
        losses: Losses = {}
        for name, connection in zip(self.names, self.connections, strict=True):
            h, streams = connection.read(streams)
            output, found = split_losses(getattr(self, name)(h, context))
            streams = connection.write(streams, self.drop_path(self.dropout(output)))
            losses = add_losses(losses, found)
        return streams, losses


class DropPath(DeclaredModule):
    """Stochastic depth (arXiv 1603.09382): x * mask / (1 - rate), mask 0 with probability `rate` for each sample.

    Acts in training only, on x [batch, ...]. The rate is a buffer: blocks of different rates share a compiled graph.
    """

    keep: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.constant("keep", 1.0 - rate)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some samples 0, or x itself in evaluation."""
        if not self.training:
            return x
        drawn = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device)
        return x * ((drawn < self.keep) / self.keep).to(x.dtype)


def build_drop_path(rate: float, block: int, depth: int) -> nn.Module:
    """Return the stochastic depth of a block, whose rate is linear from 0 at the first block to `rate` at the last."""
    return DropPath(rate * block / max(1, depth - 1)) if rate else nn.Identity()


class TransformerOutput(NamedTuple):
    """Logits [batch, ..., classes] and the auxiliary losses of the sublayers, means over blocks, by name."""

    logits: Tensor
    losses: Losses


def split_losses(result: Tensor | tuple[Tensor, Losses]) -> tuple[Tensor, Losses]:
    """Return (output, losses) of a sublayer that returns a tensor, or a tensor and its losses."""
    return (result, {}) if isinstance(result, Tensor) else result


def add_losses(total: Losses, more: Losses) -> Losses:
    """Return the sums by name."""
    return {**total, **{name: total[name] + loss if name in total else loss for name, loss in more.items()}}


def mean_losses(blocks: Sequence[Losses]) -> Losses:
    """Return the means by name over the blocks that have a loss of that name."""
    total: Losses = {}
    for losses in blocks:
        total = add_losses(total, losses)
    return {name: loss / sum(name in losses for losses in blocks) for name, loss in total.items()}
