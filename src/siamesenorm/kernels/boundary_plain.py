"""The formulas of the boundary between two sublayers, in plain PyTorch: what the Triton kernels must equal.

With a pending output O, the streams X and Y, the constants a, s, c, and N any of RMSNorm and LayerNorm:

    U = a X + s O,  X' = N_X(U),  Y' = Y + c O,  Z = gate X' + N_Y(Y'),  H = N_in(Z)

Every part may be absent: a stream that is not there, a norm or a gate that is the identity, a constant that is 1. With
x^ = (U - mean) r, r = 1 / deviation, and likewise y^ and z^, and J(v, n, r) = r (v - n mean(v n) - mean(v)), where
RMSNorm has no means:

    dZ = J(dH g_in, z^, r_z);  dX' += gate dZ;  dU = J(dX' g_X, x^, r_x);  dY = dY' + J(dZ g_Y, y^, r_y)
    dX = a dU;  dO = s dU + c dY

All arithmetic is in fp32, or in fp64 for fp64 streams; what is stored has its tensor's dtype. Row statistics are of the
streams before they are rounded for storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from siamesenorm.kernels.norm_plain import normalise_rows, sum_over_tokens, widest


class Constants(NamedTuple):
    """The 0-d factors a, s and c; None is 1."""

    skip: Tensor | None
    scale: Tensor | None
    identity_scale: Tensor | None


class Gains(NamedTuple):
    """Gains, gate and biases, [dim] each, in the order in which the backward pass returns their gradients."""

    post_norm_gain: Tensor | None
    gate: Tensor | None
    identity_gain: Tensor | None
    input_gain: Tensor | None
    post_norm_bias: Tensor | None
    identity_bias: Tensor | None
    input_bias: Tensor | None

    @property
    def present(self) -> list[Tensor]:
        """The ones that are not None."""
        return [gain for gain in self if gain is not None]

    @property
    def norms(self) -> int:
        """The number of norms."""
        return sum(gain is not None for gain in (self.post_norm_gain, self.identity_gain, self.input_gain))


class Parts(NamedTuple):
    """What a boundary computes with besides its streams; `centred` makes all norms LayerNorms."""

    constants: Constants
    gains: Gains
    eps: float
    centred: bool

    @classmethod
    def of(cls, values: Sequence[Any]) -> Parts:
        """Return the parts from one sequence: constants, gains, eps, `centred`; ignore what follows."""
        return cls(Constants(*values[:3]), Gains(*values[3:10]), *values[10:12])


class Forward(NamedTuple):
    """What the forward pass returns: X', Y', H, U and the row statistics; empty tensors stand for absent ones.

    `statistics` is [norms, tokens] of 1 / deviation, or [2 norms, tokens] with each norm's mean after it.
    """

    bounded_next: Tensor
    identity: Tensor
    h: Tensor
    updated: Tensor
    statistics: Tensor


class Grads(NamedTuple):
    """The gradients of X', Y' and H; None is zero."""

    bounded_next: Tensor | None
    identity: Tensor | None
    h: Tensor


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass.

    `bounded` is U where there is a post-norm, else X'. `identity` is Y', None where it is not normalised; with
    `next_scale`, the scale of the next write to X, it is Y' - X' / `next_scale`, from which Y' is recomputed.
    """

    bounded: Tensor
    identity: Tensor | None
    statistics: Tensor
    next_scale: Tensor | None = None


class Backward(NamedTuple):
    """What the backward pass returns: the gradients of X, Y, O, and [parts, dim] of the gains that are present.

    Empty are that of Y where Y' is not normalised (it is then that of Y'), and that of O where it is that of X.
    `difference` is the stream difference of the previous boundary, and empty where Y' was kept.
    """

    bounded: Tensor
    identity: Tensor
    output: Tensor
    gains: Tensor
    difference: Tensor


def empty_forward(bounded: Tensor, output: Tensor, identity: Tensor | None, parts: Parts) -> Forward:
    """Return memory for the results of the forward pass."""
    tokens, has_post_norm = math.prod(bounded.shape[:-1]), parts.gains.post_norm_gain is not None
    return Forward(
        bounded.new_empty(bounded.shape),
        bounded.new_empty(0 if identity is None else bounded.shape),
        output.new_empty(bounded.shape),
        bounded.new_empty(bounded.shape if has_post_norm else 0),
        bounded.new_empty((parts.gains.norms * (2 if parts.centred else 1), tokens), dtype=widest(bounded)),
    )


def empty_backward(grads: Grads, kept: Kept, parts: Parts) -> Backward:
    """Return memory for the results of the backward pass."""
    stream, gains = kept.bounded, parts.gains
    return Backward(
        stream.new_empty(stream.shape),
        stream.new_empty(0 if gains.identity_gain is None else stream.shape),
        grads.h.new_empty(0 if shares_gradient(grads, kept, parts) else stream.shape),
        stream.new_empty((len(gains.present), stream.shape[-1]), dtype=widest(stream)),
        stream.new_empty(0 if kept.next_scale is None else stream.shape),
    )


