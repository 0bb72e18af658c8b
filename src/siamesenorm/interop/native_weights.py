"""Weights of models of other libraries in this library's own models, and back: a table for each family.

    config = LanguageModelConfig(**foreign_fields(olmoe))  # Pre-Norm, as the other model
    model = build_language_model(config)
    load_foreign_weights(model, olmoe)
    olmoe.load_state_dict(foreign_state(model))

`rewire` gives such a model another topology.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError, unknown
from siamesenorm.models.diffusion import DiffusionTransformer, DiffusionTransformerConfig
from siamesenorm.models.language import LanguageModel, LanguageModelConfig
from siamesenorm.models.vision import VisionTransformer, VisionTransformerConfig
from siamesenorm.norms import NormSpec
from siamesenorm.topologies.pre_norm_family import LayerScale, PreNorm


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of the other library that holds some of ours, one after the other along `dim`; `shape` is its own shape.

    Without `shape` it is that of ours together.
    """

    foreign: str
    own: tuple[str, ...]
    dim: int = 0
    shape: tuple[int, ...] | None = None

    def join(self, weights: dict[str, Tensor]) -> Tensor:
        """Return the tensor of the other library that holds our weights."""
        joined = torch.cat([weights[name] for name in self.own], dim=self.dim)
        return joined if self.shape is None else joined.reshape(self.shape)

    def split(self, tensor: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return our weights, of the shapes of `like`, in a tensor of the other library."""
        sizes = [like[name].shape[self.dim] for name in self.own]
        shape = list(like[self.own[0]].shape)
        shape[self.dim] = sum(sizes)
        return dict(zip(self.own, torch.split(tensor.reshape(shape), sizes, dim=self.dim), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A class of models of another library, and its weights in a class of ours.

    `own` is our model's class; `fits` is whether a configuration has the family's form. `fields`
    returns the fields of our configuration that the function of a foreign model needs, and raises UserError where ours
    has not that function. `rows` are the weights of a model of a configuration, all of both.
    """

    own: type[nn.Module]
    fits: Callable[[Any], bool]
    fields: Callable[[Any], dict[str, Any]]
    rows: Callable[[Any], Iterator[Row]]


def foreign_fields(foreign: nn.Module) -> dict[str, Any]:
    """Return the fields of our configuration with the function of a model of another library.

    Raises UserError for a class without a table, and for options that our models do not have.
    """
    return _family_of(foreign).fields(foreign)


@torch.no_grad()
def load_foreign_weights(model: nn.Module, foreign: nn.Module) -> None:
    """Copy the weights of a model of another library into one of ours, which keeps its dtype and device.

    Raises UserError, with the model unchanged, for a class without a table, a configuration with another function, and
    weights that are missing, left over or of another shape.
    """
    family = _family_of(foreign)
    kind, config = type(foreign).__name__, getattr(model, "config", None)
    if not isinstance(model, family.own):
        raise UserError(f"a {type(model).__name__} cannot hold a {kind}: build a {family.own.__name__}")
    _require_fields(config, family.fields(foreign), kind)
    given, own = dict(foreign.state_dict()), dict(model.state_dict())
    found: dict[str, Tensor] = {}
    for row in family.rows(config):
        tensor, expected = given.pop(row.foreign, None), tuple(row.join(own).shape)
        if tensor is None or tuple(tensor.shape) != expected:
            has = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise UserError(f"{row.foreign} of the {kind} is {has}, and {expected} is needed: load another model")
        found |= row.split(tensor, own)
    if given:
        raise UserError(f"{next(iter(given))} of the {kind} has no place in our model: load another model")
    model.load_state_dict(found)


@torch.no_grad()
def foreign_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of one of our models as the state dict of the other library's; single tensors are not copied.

    Raises UserError for a model whose form no other library has.
    """
    config = getattr(model, "config", None)
    for family in FAMILIES.values():
        if isinstance(model, family.own) and family.fits(config):
            own = dict(model.state_dict())
            return {row.foreign: row.join(own) for row in family.rows(config)}
    raise UserError(f"no other library has a {type(model).__name__} of this form: write its weights with export")


def _family_of(foreign: nn.Module) -> Family:
    name = f"{type(foreign).__module__}.{type(foreign).__qualname__}"
    if name not in FAMILIES:
        raise unknown("model", name, FAMILIES)
    return FAMILIES[name]


def _require_fields(config: Any, fields: dict[str, Any], kind: str) -> None:
    """Raise UserError unless a configuration of ours has the function that these fields have."""
    has, needed = config.to_json(), dataclasses.replace(config, **fields).to_json()
    for name in fields:
        if has[name] != needed[name]:
            raise UserError(
                f"{name} of the {kind} is {needed[name]}, not {has[name]}: build the model of its foreign_fields"
            )


# --- OLMoE of transformers


def _olmoe_fields(foreign: Any) -> dict[str, Any]:
    config = foreign.config
    rotary = config.rope_parameters
    if config.hidden_act != "silu" or config.attention_bias or config.clip_qkv or rotary["rope_type"] != "default":
        raise UserError("an OLMoE with clip_qkv, biases, another activation or rotary scaling: our models have none")
    return {
        "depth": config.num_hidden_layers,
        "dim": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "hidden": config.intermediate_size,
        "topology": PreNorm(),
        "norm": NormSpec.parse(f"rmsnorm:eps={config.rms_norm_eps}"),
        "attention_norm": "qk",
        "vocabulary": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "positions": "rotary",
        "rope_theta": rotary["rope_theta"],
        "experts": config.num_experts,
        "active_experts": config.num_experts_per_tok,
        "renormalise_experts": config.norm_topk_prob,
    }


def _is_olmoe(config: LanguageModelConfig) -> bool:
    attention = config.attention_shape
    return (
        config.experts > 0
        and config.topology == PreNorm()
        and config.norm.name == "rmsnorm"
        and not dict(config.norm.options).get("offset")
        and (attention.attention_norm, attention.context_norm, config.positions) == ("qk", False, "rotary")
    )


def _olmoe_rows(config: LanguageModelConfig) -> Iterator[Row]:
    yield Row("model.embed_tokens.weight", ("embedding.weight",))
    yield Row("model.norm.weight", ("closing.norm.gain",))
    yield Row("lm_head.weight", ("embedding.weight" if config.tied else "head.weight",))
    for index in range(config.depth):
        there, here = f"model.layers.{index}.", f"blocks.{index}."
        for foreign, own in _OLMOE_BLOCK.items():
            yield Row(f"{there}{foreign}.weight", (f"{here}{own}",))
        yield Row(f"{there}mlp.experts.gate_up_proj", (f"{here}mlp.gate.weight", f"{here}mlp.up.weight"), dim=1)
        yield Row(f"{there}mlp.experts.down_proj", (f"{here}mlp.output.weight",))


_OLMOE_BLOCK = {
    "input_layernorm": "attention_connection.norm.gain",
    "self_attn.q_proj": "attention.query.weight",
    "self_attn.k_proj": "attention.key.weight",
    "self_attn.v_proj": "attention.value.weight",
    "self_attn.o_proj": "attention.output.weight",
    "self_attn.q_norm": "attention.query_norm.gain",
    "self_attn.k_norm": "attention.key_norm.gain",
    "post_attention_layernorm": "mlp_connection.norm.gain",
    "mlp.gate": "mlp.router.weight",
}

# --- DiT of diffusers


def _dit_fields(foreign: Any) -> dict[str, Any]:
    """Return the fields; a diffusers model has an embedding of its condition in every block, DiT's own code one."""
    config, blocks = foreign.config, foreign.transformer_blocks
    if config.activation_fn != "gelu-approximate" or not config.attention_bias or config.norm_elementwise_affine:
        raise UserError(
            "a DiT with another activation, without biases or with gains in its norms: our models have none"
        )
    if eps := {block.norm3.eps for block in blocks} - {DIT_EPS}:
        raise UserError(
            f"norm3 of its blocks has eps {eps.pop():g}, norm1 {DIT_EPS:g}: set norm3.eps to {DIT_EPS:g}, that of DiT"
        )
    embeddings = [block.norm1.emb.state_dict() for block in blocks]
    shared = all(torch.equal(each[name], first) for each in embeddings for name, first in embeddings[0].items())
    return {
        "depth": config.num_layers,
        "dim": config.num_attention_heads * config.attention_head_dim,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_attention_heads,
        "hidden": blocks[0].ff.net[0].proj.out_features,
        "topology": PreNorm(),
        "norm": NormSpec.parse(f"layernorm:eps={DIT_EPS}"),
        "attention_norm": "none",
        "activation": "gelu-tanh",
        "bias": True,
        "image_size": config.sample_size,
        "patch_size": config.patch_size,
        "channels": config.in_channels,
        "classes": config.num_embeds_ada_norm,
        "learned_sigma": foreign.out_channels == 2 * config.in_channels,
        "frequencies": "diffusers",
        "condition_embeddings": "shared" if shared else "per-block",
    }


def _is_dit(config: DiffusionTransformerConfig) -> bool:
    attention = config.attention_shape
    return (
        config.topology == PreNorm()
        and config.norm == NormSpec.parse(f"layernorm:eps={DIT_EPS}")
        and (attention.attention_norm, attention.context_norm, attention.kv_heads) == ("none", False, config.heads)
        and (config.activation, config.bias, config.frequencies) == ("gelu-tanh", True, "diffusers")
    )


def _dit_rows(config: DiffusionTransformerConfig) -> Iterator[Row]:
    size = (config.dim, config.channels, config.patch_size, config.patch_size)
    yield Row("pos_embed.proj.weight", ("patch.weight",), shape=size)
    yield Row("pos_embed.proj.bias", ("patch.bias",))
    for name in ("weight", "bias"):
        yield Row(f"proj_out_1.{name}", (f"final_norm.modulation.{name}",))
        yield Row(f"proj_out_2.{name}", (f"head.{name}",))
    for index in range(config.depth):
        there, here = f"transformer_blocks.{index}.", f"blocks.{index}."
        embedding = f"conditions.{index if config.condition_embeddings == 'per-block' else 0}."
        yield Row(f"{there}norm1.emb.class_embedder.embedding_table.weight", (f"{embedding}label.weight",))
        for name in ("weight", "bias"):
            modulations = tuple(f"{here}{part}.modulation.{name}" for part in ("attention", "mlp"))
            yield Row(f"{there}norm1.linear.{name}", modulations)
            for foreign, own in _DIT_EMBEDDING.items():
                yield Row(f"{there}norm1.emb.timestep_embedder.{foreign}.{name}", (f"{embedding}{own}.{name}",))
            for foreign, own in _DIT_BLOCK.items():
                yield Row(f"{there}{foreign}.{name}", (f"{here}{own}.{name}",))


DIT_EPS = 1e-6
_DIT_EMBEDDING = {"linear_1": "timestep_up", "linear_2": "timestep_output"}
_DIT_BLOCK = {
    "attn1.to_q": "attention.sublayer.query",
    "attn1.to_k": "attention.sublayer.key",
    "attn1.to_v": "attention.sublayer.value",
    "attn1.to_out.0": "attention.sublayer.output",
    "ff.net.0.proj": "mlp.sublayer.up",
    "ff.net.2": "mlp.sublayer.output",
}
# --- ViT and DeiT of timm


def _vit_fields(foreign: Any) -> dict[str, Any]:
    block, patches = foreign.blocks[0], foreign.patch_embed
    norm, activation = block.norm1, _TIMM_ACTIVATIONS.get(type(getattr(block.mlp, "act", None)).__name__)
    pooling = {"token": "token", "avg": "mean"}.get(foreign.global_pool)
    parts = {
        "class": type(block).__module__ == "timm.models.vision_transformer" and type(block).__name__ == "Block",
        "norm_layer": isinstance(norm, nn.LayerNorm) and norm.bias is not None,
        "act_layer": activation is not None,
        "global_pool": pooling is not None and foreign.has_class_token == (pooling == "token"),
        "fc_norm": isinstance(foreign.fc_norm, nn.Identity),
        "qkv_bias": (block.attn.qkv.bias is None) == (block.attn.proj.bias is None),
        "num_classes": foreign.num_classes > 0,
        "img_size": patches.img_size[0] == patches.img_size[1] and patches.patch_size[0] == patches.patch_size[1],
    }
    if strange := [name for name, is_ours in parts.items() if not is_ours]:
        raise UserError(
            f"{strange[0]} of the {type(foreign).__name__} is one that our models do not have: load another"
        )
    scaled = not isinstance(block.ls1, nn.Identity)
    return {
        "depth": len(foreign.blocks),
        "dim": foreign.embed_dim,
        "heads": block.attn.num_heads,
        "kv_heads": 0,
        "hidden": block.mlp.fc1.out_features,
        "topology": LayerScale() if scaled else PreNorm(),
        "norm": NormSpec("layernorm", (("eps", norm.eps),)),
        "attention_norm": "none" if isinstance(block.attn.q_norm, nn.Identity) else "qk-head",
        "activation": activation,
        "bias": block.attn.qkv.bias is not None,
        "image_size": patches.img_size[0],
        "patch_size": patches.patch_size[0],
        "channels": foreign.in_chans,
        "pooling": pooling,
        "token_position": pooling == "token" and not foreign.no_embed_class,
        "classes": foreign.num_classes,
        "distillation": hasattr(foreign, "head_dist"),
    }


_TIMM_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu-tanh"}


def _is_vit(config: VisionTransformerConfig) -> bool:
    attention = config.attention_shape
    return (
        (config.topology == PreNorm() or isinstance(config.topology, LayerScale))
        and config.norm.name == "layernorm"
        and config.norm.to_json()["bias"] is True
        and config.activation in ("gelu", "gelu-tanh")
        and attention.attention_norm in ("none", "qk-head")
        and not attention.context_norm
        and attention.kv_heads == attention.heads
    )


def _vit_rows(config: VisionTransformerConfig) -> Iterator[Row]:
    dim, size = config.dim, config.patch_size
    positions = config.patches + (config.tokens if config.token_position else 0)
    yield Row("patch_embed.proj.weight", ("patch.weight",), shape=(dim, config.channels, size, size))
    yield Row("patch_embed.proj.bias", ("patch.bias",))
    yield Row("pos_embed", ("position.weight",), shape=(1, positions, dim))
    for token, own in list({"cls_token": "token", "dist_token": "distillation_token"}.items())[: config.tokens]:
        yield Row(token, (f"{own}.weight",), shape=(1, 1, dim))
    yield from _both("norm", ("closing.norm",), weight="gain")
    for head, own in list({"head": "head", "head_dist": "distillation_head"}.items())[: 1 + config.distillation]:
        yield from _both(head, (own,))
    for index in range(config.depth):
        there, here = f"blocks.{index}.", f"blocks.{index}."
        for place, sublayer, outputs in ((1, "attention", "attn.proj"), (2, "mlp", "mlp.fc2")):
            yield from _both(f"{there}norm{place}", (f"{here}{sublayer}_connection.norm",), weight="gain")
            yield from _both(f"{there}{outputs}", (f"{here}{sublayer}.output",), bias=config.bias)
            if isinstance(config.topology, LayerScale):
                yield Row(f"{there}ls{place}.gamma", (f"{here}{sublayer}_connection.output.gain",))
        joined = tuple(f"{here}attention.{name}" for name in ("query", "key", "value"))
        yield from _both(f"{there}attn.qkv", joined, bias=config.bias)
        yield from _both(f"{there}mlp.fc1", (f"{here}mlp.up",), bias=config.bias)
        if config.attention_shape.attention_norm == "qk-head":
            for short, name in (("q", "query"), ("k", "key")):
                yield from _both(f"{there}attn.{short}_norm", (f"{here}attention.{name}_head_norm",), weight="gain")


def _both(foreign: str, own: tuple[str, ...], *, weight: str = "weight", bias: bool = True) -> Iterator[Row]:
    """Yield the rows of the weight and the bias of a module."""
    yield Row(f"{foreign}.weight", tuple(f"{name}.{weight}" for name in own))
    if bias:
        yield Row(f"{foreign}.bias", tuple(f"{name}.bias" for name in own))


# --- all families

TIMM_VIT = Family(own=VisionTransformer, fits=_is_vit, fields=_vit_fields, rows=_vit_rows)
FAMILIES: dict[str, Family] = {
    "transformers.models.olmoe.modeling_olmoe.OlmoeForCausalLM": Family(
        own=LanguageModel, fits=_is_olmoe, fields=_olmoe_fields, rows=_olmoe_rows
    ),
    "diffusers.models.transformers.dit_transformer_2d.DiTTransformer2DModel": Family(
        own=DiffusionTransformer, fits=_is_dit, fields=_dit_fields, rows=_dit_rows
    ),
    "timm.models.vision_transformer.VisionTransformer": TIMM_VIT,
    "timm.models.deit.VisionTransformerDistilled": TIMM_VIT,
}
"""By the full name of the foreign class."""
