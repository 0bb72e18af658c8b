"""Conditioned forms of the norms, as plain modules composed of a norm and a modulation (DiT, arXiv 2212.09748).

Conditioning is not an argument of a norm: it is a `Modulation` after it, as in `sublayers.sublayer.Modulated`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.norms.parameters import DeclaredModule
from siamesenorm.norms.registry import NormSpec


class Modulation(DeclaredModule):
    """Project a condition to `parts` vectors: W silu(c) + b, W and b 0 at the start (AdaLN-Zero, arXiv 2212.09748).

    Weight [parts * dim, condition_dim] decays, bias does not.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, dim: int, condition_dim: int, parts: int) -> None:
        super().__init__()
        if dim < 1 or condition_dim < 1:
            raise UserError(f"dim is {dim} and condition_dim {condition_dim}: both need to be at least 1")
        self.dim = dim
        self.parts = parts
        self.declare("weight", (parts * dim, condition_dim), initial=0.0, decay=True)
        self.declare("bias", (parts * dim,), initial=0.0)

    def forward(self, c: Tensor, like: Tensor) -> tuple[Tensor, ...]:
        """Return `parts` tensors that broadcast with `like` [batch, ..., dim]; c is [batch, ..., condition_dim].

        A condition of one vector a sample is the same for all its tokens.
        """
        projected = F.linear(F.silu(c), self.weight, self.bias)
        per_sample = projected.shape[:-1] + (1,) * (like.ndim - c.ndim)
        return projected.reshape(*per_sample, self.parts * self.dim).chunk(self.parts, dim=-1)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.dim}, parts={self.parts}"


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x (1 + scale) + shift in the dtype of x."""
    return (x * (1 + scale) + shift).to(x.dtype)


class AdaLN(nn.Module):
    """Norm whose gain and bias come from a condition: N(x) (1 + scale(c)) + shift(c), N affine-free.

    `norm` is a name with options or a `NormSpec`: "layernorm" is DiT's AdaLN (arXiv 2212.09748). x is
    [batch, ..., dim], c [batch, condition_dim]. At the start it equals N(x).
    """

    def __init__(self, dim: int, condition_dim: int, norm: str | NormSpec = "layernorm") -> None:
        super().__init__()
        specification = NormSpec.parse(norm) if isinstance(norm, str) else norm
        self.norm = specification.build(dim, affine=False)
        self.modulation = Modulation(dim, condition_dim, parts=2)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Return N(x) (1 + scale(c)) + shift(c) in the dtype of x."""
        shift, scale = self.modulation(c, like=x)
        return modulate(self.norm(x), shift, scale)


class AdaSeeDNorm(AdaLN):
    """SeeDNorm under a condition: [(sigma(x . beta) alpha + 1) x / RMS(x)] (1 + scale(c)) + shift(c).

    The options are those of SeeDNorm (arXiv 2510.22777).
    """

    def __init__(self, dim: int, condition_dim: int, **options: Any) -> None:
        super().__init__(dim, condition_dim, NormSpec.parse("seednorm", **options))
