"""GPT-NeoX and Pythia: attention and MLP in parallel, both in one sublayer, or one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from siamesenorm.interop.rewire.anatomy import Anatomy, Reading, Slot, inside
from siamesenorm.interop.rewire.block import RewiredBlock
from siamesenorm.interop.rewire.hidden_states import close_hidden_states
from siamesenorm.topologies import Connection

PACKAGE = "transformers.models.gpt_neox.modeling_gpt_neox"
PROJECTIONS = {
    "attention_output": "attention.dense",
    "mlp_up": "mlp.dense_h_to_4h",
    "mlp_output": "mlp.dense_4h_to_h",
}


class NeoXBlock(RewiredBlock):
    """A block with what both forms hold."""

    attention: nn.Module
    mlp: nn.Module
    post_attention_dropout: nn.Module
    post_mlp_dropout: nn.Module

    def attend(self, h: Tensor, **kwargs: Any) -> Tensor:
        """Return the attention's output after dropout."""
        dropped: Tensor = self.post_attention_dropout(self.attention(h, **kwargs)[0])
        return dropped

    def transform(self, h: Tensor) -> Tensor:
        """Return the MLP's output after dropout."""
        dropped: Tensor = self.post_mlp_dropout(self.mlp(h))
        return dropped


class ParallelBlock(NeoXBlock):
    """Attention and MLP read the same state, each through its own norm: one connection, one sublayer."""

    connection: Connection
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the packed streams after the sublayer MLP(N2(h)) + Attention(N1(h))."""

        def both(h: Tensor) -> Tensor:
            attention = self.attend(self.input_layernorm(h), **kwargs)
            return self.transform(self.post_attention_layernorm(h)) + attention

        return self.leave(self.connection(self.enter(hidden_states), both))


class SequentialBlock(NeoXBlock):
    """Attention, then MLP, as `use_parallel_residual=False` asks."""

    attention_connection: Connection
    mlp_connection: Connection

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the packed streams after both sublayers."""
        streams = self.attention_connection(self.enter(hidden_states), lambda h: self.attend(h, **kwargs))
        return self.leave(self.mlp_connection(streams, self.transform))


PARALLEL = Anatomy(
    rewired=ParallelBlock,
    slots=(Slot(kind="attention", connection="connection", kept=("input_layernorm", "post_attention_layernorm")),),
    final_norm="final_layer_norm",
    attention="attention",
    projections=PROJECTIONS,
    check_backbone=inside(f"{PACKAGE}.GPTNeoXModel", "GPTNeoXLayer"),
    adapt_backbone=close_hidden_states,
)
SEQUENTIAL = Anatomy(
    rewired=SequentialBlock,
    slots=(
        Slot(kind="attention", connection="attention_connection", norm="input_layernorm"),
        Slot(kind="mlp", connection="mlp_connection", norm="post_attention_layernorm"),
    ),
    final_norm="final_layer_norm",
    attention="attention",
    projections=PROJECTIONS,
    check_backbone=inside(f"{PACKAGE}.GPTNeoXModel", "GPTNeoXLayer"),
    adapt_backbone=close_hidden_states,
)


def read_block(block: nn.Module) -> Anatomy:
    """Return the anatomy of the block's form."""
    return PARALLEL if block.use_parallel_residual else SEQUENTIAL


BLOCKS: dict[str, Reading] = {f"{PACKAGE}.GPTNeoXLayer": read_block}
