"""The forms of blocks that `rewire` recognises by their modules, one line each, and diffusers' DiT."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewired_blocks import (
    BlockForm,
    BlockSpec,
    Branch,
    RewiredBlock,
    SublayerBlock,
    SublayerSpec,
    original_class,
)
from siamesenorm.topologies import Connection

Part = Callable[..., Tensor]

# --- forms: the paths of the modules of a block. `rewire` checks each against the outputs of the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The modules of a block by their paths: "a|b" is one of the two, "a?" may be absent, and None counts as absent.

    A connection replaces `attention_norm`, `cross_norm` and `mlp_norm`; the modules of a chain follow. Without one, the
    first module of the chain is a norm that stays, and there is no cross-attention. `joint` acts on the sum of parallel
    sublayers. `when` gives the values of attributes that the form needs, and `adding` the modules that add a residual
    to their output. `returns` is the number of outputs after the state. A block with `output_norms` and a `refusal` is
    no Pre-Norm block: starting from scratch drops these norms.
    """

    attention_norm: str
    attention: str
    cross_norm: str = ""
    cross: str = ""
    mlp_norm: str
    mlp: str
    joint: str = ""
    parallel: bool = False
    when: Mapping[str, Any] = field(default_factory=dict)
    returns: int = 0
    adding: str = ""
    output_norms: str = ""
    refusal: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths: norm and chain of attention, cross-attention and MLP, then those of the whole block."""
        parts = self.attention_norm, self.attention, self.cross_norm, self.cross, self.mlp_norm, self.mlp
        return (*parts, self.joint, self.output_norms)


def _sequential(attention_norm: str, attention: str, mlp_norm: str, mlp: str, **options: Any) -> Layout:
    return Layout(attention_norm=attention_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp, **options)


def _parallel(norm: str, attention: str, mlp: str, **options: Any) -> Layout:
    return Layout(attention_norm=norm, attention=attention, mlp_norm="", mlp=mlp, parallel=True, **options)


POST_NORM = "which are Post-Norm: a norm of the sum comes after each addition"
FORMS = (
    # Llama and most decoders; Granite has a multiplier, Phi-3 and StableLM dropout, mixtures of experts other names.
    _sequential(
        "input_layernorm", "self_attn resid_attn_dropout? residual_multiplier?",
        "post_attention_layernorm",
        "mlp|block_sparse_moe|feed_forward resid_mlp_dropout? dropout? residual_multiplier?",
    ),
    # Gemma 2 and 3, GLM-4: norms after the sublayers are part of them.
    _sequential(
        "input_layernorm", "self_attn post_attention_layernorm",
        "pre_feedforward_layernorm", "mlp post_feedforward_layernorm",
    ),
    _sequential(
        "input_layernorm", "self_attn post_self_attn_layernorm", "post_attention_layernorm", "mlp post_mlp_layernorm"
    ),
    # OLMo 2 and 3, Exaone 4.
    _sequential(
        "", "self_attn", "", "mlp", output_norms="post_attention_layernorm post_feedforward_layernorm",
        refusal="whose sublayers read the raw stream and normalise their output",
    ),
    # Phi, Cohere, StableLM: attention and MLP in parallel behind one norm.
    _parallel("input_layernorm", "self_attn resid_dropout?", "mlp resid_dropout? dropout?"),
    # GPT-2 and GPT-BigCode; GPT-J and CodeGen; OPT, and encoders and decoders of Whisper, mBART and Pegasus.
    _sequential("ln_1", "attn", "ln_2", "mlp"),
    _parallel("ln_1", "attn", "mlp", returns=1),
    _sequential(
        "", "self_attn dropout", "", "fc1 activation_fn fc2 dropout", when={"do_layer_norm_before": False},
        output_norms="self_attn_layer_norm final_layer_norm", refusal=POST_NORM,
    ),
    _sequential(
        "self_attn_layer_norm", "self_attn dropout",
        "final_layer_norm", "fc1 activation_fn activation_dropout? fc2 dropout",
        cross_norm="encoder_attn_layer_norm?", cross="encoder_attn? dropout",
    ),
    # T5: encoder and decoder.
    _sequential(
        "layer.0.layer_norm", "layer.0.SelfAttention layer.0.dropout",
        "layer.1.layer_norm", "layer.1.DenseReluDense layer.1.dropout", returns=2,
    ),
    _sequential(
        "layer.0.layer_norm", "layer.0.SelfAttention layer.0.dropout",
        "layer.2.layer_norm", "layer.2.DenseReluDense layer.2.dropout",
        cross_norm="layer.1.layer_norm", cross="layer.1.EncDecAttention layer.1.dropout", returns=2,
    ),
    # GPT-NeoX.
    _sequential(
        "input_layernorm", "attention post_attention_dropout", "post_attention_layernorm", "mlp post_mlp_dropout",
        when={"use_parallel_residual": False},
    ),
    _parallel(
        "", "input_layernorm attention post_attention_dropout", "post_attention_layernorm mlp post_mlp_dropout",
        when={"use_parallel_residual": True},
    ),
    # Falcon, three forms; BLOOM and MPT, whose modules add the residual.
    _sequential(
        "input_layernorm", "self_attention config.attention_dropout",
        "post_attention_layernorm", "mlp config.hidden_dropout", returns=1,
    ),
    _parallel("input_layernorm", "self_attention", "mlp", joint="config.hidden_dropout", returns=1),
    _parallel("", "ln_attn self_attention", "ln_mlp mlp", joint="config.hidden_dropout", returns=1),
    _sequential(
        "input_layernorm", "self_attention", "post_attention_layernorm", "mlp", adding="self_attention mlp",
        returns=1,
    ),
    _sequential("norm_1", "attn resid_attn_dropout", "norm_2", "ffn", adding="ffn", returns=1),
    # Encoders: CLIP and SigLIP, ViT and DeiT, DINOv2 and v3, RoBERTa-PreLayerNorm.
    _sequential("layer_norm1", "self_attn", "layer_norm2", "mlp"),
    _sequential("layernorm_before", "attention dropout", "layernorm_after", "mlp dropout"),
    _sequential("norm1", "attention layer_scale1 drop_path", "norm2", "mlp layer_scale2 drop_path"),
    _sequential(
        "attention.LayerNorm", "attention.self attention.output.dense attention.output.dropout",
        "intermediate.LayerNorm",
        "intermediate.dense intermediate.intermediate_act_fn output.dense output.dropout",
    ),
    # BERT and RoBERTa, DistilBERT, OPT-350m.
    _sequential(
        "", "attention.self attention.output.dense attention.output.dropout", "",
        "intermediate.dense intermediate.intermediate_act_fn output.dense output.dropout",
        output_norms="attention.output.LayerNorm output.LayerNorm", refusal=POST_NORM,
    ),
    _sequential("", "attention", "", "ffn", output_norms="sa_layer_norm output_layer_norm", refusal=POST_NORM),
    # ModernBERT, whose first attention reads the normalised embedding as it is.
    _sequential("attn_norm", "attn", "mlp_norm", "mlp"),
    # timm: LayerScale and drop-path belong to the sublayer. ViT and DeiT; EVA-02 and BEiT; CaiT.
    _sequential("norm1", "attn ls1 drop_path1", "norm2", "mlp ls2 drop_path2"),
    _sequential("norm1", "attn gamma_1? drop_path1", "norm2", "mlp gamma_2? drop_path2"),
    _sequential("norm1", "attn gamma_1 drop_path", "norm2", "mlp gamma_2 drop_path"),
)  # fmt: skip
MODEL_TYPES = (
    "bloom", "clip_text_model", "clip_vision_model", "codegen", "cohere", "cohere2", "deepseek_v3", "deit", "dinov2",
    "dinov3_vit", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "llama", "llama4_text",
    "mbart", "ministral", "mistral", "mixtral", "modernbert", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmoe",
    "opt", "pegasus", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "roberta-prelayernorm",
    "seed_oss", "siglip_text_model", "siglip_vision_model", "smollm3", "stablelm", "starcoder2", "t5", "vit", "whisper",
)  # fmt: skip
"""The families of transformers whose converted models load by the Auto classes without explicit registration."""
FINAL_NORMS = (
    "norm", "ln_f", "norm_f", "final_layer_norm", "final_layernorm", "final_norm", "layernorm", "layer_norm",
    "post_layernorm", "LayerNorm",
)  # fmt: skip
"""The names of the norm after the blocks."""
PROJECTIONS = {
    "query": ("q_proj", "q"), "key": ("k_proj", "k"), "value": ("v_proj", "v"),
    "attention_output": ("o_proj", "out_proj", "dense", "c_proj", "proj", "o"), "mlp_gate": ("gate_proj",),
    "mlp_up": ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "wi"),
    "mlp_output": ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "wo"),
}  # fmt: skip
ONE_TOKEN = ("CLIPVisionModel", "CLIPVisionTransformer", "Cait")
"""Models in which something else than a norm of every token follows the blocks: the last block closes the streams."""
NORM_FIRST = ("NanoChatModel",)
"""Models that normalise the embedding too with the norm after their blocks."""
OF_ONE_TOKEN = ("LayerScaleBlockClassAttn",)
"""Blocks that add to the class token alone (CaiT): no blocks of a stack."""
HEAD_NORMS = {"query": ("q_norm", "q_layernorm"), "key": ("k_norm", "k_layernorm")}


def recognise(block: nn.Module) -> BlockSpec | None:
    """Return the specification of a block whose modules are those of a known form, None for any other."""
    if type(block).__name__ == "BasicTransformerBlock":
        return _read_dit(block)
    if type(block).__name__ in OF_ONE_TOKEN:
        return None
    specs = (_match(form, block) for form in FORMS)
    return next((spec for spec in specs if spec is not None), None)


def _match(form: Layout, block: nn.Module) -> BlockSpec | None:
    """Return the specification of a block if it has the parts of a form, and no further ones with parameters."""
    try:
        found = [_find(block, paths) for paths in form.paths]
        if any(attrgetter(path)(block) != value for path, value in form.when.items()):
            return None
    except AttributeError:
        return None
    named = {path.partition(".")[0] for paths in found for path in paths}
    if any(name not in named and next(child.parameters(), None) is not None for name, child in block.named_children()):
        return None
    *parts, joint, output_norms = found
    kinds = ("attention", "cross_attention", "mlp")
    host: Any = original_class(type(block))
    arguments = tuple(inspect.signature(host.forward).parameters)[2:]
    sublayers = []
    for kind, norm, chain in zip(kinds, parts[::2], parts[1::2], strict=True):
        if chain and (norm or kind != "cross_attention"):
            kept = () if norm or output_norms or (form.parallel and form.attention_norm) else chain[:1]
            core = "" if kind == "mlp" else chain[len(kept)]
            branch = _branch(block, chain, core, form, arguments, CROSSING if kind == kinds[1] else RENAMED)
            name = "connection" if form.parallel else f"{kind}_connection"
            sublayers.append(
                SublayerSpec(kind=kind, connection=name, norm=next(iter(norm), None), kept=kept, branches=(branch,))  # type: ignore[arg-type]
            )
    if form.parallel:
        first, second = sublayers
        both = {"branches": first.branches + second.branches, "kept": first.kept + second.kept}
        sublayers = [replace(first, joint=joint, **both)]  # type: ignore[arg-type]
    cores = [branch.core for sublayer in sublayers for branch in sublayer.branches if branch.core]
    attention = block.get_submodule(cores[0])
    return BlockSpec(
        rewired=SublayerBlock,
        form=BlockForm(sublayers=tuple(sublayers), arguments=arguments, returns=form.returns),
        attention=cores[0],
        projections=_projections(block, cores, parts[5]),
        head_norms=tuple(role for role, names in HEAD_NORMS.items() if any(hasattr(attention, name) for name in names)),
        output_norms=output_norms,
        pre_norm_refusal=form.refusal,
    )


RENAMED = {"past_key_values": "layer_past", "mask": "attention_mask"}
"""Arguments of an attention, and the names that blocks have for them."""
CROSSING = {
    "key_value_states": "encoder_hidden_states", "mask": "encoder_attention_mask",
    "attention_mask": "encoder_attention_mask", "position_bias": "encoder_decoder_position_bias",
}  # fmt: skip
"""The same for a cross-attention."""


def _branch(
    block: nn.Module,
    chain: tuple[str, ...],
    core: str,
    form: Layout,
    arguments: tuple[str, ...],
    renamed: Mapping[str, str],
) -> Branch:
    """Return a chain of modules with the arguments of its core."""
    adding = tuple(path for path in chain if path in form.adding.split())
    if not core:
        return Branch(paths=chain, adding=adding)
    taken = inspect.signature(block.get_submodule(core).forward).parameters
    any_name = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    pairs = ((old, new) for new, old in renamed.items() if old in arguments and new in taken and old not in taken)
    return Branch(
        paths=chain,
        core=core,
        adding=adding,
        accepted=None if any_name else frozenset(taken),
        renamed=tuple(pairs),
    )


def _find(block: nn.Module, paths: str) -> tuple[str, ...]:
    """Return the paths that a block has among those of a form; raises AttributeError where it lacks one."""
    found = []
    for names in paths.split():
        present = [name for name in names.removesuffix("?").split("|") if _part(block, name) is not None]
        if not present and not names.endswith("?"):
            raise AttributeError(names)
        found += present[:1]
    return tuple(found)


def _part(block: nn.Module, path: str) -> Any:
    """Return what a block has at a path, None for nothing."""
    try:
        return attrgetter(path)(block)
    except AttributeError:
        return None


def _projections(block: nn.Module, cores: list[str], mlp: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the paths of the linear maps of a block by their roles, as far as each is one map of its own."""
    found: dict[str, tuple[str, ...]] = {}
    for role, names in PROJECTIONS.items():
        places = [("", *(f"{path}." for path in mlp))] if "mlp" in role else [(f"{core}.",) for core in cores]
        each = [[prefix + name for prefix in prefixes for name in names] for prefixes in places]
        maps = [next((path for path in paths if _part(block, f"{path}.weight") is not None), "") for paths in each]
        if all(maps):
            found[role] = tuple(maps)
    return found


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
    form=BlockForm(sublayers=(
        SublayerSpec(kind="attention", connection="attention_connection", kept=("norm1.norm",)),
        SublayerSpec(kind="mlp", connection="mlp_connection", kept=("norm3",)),
    )),
    keeps_final_norm=True,
    attention="attn1",
    projections={
        "query": ("attn1.to_q",), "key": ("attn1.to_k",), "value": ("attn1.to_v",),
        "attention_output": ("attn1.to_out.0",), "mlp_up": ("ff.net.0.proj",), "mlp_output": ("ff.net.2",),
    },
)  # fmt: skip


def _read_dit(block: nn.Module) -> BlockSpec:
    """Return the specification; raises UserError for one of the other blocks that diffusers' class implements."""
    extras = [name for name in ("attn2", "pos_embed", "fuser") if getattr(block, name, None) is not None]
    if block.norm_type != "ada_norm_zero" or extras:
        what = f"norm_type {block.norm_type}" + "".join(f" and {name}" for name in extras)
        if block.norm_type == "ada_norm_single" and extras == ["attn2"]:
            what += ", a cross-attention that reads the stream without a norm"
        raise UserError(f"BasicTransformerBlock with {what}: rewire supports that of DiT, with ada_norm_zero alone")
    return DIT
