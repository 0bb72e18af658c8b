"""Decoders with attention, then MLP, each behind an RMSNorm: Llama, Qwen3, Mistral, OLMo, OLMoE, and Gemma, OLMo 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from siamesenorm.interop.rewire.anatomy import Anatomy, Reading, Slot, inside
from siamesenorm.interop.rewire.block import RewiredBlock
from siamesenorm.interop.rewire.hidden_states import close_hidden_states
from siamesenorm.topologies import Connection

PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "mlp_gate": "mlp.gate_proj",
    "mlp_up": "mlp.up_proj",
    "mlp_output": "mlp.down_proj",
}


class DecoderBlock(RewiredBlock):
    """A decoder layer: attention behind one connection, MLP or mixture of experts behind another."""

    attention_connection: Connection
    mlp_connection: Connection
    self_attn: nn.Module
    mlp: nn.Module

    # Further arguments are the attention's, by name: their order is another in every family.
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the packed streams after both sublayers."""
        streams = self.attention_connection(self.enter(hidden_states), lambda h: self.attend(h, **kwargs))
        return self.leave(self.mlp_connection(streams, self.transform))

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


LLAMA = Anatomy(
    rewired=DecoderBlock,
    slots=(
        Slot(kind="attention", connection="attention_connection", norm="input_layernorm"),
        Slot(kind="mlp", connection="mlp_connection", norm="post_attention_layernorm"),
    ),
    projections=PROJECTIONS,
    adapt_backbone=close_hidden_states,
)
QK_NORMED = replace(LLAMA, head_norms=("query", "key"))
MIXTURE = replace(QK_NORMED, projections={role: path for role, path in PROJECTIONS.items() if "mlp" not in role})
GEMMA = replace(
    LLAMA,
    rewired=GemmaBlock,
    slots=(
        Slot(kind="attention", connection="attention_connection", norm="input_layernorm"),
        Slot(kind="mlp", connection="mlp_connection", norm="pre_feedforward_layernorm"),
    ),
)
OLMO2 = replace(
    QK_NORMED,
    slots=(
        Slot(kind="attention", connection="attention_connection"),
        Slot(kind="mlp", connection="mlp_connection"),
    ),
    output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    pre_norm_refusal="whose sublayers read the raw stream and normalise their output",
)


def _decoder(module: str, block: str, backbone: str, anatomy: Anatomy) -> dict[str, Reading]:
    """Return the entry of a family: its blocks, in the one backbone whose loop over them is known."""
    package = f"transformers.models.{module}.modeling_{module}"
    whole = replace(anatomy, check_backbone=inside(f"{package}.{backbone}", block))
    return {f"{package}.{block}": lambda found: whole}


BLOCKS: dict[str, Reading] = {
    **_decoder("llama", "LlamaDecoderLayer", "LlamaModel", LLAMA),
    **_decoder("mistral", "MistralDecoderLayer", "MistralModel", LLAMA),
    **_decoder("olmo", "OlmoDecoderLayer", "OlmoModel", LLAMA),
    **_decoder("qwen3", "Qwen3DecoderLayer", "Qwen3Model", QK_NORMED),
    **_decoder("olmoe", "OlmoeDecoderLayer", "OlmoeModel", MIXTURE),
    **_decoder("gemma2", "Gemma2DecoderLayer", "Gemma2Model", GEMMA),
    **_decoder("gemma3", "Gemma3DecoderLayer", "Gemma3TextModel", replace(GEMMA, head_norms=("query", "key"))),
    **_decoder("olmo2", "Olmo2DecoderLayer", "Olmo2Model", OLMO2),
}