def shares_gradient(grads: Grads, kept: Kept, parts: Parts) -> bool:
    """Return whether the gradient of O is that of X: then it is not written a second time."""
    constants, gains, _, _ = parts
    alone = grads.identity is None and gains.identity_gain is None
    return alone and constants.skip is None and constants.scale is None and grads.h.dtype == kept.bounded.dtype


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return factor x; None is 1."""
    return x if factor is None else x * factor.to(x.dtype)


def affine(normalised: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """Return gain n + bias."""
    scaled = normalised * gain.to(normalised.dtype)
    return scaled if bias is None else scaled + bias.to(normalised.dtype)


def forward(bounded: Tensor, output: Tensor, identity: Tensor | None, parts: Parts) -> Forward:
    """Complete the pending write and read."""
    constants, gains, eps, centred = parts
    wide, statistics = widest(bounded), list[Tensor]()
    update = output.contiguous().to(wide)
    bounded_next = updated = times(bounded.contiguous().to(wide), constants.skip) + times(update, constants.scale)

    def normalise(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        normalised, found = normalise_rows(x, eps, centred)
        statistics.extend(found)
        return affine(normalised, gain, bias)

    if gains.post_norm_gain is not None:
        bounded_next = normalise(updated, gains.post_norm_gain, gains.post_norm_bias)
    h, identity_next = times(bounded_next, gains.gate), bounded.new_empty(0)
    if identity is not None:
        summed = identity.contiguous().to(wide) + times(update, constants.identity_scale)
        identity_next = summed.to(identity.dtype)
        if gains.identity_gain is not None:
            h = h + normalise(summed, gains.identity_gain, gains.identity_bias)
    if gains.input_gain is not None:
        h = normalise(h, gains.input_gain, gains.input_bias)

    return Forward(
        bounded_next.to(bounded.dtype),
        identity_next,
        h.to(output.dtype, copy=h is bounded_next),  # an operator's results share no memory
        bounded.new_empty(0) if gains.post_norm_gain is None else updated.to(bounded.dtype),
        torch.stack([value.flatten() for value in statistics])
        if statistics
        else bounded.new_empty((0, bounded.shape[:-1].numel()), dtype=wide),
    )


def _verify(normalised: Tensor, inverse: Tensor, eps: float) -> Tensor:
    """Return y^, with NaN in every row whose recomputed Y' is not the one that the forward pass normalised."""
    one = normalised.square().mean(-1, keepdim=True) + eps * inverse.square()
    return normalised.masked_fill((one - 1).abs() > 1e-3, float("nan"))


def backward(grads: Grads, kept: Kept, parts: Parts) -> Backward:
    """Return the gradients from those of the results and what the forward pass kept."""
    constants, gains, eps, centred = parts
    stream, identity, statistics, next_scale = kept
    wide, rows = widest(stream), iter(statistics.reshape(len(statistics), *stream.shape[:-1], 1))

    def normalise(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x^ and 1 / deviation; statistics are in the order of post-norm, identity norm, input norm."""
        inverse = next(rows)
        return (x - next(rows) if centred else x) * inverse, inverse

    def pull_back(v: Tensor, normalised: Tensor, inverse: Tensor) -> Tensor:
        """Return J(v, n, r)."""
        result = v - normalised * (v * normalised).mean(-1, keepdim=True)
        return inverse * (result - v.mean(-1, keepdim=True) if centred else result)

    sums: dict[str, Tensor] = {}
    bounded_next, difference = stream.to(wide), stream.new_empty(0)
    if gains.post_norm_gain is not None:
        x_hat, x_inverse = normalise(bounded_next)
        bounded_next = affine(x_hat, gains.post_norm_gain, gains.post_norm_bias)
    total = times(bounded_next, gains.gate)
    if gains.identity_gain is not None and identity is not None:
        y = identity.to(wide)
        if next_scale is not None:
            y = y + bounded_next / next_scale.to(wide)
            updated = stream.to(wide)
            difference = y - (updated if constants.scale is None else updated / constants.scale.to(wide))
        y_hat, y_inverse = normalise(y)
        if next_scale is not None:
            y_hat = _verify(y_hat, y_inverse, eps)
        total = total + affine(y_hat, gains.identity_gain, gains.identity_bias)

    d_total = grads.h.contiguous().to(wide)
    if gains.input_gain is not None:
        z_hat, z_inverse = normalise(total)
        sums.update(input_gain=d_total * z_hat, input_bias=d_total)
        d_total = pull_back(times(d_total, gains.input_gain), z_hat, z_inverse)

    if gains.gate is not None:
        sums["gate"] = d_total * bounded_next
    d_bounded = times(d_total, gains.gate)
    if grads.bounded_next is not None:
        d_bounded = d_bounded + grads.bounded_next.contiguous().to(wide)
    if gains.post_norm_gain is not None:
        sums.update(post_norm_gain=d_bounded * x_hat, post_norm_bias=d_bounded)
        d_bounded = pull_back(times(d_bounded, gains.post_norm_gain), x_hat, x_inverse)

    d_identity = None if grads.identity is None else grads.identity.contiguous().to(wide)
    if gains.identity_gain is not None:
        sums.update(identity_gain=d_total * y_hat, identity_bias=d_total)
        through = pull_back(times(d_total, gains.identity_gain), y_hat, y_inverse)
        d_identity = through if d_identity is None else through + d_identity
    d_output = times(d_bounded, constants.scale)
    if d_identity is not None:
        d_output = d_output + times(d_identity, constants.identity_scale)

    if d_identity is None or gains.identity_gain is None:
        d_identity = stream.new_empty(0)
    d_bounded = times(d_bounded, constants.skip)
    return Backward(
        d_bounded.to(stream.dtype, copy=d_bounded is grads.h),
        d_identity.to(stream.dtype),
        stream.new_empty(0)
        if shares_gradient(grads, kept, parts)
        else d_output.to(grads.h.dtype, copy=d_output is grads.h),
        sum_over_tokens(sums, gains._asdict(), total),
        difference.to(stream.dtype),
    )
