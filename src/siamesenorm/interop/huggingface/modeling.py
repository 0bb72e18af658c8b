"""Native language models as models of transformers, which hold the native one: same modules, same names of parameters.

Position ids, padding and caches of transformers are translated for native blocks, streams and losses for its outputs. A
model computes in the dtype of its parameters, whatever the run computed in; its streams keep their `residual_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from siamesenorm.errors import UserError
from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.native_models import compute_in
from siamesenorm.models.block import mean_losses
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import DeclaredModule
from siamesenorm.sublayers.sublayer import Context, Losses
from siamesenorm.topologies import Streams

StreamsOfBlock = dict[str, Tensor]


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
    """What both models share: the native model, as `model`, and the loop over its blocks."""

    config_class = SiameseNormConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., Any]
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _input_embed_layer = "embedding"
    has_head: ClassVar[bool] = True

    def __init__(self, config: SiameseNormConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.to_native())
        if not self.has_head:
            self.model.head = None
        self._compute_in_dtype_of_parameters()
        self.post_init()  # type: ignore[no-untyped-call]

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head; None where it is the embedding, and where there is none."""
        head: nn.Module | None = self.model.head
        return head

    def set_output_embeddings(self, value: Any) -> None:
        """Exchange the head."""
        self.model.head = value

    @torch.no_grad()
    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Draw the weights that no checkpoint gave, as the native model draws them, once, for the whole model."""
        if is_initialised(self):  # what was added to it since, and what copies it
            super()._initialize_weights(module, is_custom_code)
        elif module is self:
            parameters = dict(self.model.named_parameters())
            given = {name: one.clone() for name, one in parameters.items() if is_initialised(one)}
            if len(given) < len(parameters):
                self.model.reset_parameters(self.config.seed)
                for name, values in given.items():
                    parameters[name].copy_(values)
            mark_initialised(self)
        if module is self:
            refill_constants(self)

    def run_blocks(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_streams: bool = False,
        **unknown: Any,
    ) -> tuple[Streams, Losses, dict[str, Any]]:
        """Return the streams after the last block, the losses of the sublayers, and the other fields of an output."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("a model takes either input_ids or inputs_embeds: give one of them")
        if unknown.get("output_attentions", self.config.output_attentions):
            raise UserError("attention weights are never computed (fused attention): leave out output_attentions")
        embedding = self.model.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        # The places [tokens] of the new tokens in the cache, counted from the first token it holds.
        past = 0 if cache is None else cache.get_seq_length()
        steps = torch.arange(embedding.shape[1], device=embedding.device) + past
        rotary = self.model.rotary(steps if position_ids is None else position_ids.unsqueeze(1))
        # Positions without a mask and a past are, as elsewhere in transformers, those of packed documents.
        packed = position_ids if attention_mask is None and past_key_values is None else None
        mask = attention_mask_for(steps, attention_mask, packed, cache)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states: tuple[Tensor, ...] | None = (embedding,) if wanted else None
        by_name: tuple[StreamsOfBlock, ...] | None = () if output_streams else None
        streams: Streams = self.model.open(embedding)
        losses: list[Losses] = []
        for index, block in enumerate(self.model.blocks):
            layer = None if cache is None else LayerCache(cache, index)
            streams, more = self._run_block(block, streams, Context(rotary, mask, layer))
            losses.append(more)
            if hidden_states is None and by_name is None:
                continue
            names = self.model.config.topology.name_streams(len(streams))
            if len(names) != len(streams):
                raise UserError("fused kernels leave writes pending between blocks: record with kernels='plain'")
            if hidden_states is not None:
                hidden_states += (self.model.closing(streams),)
            if by_name is not None:
                by_name += (dict(zip(names, streams, strict=True)),)
        return (
            streams,
            mean_losses(losses),
            {"past_key_values": cache, "hidden_states": hidden_states, "streams": by_name},
        )

    @property
    def _recomputes(self) -> bool:
        """Whether blocks are computed again in the backward pass that is to come."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def _cache(self, given: Cache | None, wanted: bool | None) -> Cache | None:
        if self._recomputes and given is not None:
            raise UserError("a cache under gradient checkpointing, which would fill it twice: leave out one of them")
        if self._recomputes:
            return None
        wanted = (self.config.use_cache and not self.training) if wanted is None else wanted
        return DynamicCache(config=self.config) if given is None and wanted else given

    def _run_block(self, block: nn.Module, streams: Streams, context: Context) -> tuple[Streams, Losses]:
        """Run a block, in the backward pass once more under gradient checkpointing."""
        if not self._recomputes:
            result: tuple[Streams, Losses] = block(streams, context)
            return result
        names: list[str] = []

        def flat(*streams: Tensor) -> tuple[Tensor, ...]:
            # Reentrant checkpointing sees gradients only of tensors that are arguments and results themselves.
            streams, losses = block(streams, context)
            names[:] = losses
            return *streams, *losses.values()

        results = self._gradient_checkpointing_func(flat, *streams)
        count = len(results) - len(names)
        return results[:count], dict(zip(names, results[count:], strict=True))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._compute_in_dtype_of_parameters()
        return self

    def _compute_in_dtype_of_parameters(self) -> None:
        compute_in(self.model, self.model.embedding.weight.dtype)


class SiameseNormModel(SiameseNormPreTrainedModel):
    """The model without its head: `last_hidden_state` is what the head would see."""

    has_head = False
    _keys_to_ignore_on_load_unexpected = [r"^model\.head\."]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **inputs: Any
    ) -> ModelOutput:
        """Return the closed state [batch, tokens, dim] of input_ids [batch, tokens], left or right padded.

        Other inputs are those of `SiameseNormForCausalLM`. `output_hidden_states` adds the embedding and the closed
        state after every block, `output_streams` the streams after every block by name.
        """
        streams, losses, others = self.run_blocks(input_ids, attention_mask, **inputs)
        return ModelOutput(last_hidden_state=self.model.closing(streams), losses=losses or None, **others)


class SiameseNormForCausalLM(SiameseNormPreTrainedModel, GenerationMixin):
    """The language model; a native one is held as it is by `from_native`."""

    @classmethod
    def from_native(cls, native: LanguageModel, **options: Any) -> Self:
        """Return the model that holds `native` itself, no copy; `options` are those of `SiameseNormConfig`.

        The native model computes in the dtype of its parameters from then on.
        """
        with torch.device("meta"):  # where nothing is drawn
            held = cls(SiameseNormConfig.from_native(native.config, **options))
        held.model = native
        held.config.dtype = native.embedding.weight.dtype
        mark_initialised(held)
        held._compute_in_dtype_of_parameters()
        held.train(native.training)
        return held

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
        output_hidden_states: bool | None = None,
        output_streams: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Return the logits [batch, tokens, vocabulary] of input_ids [batch, tokens], left or right padded.

        With `labels` (input_ids themselves: they are shifted here; -100 is left out), `loss` is their mean
        cross-entropy plus the weighted losses of the sublayers. `logits_to_keep` is the number of last tokens with
        logits, or their places; `output_hidden_states` and `output_streams` are those of `SiameseNormModel`.
        """
        streams, losses, others = self.run_blocks(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_hidden_states,
            output_streams, **kwargs,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(self.model.closing(tuple(stream[:, kept] for stream in streams)))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
            weights = self.model.config.loss_weights
            loss = loss + sum(weights.get(name, 1.0) * value for name, value in losses.items())
        return CausalLMOutput(loss=loss, logits=logits, **others)


# --- padding, packing and caches of transformers, as native attention takes them


class LayerCache:
    """The part of a cache of transformers that belongs to one block, as a `KeyValueCache`."""

    def __init__(self, cache: Cache, block: int) -> None:
        self.cache = cache
        self.block = block

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys (rotated) and values of new tokens; return those of all tokens."""
        both: tuple[Tensor, Tensor] = self.cache.update(keys, values, self.block)
        return both


def attention_mask_for(
    steps: Tensor, attention_mask: Tensor | None, packed_positions: Tensor | None, cache: Cache | None
) -> Tensor | None:
    """Return the boolean mask [batch or 1, 1, tokens, all tokens], or None for plain causal attention.

    `attention_mask` [batch, all tokens] is 0 for padding; one of four dimensions is used unchanged.
    `packed_positions` [batch or 1, tokens] start again with every document of a packed sequence. A padding token has
    itself as its key, since a row without any has no softmax. Raises UserError for a mask of other dimensions.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UserError(f"attention_mask has {attention_mask.dim()} dimensions: give [batch, tokens], 0 for padding")
    new = len(steps)
    total = new if cache is None else cache.get_mask_sizes(new, 0)[0]
    if attention_mask is not None and not torch.compiler.is_compiling() and bool(attention_mask.all()):
        attention_mask = None  # the kernels of causal attention are faster than those of a mask
    # A cache of fixed size holds room for tokens to come, which plain causal attention would look at.
    fixed = cache is not None and getattr(cache, "is_compileable", False)
    if attention_mask is None and packed_positions is None and not fixed:
        return None
    keys = torch.arange(total, device=steps.device)
    visible = (keys <= steps[:, None])[None]
    if attention_mask is not None:
        tokens = F.pad(attention_mask.bool(), (0, max(0, total - attention_mask.shape[-1])))[:, None, :total]
        visible = visible & (tokens | (keys == steps[:, None]))
    if packed_positions is not None:
        # Positions rise by one inside a document.
        document = F.pad((packed_positions.diff(dim=-1) != 1).cumsum(dim=-1), (1, 0))
        visible = visible & (document[:, :, None] == document[:, None, :])
    return visible[:, None]


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
