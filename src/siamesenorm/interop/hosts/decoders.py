"""Decoders of transformers: Llama, Qwen3, Mistral, OLMo, OLMoE, Gemma 2 and 3, OLMo 2, GPT-2, GPT-NeoX and Pythia."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.hosts.blocks import (
    BlockSpec,
    SequentialBlock,
    SpecReader,
    SublayerSpec,
    close_hidden_states,
    inside,
    two_sublayers,
)
from siamesenorm.topologies import Connection

# --- attention, then MLP, each behind an RMSNorm


class DecoderBlock(SequentialBlock):
    """A decoder layer with an MLP or a mixture of experts."""

    self_attn: nn.Module
    mlp: nn.Module

    def attend(self, h: Tensor, **kwargs: Any) -> Tensor:
        """Return the output of the attention sublayer."""
        output: Tensor = self.self_attn(h, **kwargs)[0]
        return output

    def transform(self, h: Tensor) -> Tensor:
        """Return the output of the MLP sublayer."""
        output: Tensor = self.mlp(h)
        return output


class GemmaBlock(DecoderBlock):
    """A decoder layer whose sublayers normalise what they return: those norms are part of the sublayer."""

    post_attention_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def attend(self, h: Tensor, **kwargs: Any) -> Tensor:
        """Return the norm of the attention's output."""
        normalised: Tensor = self.post_attention_layernorm(super().attend(h, **kwargs))
        return normalised

    def transform(self, h: Tensor) -> Tensor:
        """Return the norm of the MLP's output."""
        normalised: Tensor = self.post_feedforward_layernorm(super().transform(h))
        return normalised


PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "mlp_gate": "mlp.gate_proj",
    "mlp_up": "mlp.up_proj",
    "mlp_output": "mlp.down_proj",
}
LLAMA = BlockSpec(
    rewired=DecoderBlock,
    sublayers=two_sublayers("input_layernorm", "post_attention_layernorm"),
    projections=PROJECTIONS,
    adapt_backbone=close_hidden_states,
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


def _decoder(module: str, block: str, backbone: str, spec: BlockSpec) -> dict[str, SpecReader]:
    """Return the entry of a family: its blocks, in the one backbone whose loop over them is known."""
    package = f"transformers.models.{module}.modeling_{module}"
    whole = replace(spec, check_backbone=inside(f"{package}.{backbone}", block))
    return {f"{package}.{block}": lambda found: whole}


# --- GPT-2: LayerNorms, one projection for queries, keys and values


class GPT2Block(SequentialBlock):
    """A GPT-2 block without cross-attention."""

    attn: nn.Module
    mlp: nn.Module

    def attend(
        self,
        h: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        """Return the output of the attention sublayer; raises UserError for encoder states."""
        if encoder_hidden_states is not None:
            raise UserError("encoder_hidden_states in a rewired GPT-2: it has no cross-attention, leave them out")
        output: Tensor = self.attn(
            h, past_key_values=past_key_values, attention_mask=attention_mask, use_cache=use_cache, **kwargs
        )[0]
        return output

    def transform(self, h: Tensor) -> Tensor:
        """Return the output of the MLP sublayer."""
        output: Tensor = self.mlp(h)
        return output


GPT2_PACKAGE = "transformers.models.gpt2.modeling_gpt2"
GPT2 = BlockSpec(
    rewired=GPT2Block,
    sublayers=two_sublayers("ln_1", "ln_2"),
    final_norm="ln_f",
    attention="attn",
    projections={"attention_output": "attn.c_proj", "mlp_up": "mlp.c_fc", "mlp_output": "mlp.c_proj"},
    check_backbone=inside(f"{GPT2_PACKAGE}.GPT2Model", "GPT2Block"),
    adapt_backbone=close_hidden_states,
)


def _read_gpt2(block: nn.Module) -> BlockSpec:
    if hasattr(block, "crossattention"):
        raise UserError("GPT2Block with cross-attention has three sublayers: rewire supports attention and MLP")
    return GPT2


# --- GPT-NeoX and Pythia: attention and MLP in parallel, both in one sublayer, or one after the other


class NeoXBlock(SequentialBlock):
    """Attention, then MLP, the form of `use_parallel_residual=False`."""

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


class ParallelNeoXBlock(NeoXBlock):
    """Attention and MLP read the same state, each through its own norm: one connection, one sublayer."""

    connection: Connection
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the packed streams after the sublayer MLP(N2(h)) + Attention(N1(h))."""

        def both(h: Tensor) -> Tensor:
            attention = self.attend(self.input_layernorm(h), *args, **kwargs)
            return self.transform(self.post_attention_layernorm(h)) + attention

        return self.leave(self.connection(self.enter(hidden_states), both))


NEOX_PACKAGE = "transformers.models.gpt_neox.modeling_gpt_neox"
PARALLEL = BlockSpec(
    rewired=ParallelNeoXBlock,
    sublayers=(
        SublayerSpec(kind="attention", connection="connection", kept=("input_layernorm", "post_attention_layernorm")),
    ),
    final_norm="final_layer_norm",
    attention="attention",
    projections={
        "attention_output": "attention.dense",
        "mlp_up": "mlp.dense_h_to_4h",
        "mlp_output": "mlp.dense_4h_to_h",
    },
    check_backbone=inside(f"{NEOX_PACKAGE}.GPTNeoXModel", "GPTNeoXLayer"),
    adapt_backbone=close_hidden_states,
)
SEQUENTIAL = replace(
    PARALLEL, rewired=NeoXBlock, sublayers=two_sublayers("input_layernorm", "post_attention_layernorm")
)


def _read_neox(block: nn.Module) -> BlockSpec:
    return PARALLEL if block.use_parallel_residual else SEQUENTIAL


BLOCKS: dict[str, SpecReader] = {
    **_decoder("llama", "LlamaDecoderLayer", "LlamaModel", LLAMA),
    **_decoder("mistral", "MistralDecoderLayer", "MistralModel", LLAMA),
    **_decoder("olmo", "OlmoDecoderLayer", "OlmoModel", LLAMA),
    **_decoder("qwen3", "Qwen3DecoderLayer", "Qwen3Model", QK_NORMED),
    **_decoder("olmoe", "OlmoeDecoderLayer", "OlmoeModel", MIXTURE),
    **_decoder("gemma2", "Gemma2DecoderLayer", "Gemma2Model", GEMMA),
    **_decoder("gemma3", "Gemma3DecoderLayer", "Gemma3TextModel", replace(GEMMA, head_norms=("query", "key"))),
    **_decoder("olmo2", "Olmo2DecoderLayer", "Olmo2Model", OLMO2),
    f"{GPT2_PACKAGE}.GPT2Block": _read_gpt2,
    f"{NEOX_PACKAGE}.GPTNeoXLayer": _read_neox,
}
