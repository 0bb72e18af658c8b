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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Weights(NamedTuple):
    """The learned weights, each [dim] or absent: SeeDNorm has alpha and beta, RMSNorm gain alone, LayerNorm a bias."""

    alpha: Tensor | None = None
    beta: Tensor | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """The names of the present ones, in order."""
        return [name for name, weight in self._asdict().items() if weight is not None]


class Form(NamedTuple):
    """The constants of a norm: heads of x . beta, sigma, numbers of the formula, and whether the mean is subtracted.

    With as many heads as channels, sigma acts on every channel by itself, and no dot product is kept.
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


def keeps_dots(x: Tensor, weights: Weights, form: Form) -> bool:
    """Return whether there are dot products to keep: not where every channel is a head of its own."""
    return weights.beta is not None and form.heads != x.shape[-1]


def empty_results(x: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the results of `forward`."""
    tokens = math.prod(x.shape[:-1])
    return (
        x.new_empty(x.shape),
        x.new_empty((2 if form.centred else 1, tokens), dtype=widest(x)),
        x.new_empty((tokens, form.heads) if keeps_dots(x, weights, form) else 0, dtype=widest(x)),
    )


def forward(x: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the statistics [1 (2 if centred), tokens]: r and the mean, and t [tokens, heads], or nothing."""
    wide = x.to(widest(x))
    normalised, statistics = normalise_rows(wide, form.eps, form.centred)
    dots = _dot_products(wide, weights, form)
    y = normalised * _coefficient(wide, dots, weights, form)
    if weights.bias is not None:
        y = y + weights.bias.to(y.dtype)
    kept = dots.reshape(-1, form.heads) if dots is not None and keeps_dots(x, weights, form) else wide.new_empty(0)
    return y.to(x.dtype).contiguous(), torch.stack([part.flatten() for part in statistics]), kept


def backward(grad: Tensor, x: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and [parts, dim] of the present weights; both can be differentiated."""
    wide, grad = x.to(widest(x)), grad.to(widest(x))
    normalised, (inverse, *_) = normalise_rows(wide, form.eps, form.centred)
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
    return dx.to(x.dtype).contiguous(), sum_over_tokens(sums, weights._asdict(), wide)


def normalise_rows(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, list[Tensor]]:
    """Return x^ and the row statistics: 1 / deviation, and the mean if it is centred."""
    means = [x.mean(-1, keepdim=True)] if centred else []
    for mean in means:
        x = x - mean
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * inverse, [inverse, *means]


def _heads(x: Tensor, form: Form) -> Tensor:
    """Cut [..., dim] into [..., heads, channels of a head]."""
    return x.reshape(*x.shape[:-1], form.heads, x.shape[-1] // form.heads)


def _spread(of_head: Tensor, x: Tensor) -> Tensor:
    """Repeat the value of a head for its channels: [..., heads] -> [..., dim]."""
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


def sum_over_tokens(gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor | None], x: Tensor) -> Tensor:
    """Return [parts, dim], the sums of the gradients of the weights that are present, in the order of `weights`."""
    sums = [gradients[name].reshape(-1, x.shape[-1]).sum(0) for name, each in weights.items() if each is not None]
    return torch.stack(sums) if sums else x.new_empty((0, x.shape[-1]))


def by_weight(sums: Tensor, weights: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return the rows of `sums` [parts, dim] as gradients of the weights; None for an absent weight."""
    row = iter(sums.unbind())
    return [None if weight is None else next(row).to(weight.dtype) for weight in weights]


class NarrowNorm(torch.autograd.Function):
    """A norm of rows below fp32 that saves x in its own dtype for the backward pass.

    Autograd would save the rows and the normalised rows in fp32: for RMSNorm in bf16, four times the bytes of x.
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
