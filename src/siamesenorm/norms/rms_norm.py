"""RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from siamesenorm.kernels.norm import Form, Weights
from siamesenorm.norms.norm import Norm, check_eps, check_finite


class RMSNorm(Norm):
    """Divide by the root mean square: N(x) = g x / sqrt(mean(x^2) + eps) (arXiv 1910.07467).

    `offset` is added to the stored gain: 0, or 1 as in Gemma, whose stored gain starts at 0. The gain has shape [dim].
    """

    statistic = "rmsnorm"
    eps_in_mean_square = True
    scale_invariant = True
    idempotent = True
    fusible = True
    gain: Tensor

    def __init__(
        self, dim: int, *, eps: float = 1e-5, offset: float = 0.0, affine: bool = True, axis: int = -1
    ) -> None:
        super().__init__(dim, affine=affine, axis=axis)
        self.eps = check_eps(eps)
        self.offset = check_finite("offset of RMSNorm", offset)
        if affine:
            self.declare("gain", (dim,), initial=1.0 - offset)

    def formula(self, x: Tensor) -> Tensor:
        """Return g x / sqrt(mean(x^2) + eps)."""
        normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normalised * (self.gain.to(x.dtype) + self.offset) if self.affine else normalised

    def operator_form(self) -> tuple[Weights, Form]:
        """Return gain, offset and eps."""
        gain, offset = (self.gain, self.offset) if self.affine else (None, 1.0)
        return Weights(gain=gain), Form(offset=offset, eps=self.eps)

    @torch.no_grad()
    def zero_(self) -> None:
        """Set the effective gain to 0."""
        self.refuse_zero_without_gain()
        self.gain.fill_(-self.offset)
