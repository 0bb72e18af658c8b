"""timm's ViT and DeiT, and the DiT of diffusers.

In timm, LayerScale and drop-path belong to the sublayer and stay. Where tokens are pooled before the last norm
(`fc_norm`), the model is refused: a closing of two streams normalises each token, and a norm of a mean is not a mean of
norms. In the DiT, AdaLN-Zero shifts, scales and gates each sublayer, whose own norm without gain stays in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.derived_class import derive
from siamesenorm.interop.hosts.blocks import (
    BlockSpec,
    RewiredBlock,
    SequentialBlock,
    SpecReader,
    SublayerSpec,
    qualified_name,
    two_sublayers,
)
from siamesenorm.norms.parameters import declared_parameters
from siamesenorm.topologies import Connection

# --- ViT and DeiT

VITS = ("timm.models.vision_transformer.VisionTransformer", "timm.models.deit.VisionTransformerDistilled")


class VisionBlock(SequentialBlock):
    """A ViT block: drop_path(LayerScale(sublayer(h))) is what each connection writes; arguments are masks."""

    attn: nn.Module
    ls1: nn.Module
    drop_path1: nn.Module
    mlp: nn.Module
    ls2: nn.Module
    drop_path2: nn.Module

    def attend(self, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the attention sublayer."""
        attended: Tensor = self.drop_path1(self.ls1(self.attn(h, *args, **kwargs)))
        return attended

    def transform(self, h: Tensor) -> Tensor:
        """Return the output of the MLP sublayer."""
        transformed: Tensor = self.drop_path2(self.ls2(self.mlp(h)))
        return transformed


class ClosedIntermediates(nn.Module):
    """Mixed in before a Vision Transformer's class: its features have the channels of one stream."""

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        **options: Any,
    ) -> Any:
        """Return timm's intermediates, closed: what the head would see after each block, whether `norm` is set or not.

        The streams have no other view with the channels of one: their sum before their norms has no meaning.
        """
        return super().forward_intermediates(x, indices, return_prefix_tokens, True, **options)  # type: ignore[misc]

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last index; the closing stays even under `prune_norm`, since features need it."""
        kept: list[int] = super().prune_intermediate_layers(indices, False, prune_head)  # type: ignore[misc]
        return kept

    def no_weight_decay(self) -> set[str]:
        """Return timm's names, and those of the new parameters that weight decay does not apply to."""
        ours = {name for name, _, declaration in declared_parameters(self) if not declaration.decay}
        theirs: set[str] = super().no_weight_decay()  # type: ignore[misc]
        return theirs | ours


def _check_vit(backbone: nn.Module) -> None:
    """Raise UserError for a model that is no VisionTransformer of timm, or has no norm of each last token."""
    name = qualified_name(backbone)
    if name not in VITS:
        raise UserError(f"timm blocks in a {name}: rewire supports them in {' and '.join(VITS)}")
    if isinstance(backbone.norm, nn.Identity):
        raise UserError(
            "norm of the VisionTransformer is an Identity: its tokens are pooled, or returned, before any last norm, "
            "so that no closing keeps the function; create it with final_norm=True, fc_norm=False, not as features_only"
        )


def _close_intermediates(backbone: nn.Module) -> None:
    """Give a backbone the class whose intermediate features are closed."""
    backbone.__class__ = derive(ClosedIntermediates, type(backbone))


VIT = BlockSpec(
    rewired=VisionBlock,
    sublayers=two_sublayers("norm1", "norm2"),
    domain="vision",
    attention="attn",
    projections={"attention_output": "attn.proj", "mlp_up": "mlp.fc1", "mlp_output": "mlp.fc2"},
    check_backbone=_check_vit,
    adapt_backbone=_close_intermediates,
)

# --- DiT

DIT_BACKBONE = "DiTTransformer2DModel"


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


def _check_dit(backbone: nn.Module) -> None:
    """Raise UserError for another model than diffusers' DiT: what it does between blocks is unknown."""
    if DIT_BACKBONE not in (kind.__name__ for kind in type(backbone).__mro__):
        raise UserError(
            f"DiT blocks in a {qualified_name(backbone)}: rewire supports them in a {DIT_BACKBONE}; load the model as "
            "one"
        )


DIT = BlockSpec(
    rewired=DiTBlock,
    sublayers=(
        SublayerSpec(kind="attention", connection="attention_connection", kept=("norm1.norm",)),
        SublayerSpec(kind="mlp", connection="mlp_connection", kept=("norm3",)),
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
    check_backbone=_check_dit,
)


def _read_dit(block: nn.Module) -> BlockSpec:
    """Return the specification; raises UserError for one of the other blocks that diffusers' class implements."""
    extras = [name for name in ("attn2", "pos_embed", "fuser") if getattr(block, name, None) is not None]
    if block.norm_type != "ada_norm_zero" or extras:
        what = f"norm_type {block.norm_type}" + "".join(f" and {name}" for name in extras)
        raise UserError(f"BasicTransformerBlock with {what}: rewire supports that of DiT, with ada_norm_zero alone")
    return DIT


BLOCKS: dict[str, SpecReader] = {
    "timm.models.vision_transformer.Block": lambda block: VIT,
    "diffusers.models.attention.BasicTransformerBlock": _read_dit,
}
