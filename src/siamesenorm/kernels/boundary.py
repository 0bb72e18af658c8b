"""The boundary between two sublayers as one functional custom operator.

Everything from one sublayer's output O to the next one's input H: the write to one or two streams, the post_norm, the
gate, the identity stream's norm and the input norm; `boundary_plain` has the formulas. SiameseNorm uses all of it,
ResiDual two streams of which the sublayers see one, Pre-Norm, Post-Norm and DeepNorm one stream. It must equal the
write and the read of the plain connections in `topologies`.

On CUDA the Triton kernels do the work; elsewhere, in fp64 and in rows too long for them, the plain formulas. The
operator is opaque to the compiler, mutates nothing, returns what the backward pass needs among its results, and its
gradient is that with respect to each input, whoever else uses the streams.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from siamesenorm.kernels import boundary_plain
from siamesenorm.kernels.boundary_plain import Backward, Constants, Forward, Gains, shares_gradient, widest
from siamesenorm.kernels.launch import can_launch_on

LONGEST_ROW = 16_384
"""The longest row that the Triton kernels take."""


@torch.library.custom_op("siamesenorm::boundary", mutates_args=())
def boundary(
    bounded: Tensor,
    output: Tensor,
    identity: Tensor | None,
    skip: Tensor | None,
    scale: Tensor | None,
    identity_scale: Tensor | None,
    post_norm_gain: Tensor | None,
    gate: Tensor | None,
    identity_gain: Tensor | None,
    input_gain: Tensor | None,
    post_norm_bias: Tensor | None,
    identity_bias: Tensor | None,
    input_bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (X', Y', H, U, statistics): the streams, the next sublayer's input, and what the backward pass needs.

    `bounded`, `output` and `identity` are [..., dim]; X', Y' and U have the streams' dtype, H that of `output`. The
    constants are 0-d, gains and biases [dim]; None is an absent part, and a norm is there if its gain is. `centred`
    makes all norms LayerNorms. Y' is empty without an identity stream, U without a post_norm. U and the statistics,
    [norms, tokens] of 1 / deviation (each followed by the mean, if centred), carry no gradient. Raises ValueError for
    shapes and dtypes that do not fit together.
    """
    gains = Gains(post_norm_gain, gate, identity_gain, input_gain, post_norm_bias, identity_bias, input_bias)
    check(bounded, output, identity, gains)
    constants = Constants(skip, scale, identity_scale)
    result: Forward = implementation(bounded).forward(bounded, output, identity, constants, gains, eps, centred)
    return result


