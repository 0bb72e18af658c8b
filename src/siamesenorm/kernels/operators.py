"""The boundary between two sublayers, and a norm of every row, as functional custom operators.

The boundary is everything from one sublayer's output O to the next one's input H: the write to one or two streams, the
post-norm, the gate, the identity stream's norm and the input norm. `boundary_plain` and `norm_plain` have the formulas,
which equal the plain connections in `topologies` and the norms in `norms`. Triton kernels compute them on CUDA; plain
PyTorch elsewhere, in fp64 and for rows that are too long.

Operators are opaque to the compiler, mutate nothing, and return what the backward pass needs among their results. A
norm keeps x, one number a token (two for LayerNorm) and one a head; its gradient can be differentiated again, at the
cost of the plain formulas. `torch.func` cannot transform operators.

**Recomputation** (`kernels="lean"`). With `next_scale` the boundary does not keep Y' for the backward pass. The last
write added the same O to both streams, so the *stream difference* Y' - U / s of a boundary equals Y' - X' / s of the
previous one, s being the scale of the write to X between the two. Each backward pass returns it to the previous
boundary, which recomputes its own X' from U, which is kept:

    Y'_i = difference_i + X'_i / s_(i+1),   difference_(i-1) = Y'_i - U_i / s_i

The difference is the gradient of the *recompute handle*, a result of the operator without memory that is an argument of
the next boundary: autograd runs boundaries in reverse order, and nothing else receives that gradient. The closing
starts the chain (`start_recomputation`); a loss that does not depend on the closing is an error. A row whose recomputed
Y' has another norm than in the forward pass (streams changed, cut or used twice between two boundaries) becomes NaN,
with the gradients below it. fp32 streams recompute Y' to about 1e-6 of its largest values; 16-bit ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.kernels import boundary_plain, norm_plain
from siamesenorm.kernels.boundary_plain import Backward, Forward, Gains, Grads, Kept, Parts
from siamesenorm.kernels.launch import can_launch_on, power_of_two
from siamesenorm.kernels.norm_plain import ACTIVATIONS, Form, Weights, widest

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
LONGEST_ROW = 16_384
"""The longest row that the Triton kernels take, once the heads of a norm and their channels are powers of two."""


# --- boundaries


BOUNDARY_PARTS = (
    "Tensor? skip, Tensor? scale, Tensor? identity_scale, Tensor? post_norm_gain, Tensor? gate, Tensor? identity_gain, "
    "Tensor? input_gain, Tensor? post_norm_bias, Tensor? identity_bias, Tensor? input_bias, float eps, bool centred"
)
"""The fields of `Constants`, `Gains` and `Parts` as arguments of the operators."""


@torch.library.custom_op(
    "siamesenorm::boundary",
    mutates_args=(),
    schema=f"(Tensor bounded, Tensor output, Tensor? identity, {BOUNDARY_PARTS}, Tensor? next_scale=None, "
    "Tensor? handle=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    check_boundary(bounded, output, identity, parts.gains)
    if next_scale is not None:
        check_recomputation(bounded, parts)
    result: Forward = implementation(bounded).forward(bounded, output, identity, parts)
    return *result, _new_handle(bounded, next_scale)


@boundary.register_fake
def _(bounded: Tensor, output: Tensor, identity: Tensor | None, *rest: Any) -> Results:
    parts = Parts.of(rest)
    check_boundary(bounded, output, identity, parts.gains)
    return *boundary_plain.empty_forward(bounded, output, identity, parts), _new_handle(bounded, _optional(rest, 12))


@torch.library.custom_op(
    "siamesenorm::boundary_backward",
    mutates_args=(),
    schema="(Tensor? grad_bounded_next, Tensor? grad_identity, Tensor grad_h, Tensor kept, Tensor? identity, "
    f"Tensor statistics, {BOUNDARY_PARTS}, Tensor? next_scale=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    return boundary_plain.empty_backward(*_backward_arguments(arguments))


def _backward_arguments(arguments: tuple[Any, ...]) -> tuple[Grads, Kept, Parts]:
    """Return the arguments of `boundary_backward` with their names."""
    stream, identity, statistics, *rest = arguments[3:]
    return Grads(*arguments[:3]), Kept(stream, identity, statistics, _optional(rest, 12)), Parts.of(rest)


def _optional(values: Sequence[Any], index: int) -> Any:
    """Return an optional argument, which the dispatcher leaves out where it has its default, None."""
    return values[index] if index < len(values) else None


def _keep_for_boundary(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    bounded_next, identity, h, updated, statistics, handle = output
    constants, gains, eps, centred = Parts.of(inputs[3:])
    next_scale = inputs[15]
    if any(constant is not None and constant.requires_grad for constant in (*constants, next_scale)):
        raise ValueError("a scale of the fused boundary is a constant: a learned scale needs kernels='plain'")
    kept = bounded_next if gains.post_norm_gain is None else updated
    keeps_identity = gains.identity_gain is not None and next_scale is None
    ctx.save_for_backward(kept, identity if keeps_identity else None, statistics, next_scale, *constants, *gains)
    absent = ([identity] if inputs[2] is None else []) + ([handle] if next_scale is None else [])
    ctx.mark_non_differentiable(updated, statistics, *absent)
    ctx.set_materialize_grads(False)
    ctx.fixed, ctx.h_dtype, ctx.takes_handle = (eps, centred), h.dtype, inputs[16] is not None


def _boundary_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_bounded_next, grad_identity, grad_h, _, _, difference = gradients
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
    return (
        bounded,
        bounded if boundary_plain.shares_gradient(grads, kept, parts) else output,
        grad_identity if parts.gains.identity_gain is None else through_norm,
        *(None for _ in parts.constants),
        *norm_plain.by_weight(sums, parts.gains),
        *(None, None, None),  # eps, centred, next_scale
        previous if ctx.takes_handle else None,
    )


def refuse_second_derivative(*_: Any) -> None:
    """Raise RuntimeError: the backward operator has no gradient of its own."""
    raise RuntimeError("the fused boundary has no second derivative: use kernels='plain'")


boundary.register_autograd(_boundary_backward, setup_context=_keep_for_boundary)
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
    if has_boundary_kernels(x):
        from siamesenorm.kernels import boundary_launch

        return boundary_launch
    return boundary_plain


def has_boundary_kernels(x: Tensor) -> bool:
    """Return whether the boundary of streams like x is computed by Triton kernels."""
    return can_launch_on(x) and x.shape[-1] <= LONGEST_ROW


def check_boundary(bounded: Tensor, output: Tensor, identity: Tensor | None, gains: Gains) -> None:
    """Raise ValueError where a kernel would read beyond its tensors."""
    check_shapes({"output": output, "identity stream": identity}, bounded.shape)
    check_shapes(gains._asdict(), bounded.shape[-1:])
    if identity is not None and identity.dtype != bounded.dtype:
        raise ValueError(f"streams of {bounded.dtype} and {identity.dtype}: give both one dtype")
    if gains.identity_gain is not None and identity is None:
        raise ValueError("a norm of the identity stream without an identity stream: leave out its gain")


def check_shapes(tensors: Mapping[str, Tensor | None], shape: torch.Size) -> None:
    """Raise ValueError if a tensor that is present has another shape."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}: it must be {list(shape)}")


