"""The boundary between two sublayers as one functional custom operator.

Everything from one sublayer's output O to the next one's input H: the write to one or two streams, the post-norm, the
gate, the identity stream's norm and the input norm; `boundary_plain` has the formulas. It must equal the write and the
read of the plain connections in `topologies`. On CUDA the Triton kernels compute it; elsewhere, in fp64 and for rows
too long for them, the plain formulas do. The operator is opaque to the compiler, mutates nothing, returns what the
backward pass needs among its results, and its gradient is that with respect to each input, whatever else uses the
streams.

**Recomputation** (`kernels="lean"`). With `next_scale` the operator does not keep Y' for the backward pass. The last
write added the same O to both streams, so the *stream difference* Y' - U / s of a boundary equals Y' - X' / s of the
previous one, s being the scale of the write to X between the two. Each backward pass returns it to the previous
boundary, which recomputes its own X' from U, which is kept:

    Y'_i = difference_i + X'_i / s_(i+1),   difference_(i-1) = Y'_i - U_i / s_i

The difference is the gradient of the *recompute handle*, a result of the operator without memory that is an argument of
the next boundary: autograd runs boundaries in reverse order, and nothing else receives that gradient. The closing
starts the chain (`start_recomputation`). A difference that never arrives (the loss does not depend on the closing) is
an error. A row whose recomputed Y' does not have the norm of the forward pass (streams were changed, cut or used twice
between two boundaries) becomes NaN, and so do the gradients below it. fp32 streams recompute Y' to about 1e-6 of its
largest values; 16-bit ones would not, and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.kernels import boundary_plain
from siamesenorm.kernels.boundary_plain import (
    Backward,
    Forward,
    Gains,
    Grads,
    Kept,
    Parts,
    empty_backward,
    empty_forward,
    shares_gradient,
)
from siamesenorm.kernels.launch import can_launch_on

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
LONGEST_ROW = 16_384
"""The longest row that the Triton kernels take."""


PARTS = (
    "Tensor? skip, Tensor? scale, Tensor? identity_scale, Tensor? post_norm_gain, Tensor? gate, Tensor? identity_gain, "
    "Tensor? input_gain, Tensor? post_norm_bias, Tensor? identity_bias, Tensor? input_bias, float eps, bool centred"
)
"""The fields of `Constants`, `Gains` and `Parts` as arguments of the operators."""


@torch.library.custom_op(
    "siamesenorm::boundary",
    mutates_args=(),
    schema=f"(Tensor bounded, Tensor output, Tensor? identity, {PARTS}, Tensor? next_scale=None, Tensor? handle=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def boundary(bounded: Tensor, output: Tensor, identity: Tensor | None, *rest: Any) -> Results:
    """Return (X', Y', H, U, statistics, handle): streams, the next sublayer's input, and what the backward pass needs.

    `bounded`, `output` and `identity` are [..., dim]; X', Y' and U have the streams' dtype, H that of `output`. The
    other arguments are the fields of `Constants` (0-d), of `Gains` ([dim]; a norm is present if its gain is), eps and
    `centred`, and optionally `next_scale` and `handle`. Y' is empty without an identity stream, U without a post-norm.
    U and the statistics, [norms, tokens] of 1 / deviation (each followed by the mean, if centred), carry no gradient.

    With `next_scale`, the scale of the next write, Y' is recomputed in the backward pass; `handle` is the previous
    boundary's, None for the first. Else the handle is empty. Raises ValueError for shapes and dtypes that do not fit.
    """
    parts, next_scale = Parts.of(rest), _optional(rest, 12)
    check(bounded, output, identity, parts.gains)
    if next_scale is not None:
        check_recomputation(bounded, parts)
    result: Forward = implementation(bounded).forward(bounded, output, identity, parts)
    return *result, _new_handle(bounded, next_scale)


@boundary.register_fake
def _(bounded: Tensor, output: Tensor, identity: Tensor | None, *rest: Any) -> Results:
    parts = Parts.of(rest)
    check(bounded, output, identity, parts.gains)
    return *empty_forward(bounded, output, identity, parts), _new_handle(bounded, _optional(rest, 12))


@torch.library.custom_op(
    "siamesenorm::boundary_backward",
    mutates_args=(),
    schema="(Tensor? grad_bounded_next, Tensor? grad_identity, Tensor grad_h, Tensor kept, Tensor? identity, "
    f"Tensor statistics, {PARTS}, Tensor? next_scale=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def boundary_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (X, Y, O), [parts, dim] of the gains and biases present, and the stream difference.

    The arguments are the gradients of (X', Y', H), and what was kept: U where there is a post-norm and X' where there
    is none; Y' where it is normalised, with `next_scale` the stream difference of this boundary; the statistics. The
    rest is as for `boundary`. See `Backward` for which results are empty.
    """
    grads, kept, parts = _backward_arguments(arguments)
    result: Backward = implementation(kept.bounded).backward(grads, kept, parts)
    return result


@boundary_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_backward(*_backward_arguments(arguments))


def _backward_arguments(arguments: tuple[Any, ...]) -> tuple[Grads, Kept, Parts]:
    """Return the arguments of `boundary_backward` with their names."""
    stream, identity, statistics, *rest = arguments[3:]
    return Grads(*arguments[:3]), Kept(stream, identity, statistics, _optional(rest, 12)), Parts.of(rest)


