"""The boundary of SiameseNorm that keeps one stream for the backward pass, and rebuilds the other.

Y' is not kept. What was written last, to both streams, is O, so that (Y' - U / s) of a boundary is (Y' - X' / s) of the
one before it, s being the scale of the write to X between the two. Each boundary's backward pass therefore hands this
difference, the *rest*, to the one before, which knows its own X' (from U, that is kept) and adds X' / s to it:

    Y'_i = rest_i + X'_i / s_(i+1),   rest_(i-1) = Y'_i - U_i / s_i

The rest travels as the gradient of a *carrier*, a result of the operator that holds no memory and that the next one
takes: autograd runs boundaries in the reverse order, and a carrier's gradient reaches nobody else. Nothing is stored
outside the graph, and the closing begins by handing out Y - X / s of the last streams. Two things are checked. A rest
that never came (the closing is not part of this backward pass) is an error. A rebuilt row whose norm is not the one
that the forward pass has on record (streams were changed, cut or used twice between two boundaries) becomes NaN, and
with it the gradients below. fp32 streams rebuild Y' to about 1e-6 of its largest values; 16-bit ones would not, and
are refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.kernels.boundary import check, implementation, refuse_second_derivative
from siamesenorm.kernels.boundary_plain import Backward, Carried, Constants, Forward, Gains, widest


@torch.library.custom_op("siamesenorm::lean_boundary", mutates_args=())
def lean_boundary(
    bounded: Tensor,
    output: Tensor,
    identity: Tensor,
    carrier: Tensor | None,
    scale: Tensor,
    departure: Tensor,
    post_norm_gain: Tensor | None,
    gate: Tensor | None,
    identity_gain: Tensor,
    input_gain: Tensor | None,
    post_norm_bias: Tensor | None,
    identity_bias: Tensor | None,
    input_bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (X', Y', H, U, statistics, carrier), as `boundary`, with the carrier that the next boundary takes.

    `carrier` is that of the boundary before, None for the first; `scale` is that of the pending write, `departure` that
    of the next one. U is empty without a post_norm. Raises ValueError for 16-bit streams.
    """
    gains = Gains(post_norm_gain, gate, identity_gain, input_gain, post_norm_bias, identity_bias, input_bias)
    check(bounded, output, identity, gains)
    _require_wide(bounded)
    constants = Constants(None, scale, None)
    result: Forward = implementation(bounded).forward(bounded, output, identity, constants, gains, eps, centred)
    return *result, _empty_carrier(bounded)


@lean_boundary.register_fake
def _(
    bounded: Tensor, output: Tensor, identity: Tensor, carrier: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gains, centred = Gains(*rest[2:9]), rest[10]
    shape, tokens = bounded.shape, math.prod(bounded.shape[:-1])
    return (
        bounded.new_empty(shape),
        bounded.new_empty(shape),
        output.new_empty(shape),
        bounded.new_empty(0 if gains.post_norm_gain is None else shape),
        bounded.new_empty((gains.norms * (2 if centred else 1), tokens), dtype=widest(bounded)),
        _empty_carrier(bounded),
    )


@torch.library.custom_op("siamesenorm::lean_boundary_backward", mutates_args=())
def lean_boundary_backward(
    grad_settled: Tensor | None,
    grad_identity: Tensor | None,
    grad_h: Tensor,
    rest: Tensor,
    kept: Tensor,
    statistics: Tensor,
    scale: Tensor,
    departure: Tensor,
    post_norm_gain: Tensor | None,
    gate: Tensor | None,
    identity_gain: Tensor,
    input_gain: Tensor | None,
    post_norm_bias: Tensor | None,
    identity_bias: Tensor | None,
    input_bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (X, Y, O), [parts, dim] of the gains, and the rest for the boundary before."""
    gains = Gains(post_norm_gain, gate, identity_gain, input_gain, post_norm_bias, identity_bias, input_bias)
    carried, constants = Carried(rest, departure, eps), Constants(None, scale, None)
    result: Backward = implementation(kept).backward(
        grad_settled, grad_identity, grad_h, kept, carried, statistics, constants, gains, centred
    )
    return result


@lean_boundary_backward.register_fake
def _(
    grad_settled: Tensor | None, grad_identity: Tensor | None, grad_h: Tensor, rest: Tensor, kept: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gains = Gains(*others[3:10])
    stream = kept.new_empty(kept.shape)
    return (
        stream,
        torch.empty_like(stream),
        grad_h.new_empty(kept.shape),
        kept.new_empty((len(gains.present), kept.shape[-1]), dtype=widest(kept)),
        torch.empty_like(stream),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    settled, _, h, unsettled, statistics, _ = output
    scale, departure, gains = inputs[4], inputs[5], Gains(*inputs[6:13])
    if scale.requires_grad or departure.requires_grad:
        raise ValueError("a scale of the fused boundary is a constant: a learned scale needs kernels='plain'")
    kept = settled if gains.post_norm_gain is None else unsettled
    ctx.save_for_backward(kept, statistics, scale, departure, *gains)
    ctx.mark_non_differentiable(unsettled, statistics)
    ctx.set_materialize_grads(False)
    ctx.eps, ctx.centred, ctx.h_dtype, ctx.is_first = *inputs[13:15], h.dtype, inputs[3] is None


def _backward(
    ctx: Any,
    grad_settled: Tensor | None,
    grad_identity: Tensor | None,
    grad_h: Tensor | None,
    _: None,
    __: None,
    rest: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if rest is None:
        raise RuntimeError(
            "kernels='lean' rebuilds the streams from the last ones, and this backward pass does not come from the "
            "model's closing: use kernels='fused' for losses on streams alone"
        )
    kept, statistics, scale, departure, *parts = ctx.saved_tensors
    gains = Gains(*parts)
    if grad_h is None:
        grad_h = kept.new_zeros(kept.shape, dtype=ctx.h_dtype)
    bounded, identity, output, sums, rest = lean_boundary_backward(
        grad_settled, grad_identity, grad_h, rest, kept, statistics, scale, departure, *gains, ctx.eps, ctx.centred
    )
    row = iter(sums.unbind())
    learned = (None if gain is None else next(row).to(gain.dtype) for gain in gains)
    return bounded, output, identity, None if ctx.is_first else rest, None, None, *learned, None, None


lean_boundary.register_autograd(_backward, setup_context=_keep_for_backward)
lean_boundary_backward.register_autograd(refuse_second_derivative)


class HandOut(torch.autograd.Function):
    """Return x as it is; the backward pass gives the carrier of the last boundary its rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, carrier: Tensor, rest: Tensor) -> Tensor:
        """Keep the rest."""
        ctx.save_for_backward(rest)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradient of x, and the rest as the carrier's."""
        (rest,) = ctx.saved_tensors
        return gradients[0], rest, None


def hand_out_rest(hidden: Tensor, carrier: Tensor, bounded: Tensor, identity: Tensor, departure: Tensor) -> Tensor:
    """Return `hidden`, from whose gradient the chain of rests starts: Y - X / s, of the last boundary's streams."""
    rest = identity.detach() - bounded.detach() / departure
    handed_out: Tensor = HandOut.apply(hidden, carrier, rest)  # type: ignore[no-untyped-call]
    return handed_out


def _empty_carrier(x: Tensor) -> Tensor:
    """Return a tensor of the shape of x, of which all elements are one: a gradient must have its tensor's shape."""
    return x.new_zeros(1).expand(x.shape)


def _require_wide(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"kernels='lean' rebuilds streams, which {x.dtype} is too coarse for: use residual_dtype float32"
        )
