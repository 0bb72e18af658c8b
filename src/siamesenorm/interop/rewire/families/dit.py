"""The DiT of diffusers: AdaLN-Zero shifts, scales and gates each sublayer, whose own norm without gain stays in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewire.anatomy import Anatomy, Reading, Slot, qualified_name
from siamesenorm.interop.rewire.block import RewiredBlock
from siamesenorm.topologies import Connection

BACKBONE = "DiTTransformer2DModel"


class DiTBlock(RewiredBlock):
    """A DiT block: gate F(norm(h) (1 + scale) + shift) is what each connection writes."""

    attention_connection: Connection
    mlp_connection: Connection
    norm1: nn.Module
    attn1: nn.Module
    norm3: nn.Module
    ff: nn.Module
    _chunk_size: int | None
    _chunk_dim: int

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the packed streams after both sublayers; nothing of an encoder is read, as in the host."""
        h, streams = self.attention_connection.read(self.enter(hidden_states))
        h, gate, shift_mlp, scale_mlp, gate_mlp = self.norm1(h, timestep, class_labels, hidden_dtype=h.dtype)
        attended = self.attn1(h, attention_mask=attention_mask, **(cross_attention_kwargs or {}))
        streams = self.attention_connection.write(streams, gate.unsqueeze(1) * attended)
        h, streams = self.mlp_connection.read(streams)
        h = self.norm3(h) * (1 + scale_mlp.unsqueeze(1)) + shift_mlp.unsqueeze(1)
        return self.leave(self.mlp_connection.write(streams, gate_mlp.unsqueeze(1) * self.feed_forward(h)))

    def feed_forward(self, h: Tensor) -> Tensor:
        """Return the MLP's output, computed in chunks where `set_chunk_feed_forward` asked for them."""
        if self._chunk_size is None:
            output: Tensor = self.ff(h)
            return output
        parts = torch.split(h, self._chunk_size, self._chunk_dim)
        return torch.cat([self.ff(part) for part in parts], self._chunk_dim)


def check_backbone(backbone: nn.Module) -> None:
    """Raise UserError for another model than diffusers' DiT: what it does between blocks is not known."""
    if BACKBONE not in (kind.__name__ for kind in type(backbone).__mro__):
        raise UserError(
            f"DiT blocks in a {qualified_name(backbone)}: rewire knows them in a {BACKBONE}; load the model as one"
        )


ANATOMY = Anatomy(
    rewired=DiTBlock,
    slots=(
        Slot(kind="attention", connection="attention_connection", kept=("norm1.norm",)),
        Slot(kind="mlp", connection="mlp_connection", kept=("norm3",)),
    ),
    final_norm="norm_out",
    keeps_final_norm=True,
    domain="vision",
    attention="attn1",
    projections={
        "query": "attn1.to_q",
        "key": "attn1.to_k",
        "value": "attn1.to_v",
        "attention_output": "attn1.to_out.0",
        "mlp_up": "ff.net.0.proj",
        "mlp_output": "ff.net.2",
    },
    head_dim=lambda attention: attention.inner_dim // attention.heads,
    check_backbone=check_backbone,
)


def read_block(block: nn.Module) -> Anatomy:
    """Return the anatomy; raises UserError for one of the other blocks that diffusers' class stands for."""
    extras = [name for name in ("attn2", "pos_embed", "fuser") if getattr(block, name, None) is not None]
    if block.norm_type != "ada_norm_zero" or extras:
        what = f"norm_type {block.norm_type}" + "".join(f" and {name}" for name in extras)
        raise UserError(f"BasicTransformerBlock with {what}: rewire knows that of DiT, with ada_norm_zero alone")
    return ANATOMY


BLOCKS: dict[str, Reading] = {"diffusers.models.attention.BasicTransformerBlock": read_block}
