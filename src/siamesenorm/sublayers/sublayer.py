"""What sublayers have in common: the context that a block passes to them, projections, and conditioning."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from siamesenorm.norms.conditioned import Modulation, modulate

Losses = dict[str, Tensor]
"""Scalar losses of a sublayer by name."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles; see `attention.rotation`."""
ProjectionRole = Literal[
    "query", "key", "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output", "router", "head", "other"
]


class Attend(Protocol):
    """A function in place of PyTorch's attention, such as another library's."""

    def __call__(
        self, attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, /
    ) -> Tensor:
        """Return [batch, heads, tokens, head_dim] of rotated queries, and keys and values of all tokens."""


class KeyValueCache(Protocol):
    """The cache of an attention: `AttentionCache`, or another library's."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys (rotated) and values of new tokens; return those of all tokens."""


class Context(NamedTuple):
    """The inputs of sublayers besides h; each sublayer reads those that it needs.

    `rotary` holds cos and sin of the tokens' positions. `mask` is boolean, True where a query may attend to a key,
    broadcastable to [batch, heads, tokens, all tokens], and replaces the causal mask. `condition` is
    [batch, condition_dim]. With `attend`, the mask is in the form that it takes. Streams are not cached: every topology
    is local to a token.
    """

    rotary: Rotation | None = None
    mask: Tensor | None = None
    cache: KeyValueCache | None = None
    condition: Tensor | None = None
    attend: Attend | None = None


NO_CONTEXT = Context()


class Projection(nn.Linear):
    """nn.Linear with a role, from which an initialisation chooses its distribution."""

    def __init__(self, in_features: int, out_features: int, *, role: ProjectionRole, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.role = role


def to_autocast(h: Tensor) -> Tensor:
    """Return h in the dtype to which autocast lowers the input of a projection.

    Each of several projections of one h would cast it by itself and keep its own copy for the backward pass.
    """
    device = h.device.type
    if h.dtype == torch.float64 or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return h
    return h.to(torch.get_autocast_dtype(device))


class Modulated(nn.Module):
    """Scale, shift and gate a sublayer by a condition: gate(c) F(h (1 + scale(c)) + shift(c)) (arXiv 2212.09748).

    All three are zero at the start (AdaLN-Zero), so that the output is exactly 0. The norm before such a sublayer is
    built with `affine=False`; with SeeDNorm the whole is AdaSeeDNorm (arXiv 2510.22777).
    """

    def __init__(self, sublayer: nn.Module, dim: int, condition_dim: int) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.modulation = Modulation(dim, condition_dim, parts=3)

    def forward(self, h: Tensor, context: Context) -> Tensor | tuple[Tensor, Losses]:
        """Return the sublayer's gated output for h [batch, tokens, dim], and its losses if it has any."""
        shift, scale, gate = self.modulation(context.condition, like=h)
        output = self.sublayer(modulate(h, shift, scale), context)
        value, *losses = output if isinstance(output, tuple) else (output,)
        gated: Tensor = (gate * value).to(value.dtype)
        return (gated, *losses) if losses else gated
