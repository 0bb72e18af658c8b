"""Padding, packing and caches of transformers as native attention takes them: a boolean mask, a cache for a block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from siamesenorm.errors import UserError


class LayerCache:
    """The part of a cache of transformers that belongs to one block, as a `KeyValueCache`."""

    def __init__(self, cache: Cache, block: int) -> None:
        self.cache = cache
        self.block = block

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys (rotated) and values of new tokens; return those of all tokens."""
        both: tuple[Tensor, Tensor] = self.cache.update(keys, values, self.block)
        return both


def steps_of(embedding: Tensor, cache: Cache | None) -> Tensor:
    """Return the places [tokens] that new tokens take in the cache, counted from the first token it holds."""
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(embedding.shape[1], device=embedding.device) + past


def attention_mask_for(
    steps: Tensor, attention_mask: Tensor | None, packed_positions: Tensor | None, cache: Cache | None
) -> Tensor | None:
    """Return the boolean mask [batch or 1, 1, tokens, all tokens], or None where plain causal attention is meant.

    `attention_mask` [batch, all tokens] is 0 where a token is padding; one of four dimensions is taken as it is.
    `packed_positions` [batch or 1, tokens] start again with every document of a packed sequence. A padding token sees
    itself, for a row without any key has no softmax. Raises UserError for a mask of other dimensions.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UserError(
            f"attention_mask has {attention_mask.dim()} dimensions: give [batch, tokens], with 0 for padding, or "
            "[batch, 1, tokens, tokens]"
        )
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
        visible = visible & same_document(packed_positions)
    return visible[:, None]


def same_document(positions: Tensor) -> Tensor:
    """Return [batch, tokens, tokens], True where two tokens stand in one document: positions go up by one inside it."""
    document = F.pad((positions.diff(dim=-1) != 1).cumsum(dim=-1), (1, 0))
    return document[:, :, None] == document[:, None, :]