@boundary.register_fake
def _(
    bounded: Tensor, output: Tensor, identity: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gains, centred = Gains(*rest[3:10]), rest[11]
    check(bounded, output, identity, gains)
    nothing = bounded.new_empty(0)
    tokens = math.prod(bounded.shape[:-1])
    return (
        bounded.new_empty(bounded.shape),
        nothing if identity is None else bounded.new_empty(bounded.shape),
        output.new_empty(bounded.shape),
        bounded.new_empty(0 if gains.post_norm_gain is None else bounded.shape),
        bounded.new_empty((gains.norms * (2 if centred else 1), tokens), dtype=widest(bounded)),
    )


@torch.library.custom_op("siamesenorm::boundary_backward", mutates_args=())
def boundary_backward(
    grad_settled: Tensor | None,
    grad_identity: Tensor | None,
    grad_h: Tensor,
    kept: Tensor,
    identity: Tensor | None,
    statistics: Tensor,
    skip: Tensor | None,
    scale: Tensor | None,
    identity_scale: Tensor | None,
    post_norm_gain: Tensor | None,
    gate: Tensor | None,
    identity_gain: Tensor | None,
    input_gain: Tensor | None,
    post_norm_bias: Tensor | None,
    identity_bias: Tensor | None,
    input_bias: Tensor | None,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (X, Y, O) and [parts, dim] of those gains and biases that are there, in `Gains`'s order.

    `kept` is U where there is a post_norm and X' where there is none; `identity` is Y', needed where it is
    normalised. The gradient of Y is empty where Y' is not normalised (it is then that of Y'), that of O where it is
    that of X.
    """
    constants = Constants(skip, scale, identity_scale)
    gains = Gains(post_norm_gain, gate, identity_gain, input_gain, post_norm_bias, identity_bias, input_bias)
    result: Backward = implementation(kept).backward(
        grad_settled, grad_identity, grad_h, kept, identity, statistics, constants, gains, centred
    )
    return result[:4]


@boundary_backward.register_fake
def _(
    grad_settled: Tensor | None,
    grad_identity: Tensor | None,
    grad_h: Tensor,
    kept: Tensor,
    identity: Tensor | None,
    statistics: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    constants, gains = Constants(*rest[:3]), Gains(*rest[3:10])
    shared = shares_gradient(grad_identity, grad_h, kept, constants, gains)
    return (
        kept.new_empty(kept.shape),
        kept.new_empty(0 if gains.identity_gain is None else kept.shape),
        grad_h.new_empty(0 if shared else kept.shape),
        kept.new_empty((len(gains.present), kept.shape[-1]), dtype=widest(kept)),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    settled, identity, h, unsettled, statistics = output
    constants, gains = Constants(*inputs[3:6]), Gains(*inputs[6:13])
    if any(constant is not None and constant.requires_grad for constant in constants):
        raise ValueError("a scale of the fused boundary is a constant: a learned scale needs kernels='plain'")
    kept = settled if gains.post_norm_gain is None else unsettled
    ctx.save_for_backward(kept, None if gains.identity_gain is None else identity, statistics, *constants, *gains)
    ctx.mark_non_differentiable(unsettled, statistics, *([identity] if inputs[2] is None else []))
    ctx.set_materialize_grads(False)
    ctx.centred, ctx.h_dtype = inputs[14], h.dtype


def _backward(
    ctx: Any, grad_settled: Tensor | None, grad_identity: Tensor | None, grad_h: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    kept, identity, statistics, *parts = ctx.saved_tensors
    constants, gains = Constants(*parts[:3]), Gains(*parts[3:])
    if grad_h is None:
        grad_h = kept.new_zeros(kept.shape, dtype=ctx.h_dtype)
    bounded, through_norm, output, sums = boundary_backward(
        grad_settled, grad_identity, grad_h, kept, identity, statistics, *constants, *gains, ctx.centred
    )
    shared = shares_gradient(grad_identity, grad_h, kept, constants, gains)
    row = iter(sums.unbind())
    return (
        bounded,
        bounded if shared else output,
        grad_identity if gains.identity_gain is None else through_norm,
        *(None for _ in constants),
        *(None if gain is None else next(row).to(gain.dtype) for gain in gains),
        None,
        None,
    )


def refuse_second_derivative(*_: Any) -> None:
    """Raise RuntimeError: the backward operator's own gradient is asked for."""
    raise RuntimeError("the fused boundary has no second derivative: use kernels='plain'")


boundary.register_autograd(_backward, setup_context=_keep_for_backward)
boundary_backward.register_autograd(refuse_second_derivative)


def implementation(x: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` compute streams like x."""
    if not has_kernels_for(x):
        return boundary_plain
    from siamesenorm.kernels import boundary_launch

    return boundary_launch


def has_kernels_for(x: Tensor) -> bool:
    """Return whether the boundary of streams like x is computed by Triton kernels."""
    return can_launch_on(x) and x.shape[-1] <= LONGEST_ROW


def check(bounded: Tensor, output: Tensor, identity: Tensor | None, gains: Gains) -> None:
    """Raise ValueError where a kernel would read what is not there."""
    for name, part in (("output", output), ("identity stream", identity)):
        if part is not None and part.shape != bounded.shape:
            raise ValueError(
                f"the {name} is {list(part.shape)}, the bounded stream {list(bounded.shape)}: let them agree"
            )
    if identity is not None and identity.dtype != bounded.dtype:
        raise ValueError(f"streams of {bounded.dtype} and {identity.dtype}: give both one dtype")
    for name, gain in gains._asdict().items():
        if gain is not None and gain.shape != bounded.shape[-1:]:
            raise ValueError(f"{name} is {list(gain.shape)}: it must be [{bounded.shape[-1]}]")
    if gains.identity_gain is not None and identity is None:
        raise ValueError("a norm of the identity stream without an identity stream: leave out its gain")
