"""The residual path of a model and its blocks: lists of sublayers with their connections; and what a model costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from siamesenorm.sublayers.cache import NO_CONTEXT, Context
from siamesenorm.sublayers.modulated import Losses
from siamesenorm.topologies import Closing, Connection, Opening, Place, ResidualSpec, Streams, Topology


class ResidualPath(NamedTuple):
    """The modules that a topology makes for a stack of blocks; `connections` of every block, in order."""

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
    name, that of its connection ends in `_connection`. Dropout acts on the output before the write, so that every
    stream drops the same elements.
    """

    def __init__(
        self, sublayers: Mapping[str, nn.Module], connections: Sequence[Connection], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.names = tuple(sublayers)
        for name, sublayer in sublayers.items():
            self.add_module(name, sublayer)
        for name, connection in zip(self.names, connections, strict=True):
            self.add_module(f"{name}_connection", connection)
        self.dropout = nn.Dropout(dropout)

    def forward(self, streams: Streams, context: Context = NO_CONTEXT) -> tuple[Streams, Losses]:
        """Return the streams after all sublayers, and the sums of their losses by name."""
        losses: Losses = {}
        for name in self.names:
            connection = getattr(self, f"{name}_connection")
            h, streams = connection.read(streams)
            output, found = split_losses(getattr(self, name)(h, context))
            streams = connection.write(streams, self.dropout(output))
            losses = add_losses(losses, found)
        return streams, losses


def split_losses(result: Tensor | tuple[Tensor, Losses]) -> tuple[Tensor, Losses]:
    """Return (output, losses) of a sublayer that returns a tensor, or a tensor and its losses."""
    return (result, {}) if isinstance(result, Tensor) else result


def add_losses(total: Losses, more: Losses) -> Losses:
    """Return the sums by name."""
    return {**total, **{name: total[name] + loss if name in total else loss for name, loss in more.items()}}


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (all parameters, those of embeddings and of a head that is tied to one), each counted once."""
    embedding = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    return sum(parameter.numel() for parameter in model.parameters()), sum(embedding.values())


@torch.no_grad()
def count_flops(model: nn.Module, *inputs: Tensor) -> int:
    """Return the floating-point operations of training a model with `.blocks`, on the meta device, on these inputs.

    Three times those of the forward pass: matrix products and attention, 2 for a multiply-add, as PyTorch counts them;
    causal attention counts in full. Norms and other element-wise work are not counted. Blocks made of the same modules
    are counted once and multiplied: the streams have the same shapes at every block.
    """
    from torch.utils.flop_counter import FlopCounterMode

    blocks = model.get_submodule("blocks")
    copies = Counter(map(_structure, blocks.children()))
    first = {_structure(block): block for block in reversed(list(blocks.children()))}
    model.blocks = nn.ModuleList(first.values())
    try:
        with FlopCounterMode(display=False) as counter:
            model(*inputs)
    finally:
        model.blocks = blocks
    counts = counter.get_flop_counts()
    forward: int = counter.get_total_flops()
    for index, structure in enumerate(first):
        block = sum(counts.get(f"{type(model).__name__}.blocks.{index}", {}).values())
        forward += (copies[structure] - 1) * block
    return 3 * forward


def _structure(block: nn.Module) -> tuple[object, ...]:
    """Return the modules and the shapes of the parameters of a block, which its matrix products follow from."""
    modules = ((name, type(module)) for name, module in block.named_modules())
    return (*modules, *((name, parameter.shape) for name, parameter in block.named_parameters()))
