"""The families of blocks that `rewire` supports: decoders of transformers, timm's ViT and DeiT, and diffusers' DiT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewired_blocks import (
    BlockSpec,
    ClosedHiddenStates,
    RewiredBlock,
    SequentialBlock,
    SpecReader,
    SublayerSpec,
    two_sublayers,
)
from siamesenorm.norms.parameters import declared_parameters
from siamesenorm.topologies import Connection

Part = Callable[..., Tensor]

# --- attention, then MLP, each behind an RMSNorm


class DecoderBlock(SequentialBlock):
    """A decoder layer with an MLP or a mixture of experts."""

    attention_modules = ("self_attn",)
    mlp_modules = ("mlp",)


class GemmaBlock(SequentialBlock):
    """A decoder layer whose sublayers normalise what they return: those norms are part of the sublayer."""

    attention_modules = ("self_attn", "post_attention_layernorm")
    mlp_modules = ("mlp", "post_feedforward_layernorm")


def _package(module: str) -> str:
    return f"transformers.models.{module}.modeling_{module}"


PROJECTIONS = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "mlp_gate": "mlp.gate_proj", "mlp_up": "mlp.up_proj", "mlp_output": "mlp.down_proj",
}  # fmt: skip
LLAMA = BlockSpec(
    rewired=DecoderBlock,
    sublayers=two_sublayers("input_layernorm", "post_attention_layernorm"),
    projections=PROJECTIONS,
    backbone_mixin=ClosedHiddenStates,
)
QK_NORMED = replace(LLAMA, head_norms=("query", "key"))
MIXTURE = replace(QK_NORMED, projections={role: path for role, path in PROJECTIONS.items() if "mlp" not in role})
GEMMA = replace(LLAMA, rewired=GemmaBlock, sublayers=two_sublayers("input_layernorm", "pre_feedforward_layernorm"))
OLMO2 = replace(
    QK_NORMED,
    sublayers=two_sublayers(),
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    pre_norm_refusal="whose sublayers read the raw stream and normalise their output",
)


def _decoder(module: str, family: str, spec: BlockSpec, backbone: str = "") -> dict[str, SpecReader]:
    """Return the entry of a family: its blocks, in the one backbone whose loop over them is known."""
    whole = replace(spec, backbones=(f"{_package(module)}.{backbone or f'{family}Model'}",))
    return {f"{_package(module)}.{family}DecoderLayer": lambda block: whole}


# --- GPT-2: LayerNorms, one projection for queries, keys and values


class GPT2Block(SequentialBlock):
    """A GPT-2 block without cross-attention."""

    attention_modules = ("attn",)
    mlp_modules = ("mlp",)

    def _attend(
        self, h: Tensor, past_key_values: Any = None, attention_mask: Any = None, encoder: Any = None, **kwargs: Any
    ) -> Tensor:
        """Return the output of the attention sublayer; raises UserError for encoder states."""
        if encoder is not None or kwargs.pop("encoder_hidden_states", None) is not None:
            raise UserError("encoder_hidden_states in a rewired GPT-2: it has no cross-attention, leave them out")
        kwargs.pop("encoder_attention_mask", None)
        return super()._attend(h, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)


GPT2 = BlockSpec(
    rewired=GPT2Block,
    sublayers=two_sublayers("ln_1", "ln_2"),
    final_norm="ln_f",
    attention="attn",
    projections={"attention_output": "attn.c_proj", "mlp_up": "mlp.c_fc", "mlp_output": "mlp.c_proj"},
    backbones=(f"{_package('gpt2')}.GPT2Model",),
    backbone_mixin=ClosedHiddenStates,
)


def _read_gpt2(block: nn.Module) -> BlockSpec:
    if hasattr(block, "crossattention"):
        raise UserError("GPT2Block with cross-attention has three sublayers: rewire supports attention and MLP")
    return GPT2


# --- GPT-NeoX and Pythia: attention and MLP in parallel, both in one sublayer, or one after the other


class NeoXBlock(SequentialBlock):
    """Attention, then MLP, the form of `use_parallel_residual=False`."""

    attention_modules = ("attention", "post_attention_dropout")
    mlp_modules = ("mlp", "post_mlp_dropout")


class ParallelNeoXBlock(NeoXBlock):
    """Attention and MLP read the same state, each through its own norm: one connection, one sublayer."""

    connection: Connection
    input_layernorm: Part
    post_attention_layernorm: Part

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the packed streams after the sublayer MLP(N2(h)) + Attention(N1(h))."""

        def both(h: Tensor) -> Tensor:
            attention = self._attend(self.input_layernorm(h), *args, **kwargs)
            return self._transform(self.post_attention_layernorm(h)) + attention

        return self.leave(self.connection(self.enter(hidden_states), both))


SEQUENTIAL = BlockSpec(
    rewired=NeoXBlock,
    sublayers=two_sublayers("input_layernorm", "post_attention_layernorm"),
    final_norm="final_layer_norm",
    attention="attention",
    projections={
        "attention_output": "attention.dense",
        "mlp_up": "mlp.dense_h_to_4h",
        "mlp_output": "mlp.dense_4h_to_h",
    },
    backbones=(f"{_package('gpt_neox')}.GPTNeoXModel",),
    backbone_mixin=ClosedHiddenStates,
)
PARALLEL = replace(
    SEQUENTIAL,
    rewired=ParallelNeoXBlock,
    sublayers=(
        SublayerSpec(kind="attention", connection="connection", kept=("input_layernorm", "post_attention_layernorm")),
    ),
)


