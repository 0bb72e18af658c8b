"""A Transformer block: attention and MLP with their connections; the unit of sharding, compilation, checkpointing."""

from __future__ import annotations

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
