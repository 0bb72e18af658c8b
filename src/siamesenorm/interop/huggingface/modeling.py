"""Native language models as models of transformers, which hold the native one: same modules, same names of parameters.

Position ids, padding and caches of transformers are translated for native blocks, streams and losses for its outputs. A
model computes in the dtype of its parameters, whatever the run computed in; its streams keep their `residual_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward
from transformers.utils.generic import can_return_tuple

from siamesenorm.errors import UserError
from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.native_models import compute_in
from siamesenorm.models.block import mean_losses
from siamesenorm.models.initialisation import initialise
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import DeclaredModule
from siamesenorm.sublayers.attention import rotation
from siamesenorm.sublayers.sublayer import Attend, Context, Losses, Projection, Rotation
from siamesenorm.topologies import Connection, Streams

StreamsOfBlock = dict[str, Tensor]
OTHERS = ("past_key_values", "hidden_states", "attentions", "streams")
"""Fields of the base model's output that those of a model with a head repeat."""


@dataclass
class ModelOutput(BaseModelOutputWithPast):
    """What blocks and closing give; `streams` has, for every block, the streams after it by name."""

    streams: tuple[StreamsOfBlock, ...] | None = None
    losses: Losses | None = None


@dataclass
class CausalLMOutput(CausalLMOutputWithPast):
    """Loss, logits, cache; `hidden_states` are closed states, `streams` the streams after every block by name."""

    streams: tuple[StreamsOfBlock, ...] | None = None


class SiameseNormPreTrainedModel(PreTrainedModel):
    """What all models share."""

    config_class = SiameseNormConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _input_embed_layer = "embedding"
    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?head\."]

    @torch.no_grad()
    def draw(self, part: nn.Module, blocks: nn.ModuleList) -> None:
        """Draw the weights of a part that no checkpoint gave, as the native model draws them."""
        parameters = dict(part.named_parameters())
        given = {name: one.clone() for name, one in parameters.items() if is_initialised(one)}
        if len(given) < len(parameters):
            native, seed = self.config.to_native(), self.config.seed
            # A seed of torch's, unless the configuration names one.
            seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
            scheme, topology = native.initialisation, native.topology
            initialise(part, blocks, scheme=scheme, topology=topology, dim=native.dim, seed=seed)
            for name, values in given.items():
                parameters[name].copy_(values)


