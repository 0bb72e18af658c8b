"""SeeDNorm (arXiv 2510.22777) with every option of its ablation tables.

Choices where the paper is ambiguous: the "dimension" that divides alpha beta^T in vision is the whole width, not that
of a head; dropout is element by element; `without="beta"` and the initial value of sigmoid (sigma(0) = 1/2, so that the
initial coefficient is alpha/2 + gamma) are taken literally.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.kernels.norm_plain import Form, Weights
from siamesenorm.norms.function import (
    Inexact,
    InexactKind,
    NormFunction,
    compare_statistic,
    copy_bias_from,
    copy_gain_from,
    vanishes,
)
from siamesenorm.norms.norm import Norm, Role, check_number
from siamesenorm.options import check_option

Activation = Literal["tanh", "sigmoid", "hardtanh", "gelu", "silu"]
Ablation = Literal["none", "alpha", "beta", "gamma"]
DotScale = Literal["auto", "none", "1/d"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardtanh": F.hardtanh,
    "gelu": F.gelu,
    "silu": F.silu,
}
VISION_HEADS = 16


class SeeDNorm(Norm):
    """RMSNorm with a gain that depends on the token: N(x) = (sigma(x . beta) alpha + gamma) x / RMS(x).

    RMS(x) = sqrt(mean(x^2) + eps) over the whole row (arXiv 2510.22777). alpha, beta and gamma are [dim] and start at
    `alpha_initial`, 0 and 1; weight decay applies to alpha and beta. At beta = 0 it equals RMSNorm with gain gamma.

    heads           parts into which x and beta are cut: part h has its own dot product, and scales its part of alpha
    activation      sigma: tanh, sigmoid, hardtanh; gelu and silu are unbounded, and the paper reports that they fail
    alpha_initial   0.1, 1 and 10 in the paper's table
    scalar_alpha    one alpha [1] for all channels and heads
    elementwise     sigma(x * beta) channel by channel in place of the dot product
    without         "alpha": sigma(x . beta) + gamma;  "gamma": sigma(x . beta) alpha;
                    "beta": sigma(alpha * x) + gamma channel by channel, which the paper does not write out: a reading
    dropout         on the dynamic coefficient sigma(.) alpha while training; the vision recipe: the drop-path rate
    scale           factor on the dot product: "none" or "1/d"
    offset          added to the stored gamma: 1 for gains stored as 1 + w (Gemma), which then start at 0

    "auto" is one head and no factor, and in vision 16 heads (the largest power of two up to 16 that divides the width)
    and 1/d. Without `affine`, gamma is fixed to 1 (or absent, if `without` says so); alpha and beta stay.
    """

    statistic = "seednorm"
    eps_in_mean_square = True
    scale_invariant = False
    alpha: Tensor | None
    beta: Tensor | None
    gamma: Tensor | None

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        heads: int | Literal["auto"] = "auto",
        activation: str = "tanh",
        alpha_initial: float = 1.0,
        scalar_alpha: bool = False,
        elementwise: bool = False,
        without: str = "none",
        dropout: float = 0.0,
        scale: str = "auto",
        offset: float = 0.0,
        affine: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(dim, affine=affine, axis=axis)
        check_option("activation of SeeDNorm", activation, Activation)
        check_option("without of SeeDNorm", without, Ablation)
        check_option("scale of SeeDNorm", scale, DotScale)
        check_option("heads of SeeDNorm", heads, int | Literal["auto"])
        self.eps = check_number("eps", eps, 0.0)
        self.heads = 1 if heads == "auto" else heads
        self.activation = activation
        self.alpha_initial = check_number("alpha_initial of SeeDNorm", alpha_initial)
        self.scalar_alpha = scalar_alpha
        self.elementwise = elementwise
        self.without = without
        self.dropout = dropout
        self.scale = "none" if scale == "auto" else scale
        self.offset = check_number("offset of SeeDNorm", offset)
        self.dot_scale = 1 / dim if self.scale == "1/d" else 1.0
        self.sigma_at_zero = 0.5 if activation == "sigmoid" else 0.0
        self.idempotent = without != "beta"
        self._refuse_conflicts()
        has_gamma = without != "gamma" and affine
        width = 1 if scalar_alpha else dim
        self.declare("alpha", (width,) if without != "alpha" else None, initial=alpha_initial, decay=True)
        self.declare("beta", (dim,) if without != "beta" else None, initial=0.0, decay=True)
        self.declare("gamma", (dim,) if has_gamma else None, initial=1.0 - offset)

    def _refuse_conflicts(self) -> None:
        if self.heads < 1 or self.dim % self.heads:
            divisors = ", ".join(str(n) for n in range(1, min(self.dim, 64) + 1) if self.dim % n == 0)
            raise UserError(f"SeeDNorm: {self.heads} heads do not divide the width {self.dim}: choose from {divisors}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout of SeeDNorm is {self.dropout}: write a number from 0 to below 1")
        if self.elementwise and self.without == "beta":
            raise UserError("SeeDNorm: elementwise multiplies by beta, and without=beta leaves it out: choose one")
        if not self.has_dot_product and (self.heads != 1 or self.scale != "none"):
            option = "elementwise" if self.elementwise else "without=beta"
            raise UserError(f"SeeDNorm: {option} has no dot product: leave heads and scale out")
        if self.without == "alpha" and (self.scalar_alpha or self.alpha_initial != 1.0):
            raise UserError("SeeDNorm: without=alpha has no alpha: leave scalar_alpha and alpha_initial out")

    @classmethod
    def for_role(cls, dim: int, role: Role, **options: Any) -> Self:
        """Build it as the paper does for the role's domain; explicit `heads` and `scale` have priority.

        The dropout of the vision recipe, whose rate is the model's drop-path rate, is not set here.
        """
        note = ""
        has_dot_product = not options.get("elementwise", False) and options.get("without") != "beta"
        if role.domain == "vision" and has_dot_product:
            if options.get("heads", "auto") == "auto":
                options["heads"] = heads = math.gcd(VISION_HEADS, dim)
                note = "" if heads == VISION_HEADS else f"SeeDNorm has {heads} heads: 16 do not divide width {dim}"
            if options.get("scale", "auto") == "auto":
                options["scale"] = "1/d"
        norm = cls(dim, **options)
        norm.note = note
        return norm

    @property
    def has_dot_product(self) -> bool:
        """Whether the argument of sigma is a dot product per head, and not every channel by itself."""
        return not self.elementwise and self.without != "beta"

    def dot_products(self, x: Tensor) -> Tensor:
        """Return x . beta of each head, times `scale`: [..., dim] -> [..., heads]."""
        assert self.beta is not None
        products = x * self.beta.to(x.dtype)
        of_head = products.reshape(*x.shape[:-1], self.heads, self.dim // self.heads)
        return of_head.sum(-1) * self.dot_scale

    def dynamic_coefficient(self, x: Tensor) -> Tensor:
        """Return sigma(x . beta) alpha, or its form in an ablation: [..., dim] -> [..., dim]."""
        activate = ACTIVATIONS[self.activation]
        alpha = 1.0 if self.alpha is None else self.alpha.to(x.dtype)
        if self.beta is None:
            return activate(x * alpha)
        if self.elementwise:
            activated = activate(x * self.beta.to(x.dtype))
        else:
            of_head = activate(self.dot_products(x)).unsqueeze(-1)
            activated = of_head.expand(*of_head.shape[:-1], self.dim // self.heads).flatten(-2)
        return activated * alpha

    def formula(self, x: Tensor) -> Tensor:
        """Return (sigma(x . beta) alpha + gamma) x / sqrt(mean(x^2) + eps)."""
        normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        coefficient = self.dynamic_coefficient(x)
        if self.dropout and self.training:
            coefficient = F.dropout(coefficient, self.dropout)
        if self.gamma is not None:
            coefficient = coefficient + (self.gamma.to(x.dtype) + self.offset)
        elif self.without != "gamma":
            coefficient = coefficient + 1.0
        return normalised * coefficient

    @property
    def fusible(self) -> bool:
        """Whether `fused` computes the formula: it has no dropout."""
        return not (self.dropout and self.training)

    def operator_form(self) -> tuple[Weights, Form]:
        """Return the parameters, with a channel as a head of its own where there is no dot product."""
        alpha = None if self.alpha is None else self.alpha.expand(self.dim)
        alpha, beta = (None, alpha) if self.beta is None else (alpha, self.beta)
        form = Form(
            offset=self.offset if self.gamma is not None else float(self.without != "gamma"),
            heads=self.heads if self.has_dot_product else self.dim,
            dot_scale=self.dot_scale,
            activation=self.activation,
            eps=self.eps,
        )
        return Weights(alpha=alpha, beta=beta, gain=self.gamma), form

    @torch.no_grad()
    def zero_(self) -> None:
        """Set beta to 0 (alpha, where sigma(0) is not 0) and gamma so that the gain is 0.

        With both alpha and beta at 0 neither would ever receive a gradient. Raises UserError without a gamma.
        """
        if self.without != "gamma" and not self.affine:
            raise UserError(f"{self} has no gamma: it cannot be set to zero")
        zero_beta = self.beta is not None and (self.sigma_at_zero == 0 or self.alpha is None)
        vanishing = self.beta if zero_beta else self.alpha
        assert vanishing is not None
        vanishing.zero_()
        rest = self.sigma_at_zero if self.alpha is None or self.beta is None else 0.0
        if self.gamma is not None:
            self.gamma.fill_(-rest - self.offset)

    def function(self) -> NormFunction:
        """Return the operator as RMSNorm, which it equals while beta = 0, else as a SeeDNorm."""
        dynamic = self.beta is None or self.sigma_at_zero != 0 or not vanishes(self.beta)
        statistic = self.statistic if dynamic or self.without == "gamma" else "rmsnorm"
        gain = None if self.gamma is None else self.gamma.detach()
        return dataclasses.replace(super().function(), statistic=statistic, gain=gain)

    @torch.no_grad()
    def copy_from(self, source: NormFunction) -> list[Inexact]:
        """Set gamma to the gain: at beta = 0 the function of an RMSNorm is kept; see `Norm.copy_from`."""
        if source.statistic == self.statistic:
            differences = [Inexact(InexactKind.COEFFICIENT, "the dynamic coefficient starts anew")]
        else:
            differences = compare_statistic("rmsnorm", self.eps, source)
        rest: Tensor | float = self.sigma_at_zero  # the coefficient at beta = 0
        if rest and self.alpha is not None:
            rest = rest * self.alpha.double()
        if self.without == "beta":
            differences.append(Inexact(InexactKind.COEFFICIENT, "sigma(alpha x) is added to the gain"))
        elif self.without == "gamma":
            differences.append(Inexact(InexactKind.GAIN_DROPPED, "there is no gamma that could be the gain"))
        elif self.gamma is None and not vanishes(torch.as_tensor(rest)):
            differences.append(Inexact(InexactKind.COEFFICIENT, "sigma(0) alpha is added to the gain"))
        if self.without != "gamma":
            less = 0.0 if self.beta is None else rest
            differences += copy_gain_from(source, self.gamma, self.offset, less=less)
        return differences + copy_bias_from(source, None)
