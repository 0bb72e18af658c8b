"""Rotary position embedding (arXiv 2104.09864), in the layout that rotates the two halves of a head."""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]


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
