"""The boundary between two sublayers of SiameseNorm as one functional custom operator.

Everything from one sublayer's output O to the next one's input H: the write (X + s O, Y + O), the settle, the gate, the
identity stream's norm and the input norm. It must equal `topologies.siamese.SiameseConnection` (write, then read) with
RMSNorms. The body is plain PyTorch in at least fp32; forward and backward are the formulas that a kernel fuses.

With x^ = U r_x, y^ = Y r_y, Z = gate X + g_Y y^, z^ = Z r_z, U = X_prev + s O, H = g_in z^ and
J(v, n, r) = r (v - n mean(v n)):
    dZ = J(dH g_in, z^, r_z);  dX = dX' + gate dZ;  dU = J(dX g_X, x^, r_x);  dY = dY' + J(dZ g_Y, y^, r_y)
    dX_prev = dU;  dO = dY + s dU
"""

from __future__ import annotations

import torch
from torch import Tensor

_Boundary = tuple[Tensor, Tensor, Tensor, Tensor]


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * inverse, inverse


def _pull_back(gradient: Tensor, normalised: Tensor, inverse: Tensor) -> Tensor:
    return inverse * (gradient - normalised * (gradient * normalised).mean(-1, keepdim=True))


def _token_sum(x: Tensor, like: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0).to(like.dtype)


@torch.library.custom_op("siamesenorm::siamese_boundary", mutates_args=())
def siamese_boundary(
    bounded: Tensor,
    identity: Tensor,
    output: Tensor,
    scale: Tensor,
    identity_gain: Tensor,
    settle_gain: Tensor | None,
    gate: Tensor | None,
    input_gain: Tensor | None,
    eps: float,
) -> _Boundary:
    """Return (X', Y', H, U): the settled streams, the next sublayer's input and the sum before the settle.

    `bounded`, `identity` and `output` are [..., dim]; X', Y' have the streams' dtype, H the dtype of `output`. Gains
    are [dim], `scale` is 0-d; None leaves a norm or the gate out. U is what the backward pass keeps; it carries no
    gradient and is empty where there is no settle.
    """
    wide = torch.promote_types(bounded.dtype, torch.float32)
    update = output.to(wide)
    settled = unsettled = bounded.to(wide) + update * scale.to(wide)
    identity_next = identity.to(wide) + update
    if settle_gain is not None:
        settled = _normalise(unsettled, eps)[0] * settle_gain.to(wide)
    carried = settled if gate is None else settled * gate.to(wide)
    h = carried + _normalise(identity_next, eps)[0] * identity_gain.to(wide)
    if input_gain is not None:
        h = _normalise(h, eps)[0] * input_gain.to(wide)
    kept = bounded.new_empty(0) if settle_gain is None else unsettled.to(bounded.dtype)
    return settled.to(bounded.dtype), identity_next.to(identity.dtype), h.to(output.dtype), kept


@siamese_boundary.register_fake
def _(
    bounded: Tensor,
    identity: Tensor,
    output: Tensor,
    scale: Tensor,
    identity_gain: Tensor,
    settle_gain: Tensor | None,
    gate: Tensor | None,
    input_gain: Tensor | None,
    eps: float,
) -> _Boundary:
    kept = bounded.new_empty(0) if settle_gain is None else torch.empty_like(bounded)
    return torch.empty_like(bounded), torch.empty_like(identity), torch.empty_like(output), kept