def _optional(values: Sequence[Any], index: int) -> Any:
    """Return an optional argument, which the dispatcher leaves out where it has its default, None."""
    return values[index] if index < len(values) else None


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    bounded_next, identity, h, updated, statistics, handle = output
    constants, gains, eps, centred = Parts.of(inputs[3:])
    next_scale = inputs[15]
    if any(constant is not None and constant.requires_grad for constant in (*constants, next_scale)):
        raise ValueError("a scale of the fused boundary is a constant: a learned scale needs kernels='plain'")
    kept = bounded_next if gains.post_norm_gain is None else updated
    keeps_identity = gains.identity_gain is not None and next_scale is None
    ctx.save_for_backward(kept, identity if keeps_identity else None, statistics, next_scale, *constants, *gains)
    without_gradient = [updated, statistics]
    if inputs[2] is None:
        without_gradient.append(identity)
    if next_scale is None:
        without_gradient.append(handle)
    ctx.mark_non_differentiable(*without_gradient)
    ctx.set_materialize_grads(False)
    ctx.fixed, ctx.h_dtype, ctx.takes_handle = (eps, centred), h.dtype, inputs[16] is not None


def _backward(
    ctx: Any,
    grad_bounded_next: Tensor | None,
    grad_identity: Tensor | None,
    grad_h: Tensor | None,
    _: None,
    __: None,
    difference: Tensor | None,
) -> tuple[Tensor | None, ...]:
    stream, identity, statistics, next_scale, *learned = ctx.saved_tensors
    if next_scale is not None and difference is None:
        raise RuntimeError(
            "kernels='lean' recomputes the streams from the last ones, and this loss does not depend on the model's "
            "closing: use kernels='fused' for losses on streams alone"
        )
    if grad_h is None:
        grad_h = stream.new_zeros(stream.shape, dtype=ctx.h_dtype)
    arguments = (
        grad_bounded_next, grad_identity, grad_h, stream, identity if next_scale is None else difference, statistics,
        *learned, *ctx.fixed, next_scale,
    )  # fmt: skip
    bounded, through_norm, output, sums, previous = boundary_backward(*arguments)
    grads, kept, parts = _backward_arguments(arguments)
    row = iter(sums.unbind())
    return (
        bounded,
        bounded if shares_gradient(grads, kept, parts) else output,
        grad_identity if parts.gains.identity_gain is None else through_norm,
        *(None for _ in parts.constants),
        *(None if gain is None else next(row).to(gain.dtype) for gain in parts.gains),
        *(None, None, None),  # eps, centred, next_scale
        previous if ctx.takes_handle else None,
    )


def refuse_second_derivative(*_: Any) -> None:
    """Raise RuntimeError: the backward operator has no gradient of its own."""
    raise RuntimeError("the fused boundary has no second derivative: use kernels='plain'")


boundary.register_autograd(_backward, setup_context=_keep_for_backward)
boundary_backward.register_autograd(refuse_second_derivative)


class StartRecomputation(torch.autograd.Function):
    """Return x as it is; in the backward pass the handle's gradient is the stream difference."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Tensor, difference: Tensor) -> Tensor:
        """Keep the difference."""
        ctx.save_for_backward(difference)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradient of x, and the difference as the handle's."""
        (difference,) = ctx.saved_tensors
        return gradients[0], difference, None


def start_recomputation(hidden: Tensor, handle: Tensor, bounded: Tensor, identity: Tensor, scale: Tensor) -> Tensor:
    """Return `hidden`; its backward pass gives the last boundary the difference Y - X / s of the final streams."""
    started: Tensor = StartRecomputation.apply(hidden, handle, identity.detach() - bounded.detach() / scale)  # type: ignore[no-untyped-call]
    return started


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
    """Raise ValueError where a kernel would read beyond its tensors."""
    for name, part in (("output", output), ("identity stream", identity)):
        if part is not None and part.shape != bounded.shape:
            raise ValueError(
                f"the {name} is {list(part.shape)}, the bounded stream {list(bounded.shape)}: give both one shape"
            )
    if identity is not None and identity.dtype != bounded.dtype:
        raise ValueError(f"streams of {bounded.dtype} and {identity.dtype}: give both one dtype")
    for name, gain in gains._asdict().items():
        if gain is not None and gain.shape != bounded.shape[-1:]:
            raise ValueError(f"{name} is {list(gain.shape)}: it must be [{bounded.shape[-1]}]")
    if gains.identity_gain is not None and identity is None:
        raise ValueError("a norm of the identity stream without an identity stream: leave out its gain")


def check_recomputation(bounded: Tensor, parts: Parts) -> None:
    """Raise an error where Y' cannot be recomputed from the stream difference."""
    if bounded.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"kernels='lean' recomputes streams, which {bounded.dtype} is too coarse for: use residual_dtype float32"
        )
    constants = parts.constants
    if parts.gains.identity_gain is None or constants.skip is not None or constants.identity_scale is not None:
        raise ValueError("Y' is recomputed only where it is normalised and the write is X + s O, Y + O")


def _new_handle(x: Tensor, next_scale: Tensor | None) -> Tensor:
    """Return a handle of the shape of x (its gradient must have its shape) whose elements are all one number."""
    return x.new_empty(0) if next_scale is None else x.new_zeros(1).expand(x.shape)
