"""SeeDNorm (arXiv 2510.22777) with every switch of its ablation tables.

Where the paper leaves a reading open: the "dimension" that divides alpha beta^T in vision is the whole width, not the
width of a head; dropout is element by element; `without="beta"` and the value at which sigmoid starts (sigma(0) = 1/2,
so the initial coefficient is alpha/2 + gamma) are taken literally.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.errors import UserError, unknown
from siamesenorm.kernels.norm import Form, Weights
from siamesenorm.norms.function import (
    Inexact,
    InexactKind,
    NormFunction,
    compare_statistic,
    copy_bias_from,
    copy_gain_from,
    vanishes,
)
from siamesenorm.norms.norm import Norm, Role, check_eps, check_finite

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardtanh": F.hardtanh,
    "gelu": F.gelu,
    "silu": F.silu,
}
ABLATIONS = ("none", "alpha", "beta", "gamma")
SCALES = ("auto", "none", "1/d")
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
        check_choices(activation=activation, without=without, scale=scale)
        self.eps = check_eps(eps)
        self.heads = check_heads(dim, 1 if heads == "auto" else heads)
        self.activation = activation
        self.alpha_initial = check_finite("alpha_initial of SeeDNorm", alpha_initial)
        self.scalar_alpha = scalar_alpha
        self.elementwise = elementwise
        self.without = without
        self.dropout = dropout
        self.scale = "none" if scale == "auto" else scale
        self.offset = check_finite("offset of SeeDNorm", offset)
        self.dot_scale = 1 / dim if self.scale == "1/d" else 1.0
        self._refuse_conflicts()
        self._declare_parameters()
        self.idempotent = without != "beta"

    def _refuse_conflicts(self) -> None:
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout of SeeDNorm is {self.dropout}: write a number from 0 up to, not including, 1")
        if self.elementwise and self.without == "beta":
            raise UserError("SeeDNorm: elementwise multiplies by beta, and without=beta leaves it out: choose one")
        if not self.has_dot_product and (self.heads != 1 or self.scale != "none"):
            option = "elementwise" if self.elementwise else "without=beta"
            raise UserError(f"SeeDNorm: {option} has no dot product: leave heads and scale out")
        if self.without == "alpha" and (self.scalar_alpha or self.alpha_initial != 1.0):
            raise UserError("SeeDNorm: without=alpha has no alpha: leave scalar_alpha and alpha_initial out")

    def _declare_parameters(self) -> None:
        width = 1 if self.scalar_alpha else self.dim
        has_gamma = self.without != "gamma" and self.affine
        self.declare("alpha", (width,) if self.without != "alpha" else None, initial=self.alpha_initial, decay=True)
        self.declare("beta", (self.dim,) if self.without != "beta" else None, initial=0.0, decay=True)
        self.declare("gamma", (self.dim,) if has_gamma else None, initial=1.0 - self.offset)

    @classmethod
    def for_role(cls, dim: int, role: Role, **options: Any) -> Self:
        """Build it as the paper does for the role's domain; explicit `heads` and `scale` win.

        The dropout of the vision recipe is not set here: its rate is the model's drop-path rate.
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
        """Whether sigma sees dot products, one a head, rather than every channel by itself."""
        return not self.elementwise and self.without != "beta"

    def dot_products(self, x: Tensor) -> Tensor:
        """Return x . beta of each head, times `scale`: [..., dim] -> [..., heads]."""
        assert self.beta is not None
        products = x * self.beta.to(x.dtype)
        of_head = products.reshape(*x.shape[:-1], self.heads, self.dim // self.heads)
        return of_head.sum(-1) * self.dot_scale

    def dynamic_coefficient(self, x: Tensor) -> Tensor:
        """Return sigma(x . beta) alpha, or what the ablations put in its place: [..., dim] -> [..., dim]."""
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
        weights = Weights(
            alpha=None if self.beta is None else alpha, beta=alpha if self.beta is None else self.beta, gain=self.gamma
        )
        form = Form(
            offset=self.offset if self.gamma is not None else float(self.without != "gamma"),
            heads=self.heads if self.has_dot_product else self.dim,
            dot_scale=self.dot_scale,
            activation=self.activation,
            eps=self.eps,
        )
        return weights, form

    def _activation_at_zero(self) -> float:
        return float(ACTIVATIONS[self.activation](torch.zeros((), device="cpu")))

    @torch.no_grad()
    def zero_(self) -> None:
        """Set beta to 0 (alpha, where sigma(0) is not 0) and gamma to what cancels the rest: 0 but for sigmoid.

        With both alpha and beta at 0 neither would get a gradient, and the coefficient would never be dynamic again.
        """
        if self.without != "gamma":
            self.refuse_zero_without_gain()
        rest = self._activation_at_zero()
        still = self.beta if self.beta is not None and (rest == 0 or self.alpha is None) else self.alpha
        assert still is not None
        still.zero_()
        rest = rest if self.alpha is None or self.beta is None else 0.0
        if self.gamma is not None:
            self.gamma.fill_(-rest - self.offset)

    @torch.no_grad()
    def _coefficient_at_rest(self) -> Tensor | float:
        """Return the dynamic coefficient at beta = 0: sigma(0) alpha."""
        rest = self._activation_at_zero()
        return rest if rest == 0 or self.alpha is None else rest * self.alpha.double()

    def function(self) -> NormFunction:
        """Return the operator as the RMSNorm that it is while beta = 0, else as one of its own kind."""
        dynamic = self.beta is None or self._activation_at_zero() != 0 or not vanishes(self.beta)
        return NormFunction(
            statistic=self.statistic if dynamic or self.without == "gamma" else "rmsnorm",
            dim=self.dim, axis=self.axis, eps=self.eps,
            gain=None if self.gamma is None else self.gamma.detach(), offset=self.offset,
        )  # fmt: skip

    @torch.no_grad()
    def copy_from(self, source: NormFunction) -> list[Inexact]:
        """Take the gain for gamma: the function of an RMSNorm is kept, for beta = 0; see `Norm.copy_from`."""
        if source.statistic == self.statistic:
            differences = [Inexact(InexactKind.COEFFICIENT, "the dynamic coefficient starts anew")]
        else:
            differences = compare_statistic("rmsnorm", self.eps, source)
        rest = self._coefficient_at_rest()
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


def check_choices(**choices: str) -> None:
    """Raise UserError naming the nearest names if an option is not one of its choices."""
    known = {"activation": tuple(ACTIVATIONS), "without": ABLATIONS, "scale": SCALES}
    for option, value in choices.items():
        if value not in known[option]:
            raise unknown(f"{option} of SeeDNorm", str(value), known[option])


def check_heads(dim: int, heads: object) -> int:
    """Return the number of heads; raises UserError if it is not a divisor of the width."""
    if not isinstance(heads, int) or isinstance(heads, bool):
        raise UserError(f"heads of SeeDNorm is {heads!r}: write an integer or auto")
    if heads < 1 or dim % heads:
        divisors = ", ".join(str(n) for n in range(1, min(dim, 64) + 1) if dim % n == 0)
        raise UserError(f"SeeDNorm: {heads} heads do not divide the width {dim}: choose from {divisors}")
    return heads
