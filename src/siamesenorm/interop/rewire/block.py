"""What a rewired block and the end of its loop are made of.

A rewired block is the host's own block, whose class is exchanged for a subclass with another forward: its attention,
its MLP, their names, hooks and checkpointing stay. Blocks hand on one packed tensor [..., streams, dim], so that the
host's loop over its blocks runs as it was written.
"""

from __future__ import annotations

from torch import Tensor, nn

from siamesenorm.topologies import Closing, Opening, Streams, Topology


class RewiredBlock(nn.Module):
    """Mixed in before a host's block class; a family's subclass writes the forward around its connections.

    Connections are called with the sublayer as a function: by hooks on calls accelerate brings offloaded parameters in,
    a connection's own too, and it would move a module among the arguments as a whole.
    """

    topology: Topology
    opening: Opening | None
    """The first block opens the streams; the others receive them packed."""

    def enter(self, hidden: Tensor) -> Streams:
        """Return the streams of what the host's loop hands in: the embedding, or packed streams."""
        return self.topology.unpack(hidden) if self.opening is None else self.opening(hidden)

    def leave(self, streams: Streams) -> Tensor:
        """Return the streams packed for the host's loop."""
        return self.topology.pack(streams)


class RewiredClosing(nn.Module):
    """Stands where the host's final norm stood: closes packed streams [..., streams, dim] into [..., dim].

    `final_norm` is the host's own, where it stays: one whose gain depends on a condition.
    """

    def __init__(self, topology: Topology, closing: Closing, final_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.topology = topology
        self.closing = closing
        self.final_norm = nn.Identity() if final_norm is None else final_norm

    def forward(self, packed: Tensor) -> Tensor:
        """Return what the host's head sees."""
        closed: Tensor = self.final_norm(self.closing(self.topology.unpack(packed)))
        return closed
