"""A norm of every row and its backward pass, in plain PyTorch: what the Triton kernels of `norm_triton` must equal.

With r = 1 / sqrt(mean(c^2) + eps), c = x (or x - mean(x), if it is centred), x^ = r c and, of every head,
t = dot_scale (x . beta), s = sigma(t) (spread over the head's channels), the result is y = m x^ + bias with
m = gain + offset + s alpha. Backward, with q = dy x^ and w = dy m:
    d_gain = sum q;  d_bias = sum dy;  d_alpha = sum q s;  dt = dot_scale sigma'(t) (sum over the head of q alpha)
    d_beta = sum dt x;  dx = r (w - x^ mean(w x^) [- mean(w)]) + dt beta
where sums are over tokens, and dt is spread as s is. What is absent is left out; alpha is then 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Weights(NamedTuple):
    """What is learned, each [dim] or absent: SeeDNorm has alpha and beta, RMSNorm gain alone, LayerNorm a bias too."""

    alpha: Tensor | None = None
    beta: Tensor | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """Return the names of those that are there, in order."""
        return [name for name, weight in self._asdict().items() if weight is not None]


class Form(NamedTuple):
    """What is fixed: the heads of x . beta, sigma, numbers of the formula, and whether the mean is taken out.

    As many heads as channels are sigma of every channel by itself: what it sees is not kept for the backward pass.
    """

    offset: float = 0.0
    heads: int = 1
    dot_scale: float = 1.0
    activation: str = "tanh"
    eps: float = 1e-5
    centred: bool = False


class Activation(NamedTuple):
    """A function and its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _slope_of_gelu(t: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(t / math.sqrt(2))) + t * torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)


ACTIVATIONS = {
    "tanh": Activation(torch.tanh, lambda t: 1 - torch.tanh(t).square()),
    "sigmoid": Activation(torch.sigmoid, lambda t: torch.sigmoid(t) * torch.sigmoid(-t)),
    "hardtanh": Activation(F.hardtanh, lambda t: (t.abs() < 1).to(t.dtype)),
    "gelu": Activation(F.gelu, _slope_of_gelu),
    "silu": Activation(F.silu, lambda t: torch.sigmoid(t) * (1 + t * torch.sigmoid(-t))),
}


def widest(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is computed: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def forward(x: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the statistics [1 (2 if centred), tokens]: r and the mean, and t [tokens, heads], or nothing."""
    wide = x.to(widest(x))
    normalised, statistics = _normalise(wide, form)
    dots = _dot_products(wide, weights, form)
    y = normalised * _coefficient(wide, dots, weights, form)
    if weights.bias is not None:
        y = y + weights.bias.to(y.dtype)
    kept = wide.new_empty(0) if dots is None or form.heads == x.shape[-1] else dots.reshape(-1, form.heads)
    return y.to(x.dtype).contiguous(), torch.stack([part.flatten() for part in statistics]), kept


def backward(grad: Tensor, x: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and [parts, dim], those of the weights that are there; both can be differentiated."""
    wide, grad = x.to(widest(x)), grad.to(widest(x))
    normalised, (inverse, *_) = _normalise(wide, form)
    along = grad * normalised
    dots = _dot_products(wide, weights, form)
    coefficient = _coefficient(wide, dots, weights, form)

    dx = grad * coefficient - normalised * (along * coefficient).mean(-1, keepdim=True)
    if form.centred:
        dx = dx - (grad * coefficient).mean(-1, keepdim=True)
    dx = dx * inverse
    sums: dict[str, Tensor] = {"gain": along, "bias": grad}
    if dots is not None and weights.beta is not None:
        activation = ACTIVATIONS[form.activation]
        sums["alpha"] = along * _spread(activation.value(dots), wide)
        of_head = _heads(along if weights.alpha is None else along * weights.alpha.to(wide.dtype), form).sum(-1)
        grad_dots = _spread(of_head * activation.slope(dots) * form.dot_scale, wide)
        sums["beta"] = grad_dots * wide
        dx = dx + grad_dots * weights.beta.to(wide.dtype)
    of_weights = [sums[name].reshape(-1, x.shape[-1]).sum(0) for name in weights.names]
    return dx.to(x.dtype).contiguous(), torch.stack(of_weights) if of_weights else wide.new_empty((0, x.shape[-1]))


def by_weight(sums: Tensor, weights: Weights) -> list[Tensor | None]:
    """Return the rows of `sums` [parts, dim] as gradients of the weights; None for a weight that is absent."""
    row = iter(sums.unbind())
    return [None if weight is None else next(row).to(weight.dtype) for weight in weights]


class NarrowNorm(torch.autograd.Function):
    """A norm of rows below fp32 that saves x in its own dtype for the backward pass.

    Autograd would save the rows and the normalised rows in fp32: four times the bytes of x for RMSNorm, where the plain
    formula of a model in bf16 needs one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, formula: Callable[[Tensor], Tensor], form: Form, *weights: Tensor | None
    ) -> Tensor:
        """Return the formula's value, computed in fp32, in the dtype of x."""
        ctx.save_for_backward(x, *weights)
        ctx.form = form
        return formula(x.to(widest(x))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the weights; they can be differentiated again."""
        x, *parts = ctx.saved_tensors
        weights = Weights(*parts)
        grad_x, sums = backward(grads[0], x, weights, ctx.form)
        return grad_x, None, None, *by_weight(sums, weights)


def _normalise(x: Tensor, form: Form) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return x^, and r (and the mean, if it is centred)."""
    if not form.centred:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + form.eps)
        return x * inverse, (inverse,)
    mean = x.mean(-1, keepdim=True)
    inverse = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + form.eps)
    return (x - mean) * inverse, (inverse, mean)


def _heads(x: Tensor, form: Form) -> Tensor:
    """Cut [..., dim] into [..., heads, channels of a head]."""
    return x.reshape(*x.shape[:-1], form.heads, x.shape[-1] // form.heads)


def _spread(of_head: Tensor, x: Tensor) -> Tensor:
    """Give every channel of x what its head has: [..., heads] -> [..., dim]."""
    wide = of_head.unsqueeze(-1)
    return wide.expand(*of_head.shape, x.shape[-1] // of_head.shape[-1]).flatten(-2)


def _dot_products(x: Tensor, weights: Weights, form: Form) -> Tensor | None:
    if weights.beta is None:
        return None
    return _heads(x * weights.beta.to(x.dtype), form).sum(-1) * form.dot_scale


def _coefficient(x: Tensor, dots: Tensor | None, weights: Weights, form: Form) -> Tensor | float:
    """Return m = gain + offset + s alpha."""
    still = form.offset if weights.gain is None else weights.gain.to(x.dtype) + form.offset
    if dots is None:
        return still
    dynamic = _spread(ACTIVATIONS[form.activation].value(dots), x)
    return (dynamic if weights.alpha is None else dynamic * weights.alpha.to(x.dtype)) + still