# --- timm's ViT and DeiT: LayerScale and drop-path belong to the sublayer and stay


class VisionBlock(SequentialBlock):
    """A ViT block: drop_path(LayerScale(sublayer(h))) is what each connection writes; arguments are masks."""

    attention_modules = ("attn", "ls1", "drop_path1")
    mlp_modules = ("mlp", "ls2", "drop_path2")


class ClosedIntermediates(nn.Module):
    """Mixed in before a Vision Transformer's class: its features have the channels of one stream."""

    def forward_intermediates(
        self, x: Tensor, indices: Any = None, return_prefix_tokens: bool = False, norm: bool = False, **options: Any
    ) -> Any:
        """Return timm's intermediates closed, `norm` or not: the sum of streams before their norms has no meaning."""
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
    """Raise UserError for a model that has no norm of each last token."""
    if isinstance(backbone.norm, nn.Identity):
        raise UserError("no norm: create the VisionTransformer with final_norm=True, fc_norm=False, no features_only")


VIT = BlockSpec(
    rewired=VisionBlock,
    sublayers=two_sublayers("norm1", "norm2"),
    domain="vision",
    attention="attn",
    projections={"attention_output": "attn.proj", "mlp_up": "mlp.fc1", "mlp_output": "mlp.fc2"},
    backbones=("timm.models.vision_transformer.VisionTransformer", "timm.models.deit.VisionTransformerDistilled"),
    check_backbone=_check_vit,
    backbone_mixin=ClosedIntermediates,
)

# --- diffusers' DiT: AdaLN-Zero shifts, scales and gates each sublayer, whose own norm without gain stays in it


class DiTBlock(RewiredBlock):
    """A DiT block: gate F(norm(h) (1 + scale) + shift) is what each connection writes."""

    attention_connection: Connection
    mlp_connection: Connection
    norm1: Callable[..., tuple[Tensor, ...]]
    attn1: Part
    norm3: Part
    ff: Part
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
        """Return the packed streams after both sublayers; inputs of an encoder are ignored, as in the host."""
        h, streams = self.attention_connection.read(self.enter(hidden_states))
        h, gate, shift_mlp, scale_mlp, gate_mlp = self.norm1(h, timestep, class_labels, hidden_dtype=h.dtype)
        attended = self.attn1(h, attention_mask=attention_mask, **(cross_attention_kwargs or {}))
        streams = self.attention_connection.write(streams, gate.unsqueeze(1) * attended)
        h, streams = self.mlp_connection.read(streams)
        h = self.norm3(h) * (1 + scale_mlp.unsqueeze(1)) + shift_mlp.unsqueeze(1)
        return self.leave(self.mlp_connection.write(streams, gate_mlp.unsqueeze(1) * self._transform(h)))

    def _transform(self, h: Tensor) -> Tensor:
        """Return the MLP's output, computed in the chunks that `set_chunk_feed_forward` sets."""
        if self._chunk_size is None:
            return self.ff(h)
        parts = torch.split(h, self._chunk_size, self._chunk_dim)
        return torch.cat([self.ff(part) for part in parts], self._chunk_dim)


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
        "query": "attn1.to_q", "key": "attn1.to_k", "value": "attn1.to_v", "attention_output": "attn1.to_out.0",
        "mlp_up": "ff.net.0.proj", "mlp_output": "ff.net.2",
    },
    head_dim=lambda attention: attention.inner_dim // attention.heads,
    backbones=("diffusers.models.transformers.dit_transformer_2d.DiTTransformer2DModel",),
)  # fmt: skip


def _read_dit(block: nn.Module) -> BlockSpec:
    """Return the specification; raises UserError for one of the other blocks that diffusers' class implements."""
    extras = [name for name in ("attn2", "pos_embed", "fuser") if getattr(block, name, None) is not None]
    if block.norm_type != "ada_norm_zero" or extras:
        what = f"norm_type {block.norm_type}" + "".join(f" and {name}" for name in extras)
        raise UserError(f"BasicTransformerBlock with {what}: rewire supports that of DiT, with ada_norm_zero alone")
    return DIT


FAMILIES: dict[str, SpecReader] = {
    **_decoder("llama", "Llama", LLAMA),
    **_decoder("mistral", "Mistral", LLAMA),
    **_decoder("olmo", "Olmo", LLAMA),
    **_decoder("qwen3", "Qwen3", QK_NORMED),
    **_decoder("olmoe", "Olmoe", MIXTURE),
    **_decoder("gemma2", "Gemma2", GEMMA),
    **_decoder("gemma3", "Gemma3", replace(GEMMA, head_norms=("query", "key")), backbone="Gemma3TextModel"),
    **_decoder("olmo2", "Olmo2", OLMO2),
    f"{_package('gpt2')}.GPT2Block": _read_gpt2,
    f"{_package('gpt_neox')}.GPTNeoXLayer": lambda block: PARALLEL if block.use_parallel_residual else SEQUENTIAL,
    "timm.models.vision_transformer.Block": lambda block: VIT,
    "diffusers.models.attention.BasicTransformerBlock": _read_dit,
}
"""By the full name of a block's class: a subclass may compute anything."""