def check_recomputation(bounded: Tensor, parts: Parts) -> None:
    """Raise an error where Y' cannot be recomputed from the stream difference."""
    if bounded.dtype not in (torch.float32, torch.float64):
        raise UserError(f"kernels='lean' cannot recompute streams of {bounded.dtype}: use residual_dtype float32")
    constants = parts.constants
    if parts.gains.identity_gain is None or constants.skip is not None or constants.identity_scale is not None:
        raise ValueError("Y' is recomputed only where it is normalised and the write is X + s O, Y + O")


def _new_handle(x: Tensor, next_scale: Tensor | None) -> Tensor:
    """Return a handle of the shape of x (its gradient must have its shape) whose elements are all one number."""
    return x.new_empty(0) if next_scale is None else x.new_zeros(1).expand(x.shape)


# --- norms


NORM_PARTS = (
    "Tensor? alpha, Tensor? beta, Tensor? gain, Tensor? bias, "
    "float offset, int heads, float dot_scale, str activation, float eps, bool centred"
)
"""The fields of `Weights` and `Form` as arguments of the operators."""


@torch.library.custom_op(
    "siamesenorm::normalise", mutates_args=(), schema=f"(Tensor x, {NORM_PARTS}) -> (Tensor, Tensor, Tensor)"
)
def normalise(x: Tensor, *parts: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = (gain + offset + sigma(dot_scale x . beta) alpha) x^ + bias, the statistics, and the dot products.

    x is [..., dim]; the other arguments are the fields of `Weights` and `Form`. x and beta are cut into `heads` parts,
    and part h of the row has its own dot product. y has the dtype of x; the arithmetic is in at least fp32. Statistics
    and dot products are for the backward pass and carry no gradient. Raises ValueError for shapes that do not fit.
    """
    weights, form = Weights(*parts[:4]), Form(*parts[4:])
    check_norm(x, weights, form)
    if has_norm_kernels(x, form.heads):
        from siamesenorm.kernels import norm_triton

        return norm_triton.forward(x, weights, form)
    return norm_plain.forward(x, weights, form)


@normalise.register_fake
def _(x: Tensor, *parts: Any) -> tuple[Tensor, Tensor, Tensor]:
    weights, form = Weights(*parts[:4]), Form(*parts[4:])
    check_norm(x, weights, form)
    return norm_plain.empty_results(x, weights, form)


@torch.library.custom_op(
    "siamesenorm::normalise_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor x, Tensor statistics, Tensor dots, {NORM_PARTS}) -> (Tensor, Tensor)",
)
def normalise_backward(grad: Tensor, x: Tensor, statistics: Tensor, dots: Tensor, *parts: Any) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and [parts, dim] of the present weights, in order, in at least fp32."""
    weights, form = Weights(*parts[:4]), Form(*parts[4:])
    if has_norm_kernels(x, form.heads):
        from siamesenorm.kernels import norm_triton

        return norm_triton.backward(grad, x, statistics, dots, weights, form)
    return norm_plain.backward(grad, x, weights, form)


@normalise_backward.register_fake
def _(grad: Tensor, x: Tensor, statistics: Tensor, dots: Tensor, *parts: Any) -> tuple[Tensor, Tensor]:
    weights = Weights(*parts[:4])
    return x.new_empty(x.shape), x.new_empty((len(weights.names), x.shape[-1]), dtype=widest(x))


def _keep_for_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, statistics, dots = output
    ctx.save_for_backward(inputs[0], statistics, dots, *inputs[1:5])
    ctx.mark_non_differentiable(statistics, dots)
    ctx.set_materialize_grads(False)
    ctx.form = Form(*inputs[5:])


def _norm_backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    x, statistics, dots, *parts = ctx.saved_tensors
    weights, fixed = Weights(*parts), (None,) * len(Form._fields)
    if grad is None:
        return (None,) * (1 + len(weights)) + fixed
    if torch.is_grad_enabled():  # the gradient will be differentiated, and an operator of its own would stop that
        grad_x, sums = norm_plain.backward(grad, x, weights, ctx.form)
    else:
        grad_x, sums = normalise_backward(grad, x, statistics, dots, *weights, *ctx.form)
    return grad_x, *norm_plain.by_weight(sums, weights), *fixed


normalise.register_autograd(_norm_backward, setup_context=_keep_for_norm)


def has_norm_kernels(x: Tensor, heads: int = 1) -> bool:
    """Return whether Triton kernels compute rows like those of x."""
    return can_launch_on(x) and tile_length(x.shape[-1], heads) <= LONGEST_ROW


def tile_length(dim: int, heads: int) -> int:
    """Return the length of a row once heads and channels of a head are rounded up to powers of two."""
    heads = 1 if heads == dim else heads
    return power_of_two(heads) * power_of_two(dim // heads)


def check_norm(x: Tensor, weights: Weights, form: Form) -> None:
    """Raise ValueError where a kernel would read beyond its tensors."""
    check_shapes(weights._asdict(), x.shape[-1:])
    if weights.alpha is not None and weights.beta is None:
        raise ValueError("alpha without beta: give both, or leave alpha out")
    if form.heads < 1 or x.shape[-1] % form.heads:
        raise ValueError(f"{form.heads} heads do not divide rows of {x.shape[-1]}: choose a divisor")
    if form.activation not in ACTIVATIONS:
        raise ValueError(f"activation {form.activation!r}: choose from {', '.join(ACTIVATIONS)}")
