"""Norms that divide a token by its length: RMSNorm, LayerNorm and ScaleNorm. N(c x) = N(x) for c > 0, up to eps."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.kernels.norm_plain import Form, Weights
from siamesenorm.norms.function import (
    Inexact,
    InexactKind,
    NormFunction,
    compare_statistic,
    copy_bias_from,
    copy_gain_from,
)
from siamesenorm.norms.norm import Norm, check_number


class RMSNorm(Norm):
    """Divide by the root mean square: N(x) = g x / sqrt(mean(x^2) + eps) (arXiv 1910.07467).

    `offset` is added to the stored gain: 0, or 1 as in Gemma, whose stored gain starts at 0. The gain has shape [dim].
    """

    statistic = "rmsnorm"
    eps_in_mean_square = True
    scale_invariant = True
    idempotent = True
    fusible = True
    gain: Tensor | None

    def __init__(
        self, dim: int, *, eps: float = 1e-5, offset: float = 0.0, affine: bool = True, axis: int = -1
    ) -> None:
        super().__init__(dim, affine=affine, axis=axis)
        self.eps = check_number("eps", eps, 0.0)
        self.offset = check_number("offset of RMSNorm", offset)
        self.declare("gain", (dim,) if affine else None, initial=1.0 - offset)

    def formula(self, x: Tensor) -> Tensor:
        """Return g x / sqrt(mean(x^2) + eps)."""
        normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normalised if self.gain is None else normalised * (self.gain.to(x.dtype) + self.offset)

    def operator_form(self) -> tuple[Weights, Form]:
        """Return gain, offset and eps."""
        return Weights(gain=self.gain), Form(offset=self.offset if self.affine else 1.0, eps=self.eps)


class LayerNorm(Norm):
    """Centre and divide by the standard deviation: N(x) = g (x - mean) / sqrt(var + eps) + b (arXiv 1607.06450).

    Gain and bias have shape [dim]; `bias=False` leaves b out.
    """

    statistic = "layernorm"
    eps_in_mean_square = True
    scale_invariant = True
    idempotent = True
    fusible = True
    gain: Tensor | None
    bias: Tensor | None

    def __init__(self, dim: int, *, eps: float = 1e-5, bias: bool = True, affine: bool = True, axis: int = -1) -> None:
        super().__init__(dim, affine=affine, axis=axis)
        self.eps = check_number("eps", eps, 0.0)
        self.declare("gain", (dim,) if affine else None, initial=1.0)
        self.declare("bias", (dim,) if affine and bias else None, initial=0.0)

    def formula(self, x: Tensor) -> Tensor:
        """Return g (x - mean) / sqrt(var + eps) + b."""
        gain = None if self.gain is None else self.gain.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, (self.dim,), gain, bias, self.eps)

    def operator_form(self) -> tuple[Weights, Form]:
        """Return gain, bias and eps."""
        form = Form(offset=0.0 if self.affine else 1.0, eps=self.eps, centred=True)
        return Weights(gain=self.gain, bias=self.bias), form


class ScaleNorm(Norm):
    """Divide by the Euclidean length: N(x) = g x / max(|x|, eps), g one learned number (arXiv 1910.05895).

    g starts at sqrt(dim) and has shape [1]: sharded training supports no 0-d parameters. Without `affine`, g stays at
    sqrt(dim), so that the norm has the scale of an affine-free RMSNorm; the paper has no such form.
    """

    statistic = "scalenorm"
    scale_invariant = True
    idempotent = True
    gain: Tensor | None

    def __init__(self, dim: int, *, eps: float = 1e-5, affine: bool = True, axis: int = -1) -> None:
        super().__init__(dim, affine=affine, axis=axis)
        self.eps = check_number("eps", eps, 0.0)
        self.declare("gain", (1,) if affine else None, initial=math.sqrt(dim))

    def formula(self, x: Tensor) -> Tensor:
        """Return g x / max(|x|, eps)."""
        gain = math.sqrt(self.dim) if self.gain is None else self.gain.to(x.dtype)
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (gain / length.clamp_min(self.eps))

    def function(self) -> NormFunction:
        """Return the operator as an RMSNorm-like gain g / sqrt(dim); its eps has another meaning and is left out."""
        gain = None if self.gain is None else (self.gain.detach() / math.sqrt(self.dim)).expand(self.dim)
        return dataclasses.replace(super().function(), eps=None, gain=gain)

    @torch.no_grad()
    def copy_from(self, source: NormFunction) -> list[Inexact]:
        """Set g to the mean of the source's gains, the nearest single number; see `Norm.copy_from`."""
        differences = compare_statistic(self.statistic, None, source)
        if self.gain is None:
            differences += copy_gain_from(source, None, 0.0)
        else:
            gain = torch.ones(1) if source.gain is None else source.gain.double() + source.offset
            self.gain.copy_(gain.mean() * math.sqrt(self.dim))
            if not gain.is_meta and gain.min() != gain.max():
                differences.append(Inexact(InexactKind.GAIN_AVERAGED, "the gains became their mean"))
        return differences + copy_bias_from(source, None)