class SiameseNormModel(SiameseNormPreTrainedModel):
    """The model without a head: `last_hidden_state` is the closed state, which a head reads."""

    embedding: nn.Embedding
    embedding_scale: nn.Module
    dropout: nn.Module
    opening: nn.Module
    blocks: nn.ModuleList
    closing: nn.Module

    def __init__(self, config: SiameseNormConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.hold(LanguageModel(config.to_native()))
        self.layers = nn.ModuleList(CheckpointedCall() for _ in self.blocks)
        self.post_init()

    def hold(self, native: LanguageModel) -> None:
        """Take the modules of a native model, which it shares from then on; the head is not among them."""
        self.native_config = native.config
        for name in ("embedding", "embedding_scale", "dropout", "opening", "blocks", "closing"):
            setattr(self, name, getattr(native, name))
        shape, config = native.config.attention_shape, cast(Any, self.config)
        for index, block in enumerate(self.blocks):  # what the attention functions of transformers read
            groups = shape.heads // shape.kv_heads
            options = {"config": config, "layer_idx": index, "num_key_value_groups": groups, "is_causal": True}
            vars(block.attention).update(options)
        self.rotary_emb = SiameseNormRotaryEmbedding(config) if native.config.positions == "rotary" else None
        self._compute_in_dtype_of_parameters()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Draw the weights once, for the whole model."""
        drawn = is_initialised(self)
        if drawn or module in (self, self.rotary_emb):  # besides, what was added to it since, and what copies it
            super()._initialize_weights(module, is_custom_code)
        if module is not self:
            return
        if not drawn:
            self.draw(self, self.blocks)
            mark_initialised(self)
        refill_constants(self)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_streams: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Return the closed state [batch, tokens, dim] of input_ids [batch, tokens], left or right padded.

        `output_hidden_states` adds the embedding and the closed state after every block, `output_streams` the streams
        after every block by name, `output_attentions` the weights [batch, heads, tokens, all tokens] of every block,
        which the implementation "eager" alone computes. Other options go to the attention function. Raises UserError
        for inputs that exclude each other.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("a model takes either input_ids or inputs_embeds: give one of them")
        embedding = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        # The places [tokens] of the new tokens in the cache, counted from the first token it holds.
        past = 0 if cache is None else cache.get_seq_length()
        steps = torch.arange(embedding.shape[1], device=embedding.device) + past
        rotary = None
        if self.rotary_emb is not None:
            rotary = self.rotary_emb(embedding, steps if position_ids is None else position_ids.unsqueeze(1))
        # Without a mask and a past, positions that start again are, as elsewhere in transformers, those of packed
        # documents: a cache that was made here has no past.
        mask: Any = create_causal_mask(self.config, embedding, _checked(attention_mask), past_key_values, position_ids)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states: tuple[Tensor, ...] | None = (embedding,) if wanted else None
        by_name: tuple[StreamsOfBlock, ...] | None = () if output_streams else None
        weights: list[Tensor] = []
        with_weights = self.config.output_attentions if output_attentions is None else output_attentions
        options |= {"position_ids": position_ids, "output_attentions": with_weights}
        attend = self._attention(weights, options)
        streams: Streams = self.opening(self.dropout(self.embedding_scale(embedding)))
        losses: list[Losses] = []
        for index, (layer, block) in enumerate(zip(cast(Any, self.layers), self.blocks, strict=True)):
            layer_cache = None if cache is None else LayerCache(cache, index)
            streams, more = layer.run(block, streams, Context(rotary, mask, layer_cache, attend=attend))
            losses.append(more)
            if hidden_states is None and by_name is None:
                continue
            names = self.native_config.topology.name_streams(len(streams))
            if len(names) != len(streams):
                raise UserError("fused kernels leave writes pending between blocks: record with kernels='plain'")
            if hidden_states is not None:
                hidden_states += (self.closing(streams),)
            if by_name is not None:
                by_name += (dict(zip(names, streams, strict=True)),)
        return ModelOutput(
            last_hidden_state=self.closing(streams) if hidden_states is None else hidden_states[-1],
            past_key_values=cache,
            hidden_states=hidden_states,
            attentions=tuple(weights) if with_weights else None,
            streams=by_name,
            losses=mean_losses(losses) or None,
        )

    def _cache(self, given: Cache | None, wanted: bool | None) -> Cache | None:
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if recomputes and given is not None:
            raise UserError("a cache under gradient checkpointing, which would fill it twice: leave out one of them")
        if recomputes:
            return None
        wanted = (self.config.use_cache and not self.training) if wanted is None else wanted
        return DynamicCache(config=self.config) if given is None and wanted else given

    def _attention(self, weights: list[Tensor], options: dict[str, Any]) -> Attend:
        """Return the attention of the implementation that the configuration names, which adds its weights if any."""
        implementation = self.config._attn_implementation
        function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)

        def attend(attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            scaling = query.shape[-1] ** -0.5
            output, found = function(attention, query, key, value, mask, scaling=scaling, dropout=0.0, **options)
            if found is not None:
                weights.append(found)
            attended: Tensor = output.transpose(1, 2)
            return attended

        return attend

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._compute_in_dtype_of_parameters()
        return self

    def _compute_in_dtype_of_parameters(self) -> None:
        compute_in(self, self.embedding.weight.dtype)


class SiameseNormForCausalLM(SiameseNormPreTrainedModel, GenerationMixin):
    """The language model; a native one is held as it is by `from_native`."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: SiameseNormConfig) -> None:
        super().__init__(config)
        self.model = SiameseNormModel(config)
        self.lm_head = Projection(config.dim, config.vocabulary, role="head")
        self.post_init()

    @classmethod
    def from_native(cls, native: LanguageModel, **options: Any) -> Self:
        """Return the model that holds the modules of `native`, no copies; `options` are those of `SiameseNormConfig`.

        The native model computes in the dtype of its parameters from then on.
        """
        with torch.device("meta"):  # where nothing is drawn
            held = cls(SiameseNormConfig.from_native(native.config, **options))
        held.model.hold(native)
        if native.head is not None:
            held.lm_head = native.head
        held.tie_weights()
        held.config.dtype = native.embedding.weight.dtype
        mark_initialised(held)
        held.train(native.training)
        return held

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Draw the head, by the native name."""
        if module is self.lm_head and not is_initialised(module):
            self.draw(nn.ModuleDict({"head": module}), self.model.blocks)
            mark_initialised(module)
        super()._initialize_weights(module, is_custom_code)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutput:
        """Return the logits [batch, tokens, vocabulary] of input_ids [batch, tokens], left or right padded.

        With `labels` (input_ids themselves: they are shifted here; -100 is left out), `loss` is their mean
        cross-entropy plus the weighted losses of the sublayers. `logits_to_keep` is the number of last tokens with
        logits, or their places. Other options are those of `SiameseNormModel`.
        """
        found = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **options
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **options)
            weights = self.model.native_config.loss_weights
            loss = loss + sum(weights.get(name, 1.0) * value for name, value in (found.losses or {}).items())
        return CausalLMOutput(loss=loss, logits=logits, **{name: found.get(name) for name in OTHERS})


class SiameseNormForSequenceClassification(GenericForSequenceClassification, SiameseNormPreTrainedModel):
    """The model with a linear head on the last token that is no padding."""


class SiameseNormForTokenClassification(GenericForTokenClassification, SiameseNormPreTrainedModel):
    """The model with a linear head on every token."""


# --- blocks, positions, padding and caches of transformers, as native blocks take them


class CheckpointedCall(GradientCheckpointingLayer):
    """A call of a block, which gradient checkpointing repeats in the backward pass."""

    def run(self, block: nn.Module, streams: Streams, context: Context) -> tuple[Streams, Losses]:
        """Return the streams after a block, and its losses."""
        if not torch.is_grad_enabled():  # nothing to repeat
            return call_block(block, streams, context)
        names: list[str] = []
        results = self(*streams, block=block, context=context, names=names)
        count = len(results) - len(names)
        return results[:count], dict(zip(names, results[count:], strict=True))

    def forward(self, *streams: Tensor, block: nn.Module, context: Context, names: list[str]) -> tuple[Tensor, ...]:
        """Return streams and losses, flat, since reentrant checkpointing sees gradients of arguments and results."""
        streams, losses = call_block(block, streams, context)
        names[:] = losses
        return *streams, *losses.values()


def call_block(block: nn.Module, streams: Streams, context: Context) -> tuple[Streams, Losses]:
    """Run a block, with the parameters of connections that accelerate keeps elsewhere."""
    # Its hooks run around `forward` alone, which a connection has in `read` and `write`.
    hooked = [each for each in block.children() if isinstance(each, Connection) and hasattr(each, "_hf_hook")]
    hooks: list[Any] = [each._hf_hook for each in hooked]
    for hook, module in zip(hooks, hooked, strict=True):
        hook.pre_forward(module)
    result: tuple[Streams, Losses] = block(streams, context)
    for hook, module in zip(hooks, hooked, strict=True):
        hook.post_forward(module, None)
    return result


class SiameseNormRotaryEmbedding(LlamaRotaryEmbedding):
    """The native rotation, or, where `rope_parameters` name another type than "default", that of transformers."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """Return cos and sin [..., tokens, head_dim] of positions [..., tokens], in at least fp32."""
        if self.rope_type == "default":
            config = cast(Any, self.config)
            return rotation(position_ids, config.dim // config.heads, config.rope_parameters["rope_theta"], x.dtype)
        cos, sin = super().forward(x.float(), position_ids)
        return cos, sin


class LayerCache:
    """The part of a cache of transformers that belongs to one block, as a `KeyValueCache`."""

    def __init__(self, cache: Cache, block: int) -> None:
        self.cache = cache
        self.block = block

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys (rotated) and values of new tokens; return those of all tokens."""
        both: tuple[Tensor, Tensor] = self.cache.update(keys, values, self.block)
        return both


def _checked(attention_mask: Any) -> Any:
    """Return the mask; raise UserError unless it is [batch, tokens], of four dimensions, or None."""
    if isinstance(attention_mask, Tensor) and attention_mask.dim() not in (2, 4):
        raise UserError(f"attention_mask has {attention_mask.dim()} dimensions: give [batch, tokens], 0 for padding")
    return attention_mask


# --- which modules have their weights


def mark_initialised(model: nn.Module) -> None:
    """Mark a model's modules, whose marks are copied with them, as having their weights: nothing is drawn again."""
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


def is_initialised(part: object) -> bool:
    """Return whether a module is marked, or a parameter, which is while weights are loaded."""
    return bool(getattr(part, "_is_hf_initialized", False))


def refill_constants(model: nn.Module) -> None:
    """Set the constants of a model, which no file holds, to their values."""
    for module in model.modules():
        if isinstance(module, DeclaredModule):
            module.refill_constants()