@torch.library.custom_op("siamesenorm::siamese_boundary_backward", mutates_args=())
def siamese_boundary_backward(
    grad_bounded: Tensor,
    grad_identity: Tensor,
    grad_h: Tensor,
    bounded: Tensor,
    identity: Tensor,
    scale: Tensor,
    identity_gain: Tensor,
    settle_gain: Tensor | None,
    gate: Tensor | None,
    input_gain: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of (X_prev, Y_prev, O, identity gain, settle gain, gate, input gain).

    `bounded` is U where there is a settle and X' where there is none; `identity` is Y'. Gradients of absent gains are
    empty.
    """
    wide = torch.promote_types(bounded.dtype, torch.float32)
    settled = bounded.to(wide)
    if settle_gain is not None:
        bounded_hat, bounded_inverse = _normalise(settled, eps)
        settled = bounded_hat * settle_gain.to(wide)
    identity_hat, identity_inverse = _normalise(identity.to(wide), eps)
    total = settled if gate is None else settled * gate.to(wide)
    total = total + identity_hat * identity_gain.to(wide)

    grad_total, grad_input_gain = grad_h.to(wide), bounded.new_empty(0)
    if input_gain is not None:
        total_hat, total_inverse = _normalise(total, eps)
        grad_input_gain = _token_sum(grad_total * total_hat, input_gain)
        grad_total = _pull_back(grad_total * input_gain.to(wide), total_hat, total_inverse)

    grad_gate = bounded.new_empty(0) if gate is None else _token_sum(grad_total * settled, gate)
    grad_settled = grad_bounded.to(wide) + (grad_total if gate is None else grad_total * gate.to(wide))
    grad_settle_gain = bounded.new_empty(0)
    if settle_gain is not None:
        grad_settle_gain = _token_sum(grad_settled * bounded_hat, settle_gain)
        grad_settled = _pull_back(grad_settled * settle_gain.to(wide), bounded_hat, bounded_inverse)

    grad_identity_gain = _token_sum(grad_total * identity_hat, identity_gain)
    grad_stream = grad_identity.to(wide) + _pull_back(
        grad_total * identity_gain.to(wide), identity_hat, identity_inverse
    )
    grad_output = grad_stream + grad_settled * scale.to(wide)
    return (
        grad_settled.to(bounded.dtype),
        grad_stream.to(identity.dtype),
        grad_output.to(grad_h.dtype),
        grad_identity_gain,
        grad_settle_gain,
        grad_gate,
        grad_input_gain,
    )


@siamese_boundary_backward.register_fake
def _(
    grad_bounded: Tensor,
    grad_identity: Tensor,
    grad_h: Tensor,
    bounded: Tensor,
    identity: Tensor,
    scale: Tensor,
    identity_gain: Tensor,
    settle_gain: Tensor | None,
    gate: Tensor | None,
    input_gain: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gains = [
        bounded.new_empty(0) if gain is None else torch.empty_like(gain) for gain in (settle_gain, gate, input_gain)
    ]
    return (
        torch.empty_like(bounded),
        torch.empty_like(identity),
        torch.empty_like(grad_h),
        torch.empty_like(identity_gain),
        gains[0],
        gains[1],
        gains[2],
    )


def _keep_for_backward(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: _Boundary) -> None:  # type: ignore[type-arg]
    _, _, _, scale, identity_gain, settle_gain, gate, input_gain, eps = inputs
    if scale.requires_grad:
        raise ValueError("the depth scale of the fused boundary is a constant: a learned scale needs kernels='plain'")
    settled, identity, _, unsettled = output
    kept = settled if settle_gain is None else unsettled
    ctx.save_for_backward(kept, identity, scale, identity_gain, settle_gain, gate, input_gain)
    ctx.mark_non_differentiable(unsettled)
    ctx.eps = eps  # type: ignore[attr-defined]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, grad_bounded: Tensor, grad_identity: Tensor, grad_h: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    kept, identity, scale, identity_gain, settle_gain, gate, input_gain = ctx.saved_tensors  # type: ignore[attr-defined]
    gradients = siamese_boundary_backward(
        grad_bounded, grad_identity, grad_h, kept, identity, scale, identity_gain, settle_gain, gate, input_gain,
        ctx.eps,  # type: ignore[attr-defined]
    )  # fmt: skip
    bounded, identity, output, identity_gain_, settle_gain_, gate_, input_gain_ = gradients
    return (
        bounded,
        identity,
        output,
        None,
        identity_gain_,
        settle_gain_ if settle_gain is not None else None,
        gate_ if gate is not None else None,
        input_gain_ if input_gain is not None else None,
        None,
    )


siamese_boundary.register_autograd(_backward, setup_context=_keep_for_backward)
