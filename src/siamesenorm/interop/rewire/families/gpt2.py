"""GPT-2: LayerNorms, one projection for queries, keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewire.anatomy import Anatomy, Reading, Slot, inside
from siamesenorm.interop.rewire.block import RewiredBlock
from siamesenorm.interop.rewire.hidden_states import close_hidden_states
from siamesenorm.topologies import Connection

PACKAGE = "transformers.models.gpt2.modeling_gpt2"


class GPT2Block(RewiredBlock):
    """A GPT-2 block without cross-attention."""

    attention_connection: Connection
    mlp_connection: Connection
    attn: nn.Module
    mlp: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        """Return the packed streams after both sublayers; raises UserError for encoder states."""
        if encoder_hidden_states is not None:
            raise UserError("encoder_hidden_states in a rewired GPT-2: it has no cross-attention, leave them out")

        def attend(h: Tensor) -> Tensor:
            output: Tensor = self.attn(
                h, past_key_values=past_key_values, attention_mask=attention_mask, use_cache=use_cache, **kwargs
            )[0]
            return output

        streams = self.attention_connection(self.enter(hidden_states), attend)
        return self.leave(self.mlp_connection(streams, self.transform))

    def transform(self, h: Tensor) -> Tensor:
        """Return the output of the MLP sublayer."""
        output: Tensor = self.mlp(h)
        return output


ANATOMY = Anatomy(
    rewired=GPT2Block,
    slots=(
        Slot(kind="attention", connection="attention_connection", norm="ln_1"),
        Slot(kind="mlp", connection="mlp_connection", norm="ln_2"),
    ),
    final_norm="ln_f",
    attention="attn",
    projections={"attention_output": "attn.c_proj", "mlp_up": "mlp.c_fc", "mlp_output": "mlp.c_proj"},
    check_backbone=inside(f"{PACKAGE}.GPT2Model", "GPT2Block"),
    adapt_backbone=close_hidden_states,
)


def read_block(block: nn.Module) -> Anatomy:
    """Return the anatomy; raises UserError for a block with cross-attention."""
    if hasattr(block, "crossattention"):
        raise UserError("GPT2Block with cross-attention has three sublayers: rewire knows attention and MLP")
    return ANATOMY


BLOCKS: dict[str, Reading] = {f"{PACKAGE}.GPT2Block": read_block}
