"""Multi-head and grouped-query attention with the attention norms of the field.

    "none"        no norm
    "qk"          queries and keys over their whole width, before the split into heads (OLMo, OLMo 2; "QK-norm")
    "qk-head"     queries and keys per head, one gain of a head's width shared by all heads
    "qkv-head"    values too (HybridNorm, SiameseNorm Hybrid-Pre)
    context_norm  besides, the attention's output per head, before the output projection

Those of queries, keys and values are applied before the rotation. All are RMSNorms, or LayerNorms in a model of
LayerNorms, independent of the operator of the residual path: that one is studied here, these are held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError, unknown
from siamesenorm.norms import NormSpec
from siamesenorm.sublayers.sublayer import NO_CONTEXT, Context, Projection, Rotation, to_autocast

ATTENTION_NORMS = ("none", "qk", "qk-head", "qkv-head")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Widths and options of an attention: `dim` model width, `heads` query heads, `kv_heads` key and value heads."""

    dim: int
    heads: int
    kv_heads: int
    attention_norm: Literal["none", "qk", "qk-head", "qkv-head"] = "none"
    context_norm: bool = False
    norm: NormSpec = NormSpec()
    bias: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        if self.heads < 1 or self.dim % self.heads:
            raise UserError(f"{self.heads} heads do not divide the width {self.dim}: choose a divisor of {self.dim}")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise UserError(
                f"{self.kv_heads} key/value heads do not divide {self.heads} heads: choose a divisor of {self.heads}"
            )
        if self.attention_norm not in ATTENTION_NORMS:
            raise unknown("attention norm", self.attention_norm, ATTENTION_NORMS)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads


class Attention(nn.Module):
    """Softmax attention over h [batch, tokens, dim], by PyTorch's scaled_dot_product_attention.

    `kernels` are the model's: its norms use no fused operator if they are "plain".
    """

    def __init__(self, shape: AttentionShape, kernels: str = "plain") -> None:
        super().__init__()
        self.shape = shape
        kv_dim = shape.kv_heads * shape.head_dim
        self.query = Projection(shape.dim, shape.dim, role="query", bias=shape.bias)
        self.key = Projection(shape.dim, kv_dim, role="key", bias=shape.bias)
        self.value = Projection(shape.dim, kv_dim, role="value", bias=shape.bias)
        self.output = Projection(shape.dim, shape.dim, role="attention_output", bias=shape.bias)
        whole, per_head = shape.attention_norm == "qk", shape.attention_norm in ("qk-head", "qkv-head")
        self.query_norm = self._norm_or_identity(kernels, shape.dim, whole)
        self.key_norm = self._norm_or_identity(kernels, kv_dim, whole)
        self.query_head_norm = self._norm_or_identity(kernels, shape.head_dim, per_head)
        self.key_head_norm = self._norm_or_identity(kernels, shape.head_dim, per_head)
        self.value_head_norm = self._norm_or_identity(kernels, shape.head_dim, shape.attention_norm == "qkv-head")
        self.context_head_norm = self._norm_or_identity(kernels, shape.head_dim, shape.context_norm)

    def forward(self, h: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return [batch, tokens, dim]; a cache holds keys as they were rotated."""
        rotary, mask, cache, _, attend = context
        h = to_autocast(h)
        query = self.query_head_norm(self._split(self.query_norm(self.query(h))))
        key = self.key_head_norm(self._split(self.key_norm(self.key(h))))
        value = self.value_head_norm(self._split(self.value(h)))
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        if cache is not None:
            key, value = cache.update(key, value)
        attended = self._attend(query, key, value, mask) if attend is None else attend(self, query, key, value, mask)
        output: Tensor = self.output(self.context_head_norm(attended).transpose(1, 2).flatten(2))
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return [batch, heads, tokens, head_dim]."""
        new, total = query.shape[-2], key.shape[-2]
        causal = self.shape.causal and mask is None
        # An if, not a comparison as argument: of a length that the compiler leaves open it is a symbol, no bool.
        if new == 1:
            causal = False
        elif causal and new < total:
            # Several new tokens on a cache: PyTorch's causal mask is aligned to the first token, not to the last.
            mask, causal = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new), False
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=self.shape.kv_heads != self.shape.heads
        )

    def _norm_or_identity(self, kernels: str, dim: int, present: bool) -> nn.Module:
        return self.shape.norm.build(dim).select_kernels(kernels) if present else nn.Identity()

    def _split(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, -1, self.shape.head_dim).transpose(1, 2)


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


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Return (cos, sin), each [..., tokens, head_dim], of the angles position * theta^(-2i / head_dim).

    `positions` is [..., tokens]: [batch, 1, tokens] where rows of a batch differ: `rotate` has heads in between.
    Angles are computed in fp32, in fp64 for fp64 models, and the result is not rounded.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions.to(wide).unsqueeze(-1) * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate x [batch, heads, tokens, head_dim] in at least fp32; returns x's dtype."""
    cos, sin = by
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
