"""What sublayers receive besides h: rotary angles, mask, condition, and the keys and values of past tokens.

Streams are not cached: every topology is local to a token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from siamesenorm.sublayers.rotary import Rotation


class KeyValueCache(Protocol):
    """What an attention needs of a cache, ours or another library's."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys (rotated) and values of new tokens; return those of all tokens."""


class Context(NamedTuple):
    """What a block passes to its sublayers; each reads what it needs.

    `rotary` holds cos and sin of the tokens' positions. `mask` is boolean, True where a query may look, broadcastable
    to [batch, heads, tokens, all tokens], and replaces the causal mask. `condition` is [batch, condition_dim].
    """

    rotary: Rotation | None = None
    mask: Tensor | None = None
    cache: KeyValueCache | None = None
    condition: Tensor | None = None


NO_CONTEXT = Context()


class AttentionCache:
    """Past keys (normalised and rotated) and values of one attention, [batch, kv_heads, tokens, head_dim]."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens held."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return those of all tokens."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), dim=-2), torch.cat((self.values, values), dim=-2)
        self.keys, self.values = keys, values
        return keys, values
