"""ScaleNorm (arXiv 1910.05895)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from siamesenorm.norms.function import (
    Inexact,
    InexactKind,
    NormFunction,
    compare_statistic,
    copy_bias_from,
    copy_gain_from,
)
from siamesenorm.norms.norm import Norm, check_eps


class ScaleNorm(Norm):
    """Divide by the Euclidean length: N(x) = g x / max(|x|, eps), g one learned number (arXiv 1910.05895).

    g starts at sqrt(dim) and has shape [1], for sharded training takes no 0-d parameters. Without `affine`, g stays at
    sqrt(dim), so that the affine-free form has the scale of an affine-free RMSNorm; the paper has no such form.
    """

    statistic = "scalenorm"
    scale_invariant = True
    idempotent = True
    gain: Tensor

    def __init__(self, dim: int, *, eps: float = 1e-5, affine: bool = True, axis: int = -1) -> None:
        super().__init__(dim, affine=affine, axis=axis)
        self.eps = check_eps(eps)
        if affine:
            self.declare("gain", (1,), initial=math.sqrt(dim))

    def formula(self, x: Tensor) -> Tensor:
        """Return g x / max(|x|, eps)."""
        gain = self.gain.to(x.dtype) if self.affine else math.sqrt(self.dim)
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (gain / length.clamp_min(self.eps))

    @torch.no_grad()
    def zero_(self) -> None:
        """Set g to 0."""
        self.refuse_zero_without_gain()
        self.gain.zero_()

    def function(self) -> NormFunction:
        """Return the operator as an RMSNorm-like gain g / sqrt(dim); its eps has another meaning and is left out."""
        gain = (self.gain.detach() / math.sqrt(self.dim)).expand(self.dim) if self.affine else None
        return dataclasses.replace(super().function(), eps=None, gain=gain)

    @torch.no_grad()
    def copy_from(self, source: NormFunction) -> list[Inexact]:
        """Take the mean of the gains for g, the nearest single number; see `Norm.copy_from`."""
        differences = compare_statistic(self.statistic, None, source)
        dropped_bias = copy_bias_from(source, None)
        if not self.affine:
            return [*differences, *copy_gain_from(source, None, 0.0), *dropped_bias]
        gain = torch.ones(1) if source.gain is None else source.gain.double() + source.offset
        self.gain.copy_(gain.mean() * math.sqrt(self.dim))
        if not gain.is_meta and gain.min() != gain.max():
            differences.append(Inexact(InexactKind.GAIN_AVERAGED, "the gains became their mean"))
        return [*differences, *dropped_bias]
