"""A Transformer block: attention and MLP with their connections; the unit of sharding, compilation, checkpointing."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from siamesenorm.sublayers.attention import Attention
from siamesenorm.sublayers.cache import KeyValueCache
from siamesenorm.sublayers.modulated import Losses
from siamesenorm.sublayers.rotary import Rotation
from siamesenorm.topologies import Connection, Streams


class TransformerBlock(nn.Module):
    """Streams in, streams out; a sublayer may return (output, losses), and the losses are passed out."""

    def __init__(
        self, attention: Attention, mlp: nn.Module, connections: tuple[Connection, Connection], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_connection, self.mlp_connection = connections
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        streams: Streams,
        rotary: Rotation | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Streams, Losses]:
        """Return the streams after both sublayers, and their scalar losses by name."""
        h, streams = self.attention_connection.read(streams)
        output, attention_losses = split_losses(self.attention(h, rotary, mask, cache))
        streams = self.attention_connection.write(streams, self.dropout(output))

        h, streams = self.mlp_connection.read(streams)
        output, mlp_losses = split_losses(self.mlp(h))
        streams = self.mlp_connection.write(streams, self.dropout(output))
        return streams, add_losses(attention_losses, mlp_losses)


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
