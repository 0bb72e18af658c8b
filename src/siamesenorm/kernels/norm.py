"""A norm of every row as one functional custom operator: RMSNorm, LayerNorm, and SeeDNorm with one head or more.

It must equal the formulas of `norms.scale_invariant_norms` and `norms.seed_norm`; `norm_plain` has them in one,
with the backward pass. Forward reads x and writes y; backward reads x and dy and writes dx; between them are kept x,
one number a token (two for LayerNorm) and one a head.

On CUDA the Triton kernels do the work; elsewhere, in fp64 and in rows too long for them, the plain formulas. The
operator is opaque to the compiler and mutates nothing. Its gradient can be differentiated again, at the cost of the
plain formulas; `torch.func` cannot see through operators like it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from siamesenorm.kernels import norm_plain
from siamesenorm.kernels.launch import can_launch_on, power_of_two
from siamesenorm.kernels.norm_plain import ACTIVATIONS, Form, Weights, widest

LONGEST_TILE = 16_384
"""The longest row that the Triton kernels take, once heads and channels of a head are rounded up to powers of two."""


@torch.library.custom_op("siamesenorm::normalise", mutates_args=())
def normalise(
    x: Tensor,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    offset: float = 0.0,
    heads: int = 1,
    dot_scale: float = 1.0,
    activation: str = "tanh",
    eps: float = 1e-5,
    centred: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = (gain + offset + sigma(dot_scale x . beta) alpha) x^ + bias, and what the backward pass needs.

    x is [..., dim]; x^ is x / sqrt(mean(x^2) + eps), of x - mean(x) if it is `centred`. The weights are [dim] or None;
    x and beta are cut into `heads` parts, and part h of the row sees its own dot product. y has the dtype of x; the
    arithmetic is in at least fp32. The statistics and dot products that follow it carry no gradient. Raises ValueError
    for shapes that do not fit together.
    """
    weights, form = Weights(alpha, beta, gain, bias), Form(offset, heads, dot_scale, activation, eps, centred)
    _check(x, weights, form)
    if has_kernel(x, heads):
        from siamesenorm.kernels import norm_launch

        return norm_launch.forward(x, weights, form)
    return norm_plain.forward(x, weights, form)


@normalise.register_fake
def _(
    x: Tensor,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    offset: float = 0.0,
    heads: int = 1,
    dot_scale: float = 1.0,
    activation: str = "tanh",
    eps: float = 1e-5,
    centred: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    weights, form = Weights(alpha, beta, gain, bias), Form(offset, heads, dot_scale, activation, eps, centred)
    _check(x, weights, form)
    tokens = math.prod(x.shape[:-1])
    keeps_dots = weights.beta is not None and form.heads != x.shape[-1]
    return (
        x.new_empty(x.shape),
        x.new_empty((2 if form.centred else 1, tokens), dtype=widest(x)),
        x.new_empty((tokens, form.heads) if keeps_dots else 0, dtype=widest(x)),
    )


@torch.library.custom_op("siamesenorm::normalise_backward", mutates_args=())
def normalise_backward(
    grad: Tensor,
    x: Tensor,
    statistics: Tensor,
    dots: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    offset: float,
    heads: int,
    dot_scale: float,
    activation: str,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and [parts, dim] of those weights that are there, in order, in at least fp32."""
    weights, form = Weights(alpha, beta, gain, bias), Form(offset, heads, dot_scale, activation, eps, centred)
    if has_kernel(x, heads):
        from siamesenorm.kernels import norm_launch

        return norm_launch.backward(grad, x, statistics, dots, weights, form)
    return norm_plain.backward(grad, x, weights, form)


@normalise_backward.register_fake
def _(grad: Tensor, x: Tensor, statistics: Tensor, dots: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    weights = Weights(*rest[:4])
    return x.new_empty(x.shape), x.new_empty((len(weights.names), x.shape[-1]), dtype=widest(x))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, statistics, dots = output
    ctx.save_for_backward(inputs[0], statistics, dots, *inputs[1:5])
    ctx.mark_non_differentiable(statistics, dots)
    ctx.set_materialize_grads(False)
    ctx.form = Form(*inputs[5:])


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    x, statistics, dots, *parts = ctx.saved_tensors
    weights, fixed = Weights(*parts), (None,) * len(Form._fields)
    if grad is None:
        return (None,) * (1 + len(weights)) + fixed
    if torch.is_grad_enabled():  # the gradient will be differentiated, and an operator of its own would stop that
        grad_x, sums = norm_plain.backward(grad, x, weights, ctx.form)
    else:
        grad_x, sums = normalise_backward(grad, x, statistics, dots, *weights, *ctx.form)
    return grad_x, *norm_plain.by_weight(sums, weights), *fixed


normalise.register_autograd(_backward, setup_context=_keep_for_backward)


def has_kernel(x: Tensor, heads: int = 1) -> bool:
    """Return whether Triton kernels compute rows like those of x."""
    return can_launch_on(x) and tile_length(x.shape[-1], heads) <= LONGEST_TILE


def tile_length(dim: int, heads: int) -> int:
    """Return the length of a row once heads and channels of a head are rounded up to powers of two."""
    heads = 1 if heads == dim else heads
    return power_of_two(heads) * power_of_two(dim // heads)


def _check(x: Tensor, weights: Weights, form: Form) -> None:
    """Raise ValueError where a kernel would read what is not there."""
    for name, weight in weights._asdict().items():
        if weight is not None and weight.shape != x.shape[-1:]:
            raise ValueError(f"{name} is {list(weight.shape)}: it must be [{x.shape[-1]}]")
    if weights.alpha is not None and weights.beta is None:
        raise ValueError("alpha without beta: it has nothing to scale")
    if form.heads < 1 or x.shape[-1] % form.heads:
        raise ValueError(f"{form.heads} heads do not divide rows of {x.shape[-1]}: choose a divisor")
    if form.activation not in ACTIVATIONS:
        raise ValueError(f"activation {form.activation!r}: choose from {', '.join(ACTIVATIONS)}")
