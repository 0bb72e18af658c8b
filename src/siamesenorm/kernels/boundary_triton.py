"""The Triton kernel of the boundary's forward pass; `boundary_plain` has the formulas that it computes.

A program holds whole rows (one token's channels) in registers, in fp32 whatever the dtypes in memory. A pointer that is
None is an absent part: branches on it are decided when the kernel is compiled. Columns and rows beyond the tensors are
read as zeros, gains too, so that they add nothing to sums.
"""

# This is Triton's language, which mypy cannot check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(pointer, at, inside):
    """Return elements in fp32, and 0 for those that are not inside."""
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, at, value, inside):
    """Store elements in the dtype of their tensor."""
    tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def per_channel(pointer, column, DIM: tl.constexpr):
    """Return a gain, bias or gate as a row, not a vector: its layout is then that of the streams, without exchange."""
    return load_rows(pointer, column[None, :], (column < DIM)[None, :])


@triton.jit
def times(x, constant):
    """Return x times the number at `constant`; None is 1."""
    if constant is not None:
        x *= tl.load(constant).to(tl.float32)
    return x


@triton.jit
def _sums_of_both(x, y):
    """Return the sums of x and of y over a row: together, threads exchange and wait once, not twice."""
    return tl.split(tl.sum(tl.join(x, y), axis=1))


@triton.jit
def _affine(normalised, gain, bias, column, DIM: tl.constexpr):
    result = normalised * per_channel(gain, column, DIM)
    if bias is not None:
        result += per_channel(bias, column, DIM)
    return result


@triton.jit
def _normalise(x, inside, statistics, norm, row, rows, eps, DIM: tl.constexpr, CENTRED: tl.constexpr):
    """Return x^; leave 1 / deviation (and the mean, if it is centred) of norm number `norm` for the backward pass."""
    if CENTRED:
        x = _centre(x, tl.sum(x, axis=1), inside, statistics, norm, row, rows, DIM)
    return _scale(x, tl.sum(x * x, axis=1), statistics, norm, row, rows, eps, DIM, CENTRED)


@triton.jit
def _normalise_both(x, y, inside, statistics, row, rows, eps, DIM: tl.constexpr, CENTRED: tl.constexpr):
    """Return x^ and y^ of the norms 0 and 1, as `_normalise` would."""
    if CENTRED:
        x_sum, y_sum = _sums_of_both(x, y)
        x = _centre(x, x_sum, inside, statistics, 0, row, rows, DIM)
        y = _centre(y, y_sum, inside, statistics, 1, row, rows, DIM)
    x_squares, y_squares = _sums_of_both(x * x, y * y)
    x = _scale(x, x_squares, statistics, 0, row, rows, eps, DIM, CENTRED)
    return x, _scale(y, y_squares, statistics, 1, row, rows, eps, DIM, CENTRED)


@triton.jit
def _centre(x, row_sum, inside, statistics, norm, row, rows, DIM: tl.constexpr):
    mean = row_sum * (1.0 / DIM)
    tl.store(statistics + (2 * norm + 1) * rows + row, mean, mask=row < rows)
    return tl.where(inside, x - mean[:, None], 0.0)


@triton.jit
def _scale(x, squares, statistics, norm, row, rows, eps, DIM: tl.constexpr, CENTRED: tl.constexpr):
    inverse = tl.rsqrt(squares * (1.0 / DIM) + eps)
    tl.store(statistics + (2 * norm if CENTRED else norm) * rows + row, inverse, mask=row < rows)
    return x * inverse[:, None]


@triton.jit
def boundary_forward(
    bounded, identity, output, skip, scale, identity_scale,
    post_norm_gain, post_norm_bias, gate, identity_gain, identity_bias, input_gain, input_bias,
    bounded_next, identity_next, h, updated, statistics,
    rows, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Write the streams after the pending output, the next sublayer's input, and what the backward pass needs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * DIM + column[None, :]
    inside = (row < rows)[:, None] & (column < DIM)[None, :]
    identity_norm: tl.constexpr = 1 if post_norm_gain is not None else 0
    input_norm: tl.constexpr = identity_norm + (1 if identity_gain is not None else 0)

    update = load_rows(output, at, inside)
    x = times(load_rows(bounded, at, inside), skip) + times(update, scale)
    if identity is not None:
        y = load_rows(identity, at, inside) + times(update, identity_scale)
        store_rows(identity_next, at, y, inside)

    if post_norm_gain is not None:
        store_rows(updated, at, x, inside)
        if identity_gain is None:
            x = _normalise(x, inside, statistics, 0, row, rows, eps, DIM, CENTRED)
        else:
            x, y = _normalise_both(x, y, inside, statistics, row, rows, eps, DIM, CENTRED)
        x = _affine(x, post_norm_gain, post_norm_bias, column, DIM)
    store_rows(bounded_next, at, x, inside)

    if gate is not None:
        x *= per_channel(gate, column, DIM)
    if identity_gain is not None:
        if post_norm_gain is None:
            y = _normalise(y, inside, statistics, 0, row, rows, eps, DIM, CENTRED)
        x += _affine(y, identity_gain, identity_bias, column, DIM)
    if input_gain is not None:
        x = _normalise(x, inside, statistics, input_norm, row, rows, eps, DIM, CENTRED)
        x = _affine(x, input_gain, input_bias, column, DIM)
    store_rows(h, at, x, inside)
