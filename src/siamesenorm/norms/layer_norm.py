"""LayerNorm (arXiv 1607.06450)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.kernels.norm import Form, Weights
from siamesenorm.norms.norm import Norm, check_eps


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
        self.eps = check_eps(eps)
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

    @torch.no_grad()
    def zero_(self) -> None:
        """Set gain and bias to 0."""
        self.refuse_zero_without_gain()
        for parameter in (self.gain, self.bias):
            if parameter is not None:
                parameter.zero_()
