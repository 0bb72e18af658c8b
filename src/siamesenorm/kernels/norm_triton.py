"""The Triton kernels of a norm of every row; `norm_plain` has the formulas that they compute.

A program holds tiles of [rows, heads, channels of a head] in registers, in fp32 whatever the dtypes in memory; a norm
without dot products has one head. A pointer that is None is an absent part: branches on it are decided when the kernel
is compiled. Rows, heads and channels beyond the tensors are read as zeros, so that no sum sees them. The backward
kernel is persistent: a program walks over its share of the rows and keeps its sums for the gains in registers; they are
added up in a fixed order afterwards, without atomics.
"""

# This is Triton's language, of which mypy knows no types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from siamesenorm.kernels.boundary_triton import load_rows, store_rows


@triton.jit
def _row_sums(x):
    """Sum [rows, heads, channels] over heads and channels, and keep them as dimensions of 1."""
    return tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def _activate(t, ACTIVATION: tl.constexpr):
    """Return sigma(t) and its slope; tanh by a form that does not overflow, and whose slope does not cancel."""
    if ACTIVATION == "tanh":
        decay = tl.exp(-2.0 * tl.abs(t))
        s = (1.0 - decay) / (1.0 + decay)
        s = tl.where(t < 0.0, -s, s)
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    elif ACTIVATION == "sigmoid":
        s = tl.sigmoid(t)
        slope = s * (1.0 - s)
    elif ACTIVATION == "hardtanh":
        s = tl.minimum(tl.maximum(t, -1.0), 1.0)
        slope = tl.where(tl.abs(t) < 1.0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(t * 0.7071067811865476))
        s = t * below
        slope = below + t * tl.exp(-0.5 * t * t) * 0.3989422804014327
    else:
        tl.static_assert(ACTIVATION == "silu")
        gate = tl.sigmoid(t)
        s = t * gate
        slope = gate * (1.0 + t * (1.0 - gate))
    return s, slope


@triton.jit
def norm_forward(
    x, alpha, beta, gain, bias, y, statistics, dots,
    rows, offset, dot_scale, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write N(x) of ROWS rows, and what the backward pass needs; without `dots`, every channel is its own head."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    head = tl.arange(0, HEAD_BLOCK)[None, :, None]
    width = tl.arange(0, WIDTH_BLOCK)[None, None, :]
    channel = head * WIDTH + width
    of_row = (head < HEADS) & (width < WIDTH)
    at = row * (HEADS * WIDTH) + channel
    inside = (row < rows) & of_row
    # As large as the tile, so that weights are read in the tile's layout rather than exchanged between threads.
    channel, of_row = tl.broadcast_to(channel, at.shape), tl.broadcast_to(of_row, at.shape)

    value = load_rows(x, at, inside)
    scale = tl.full((1, HEAD_BLOCK, WIDTH_BLOCK), 0.0, tl.float32) + offset
    if gain is not None:
        scale += load_rows(gain, channel, of_row)
    if beta is not None:
        t = value * (load_rows(beta, channel, of_row) * dot_scale)
        if dots is not None:
            t = tl.sum(t, axis=2, keep_dims=True)
            tl.store(dots + row * HEADS + head, t, mask=(row < rows) & (head < HEADS))
        s, _ = _activate(t, ACTIVATION)
        if alpha is not None:
            s *= load_rows(alpha, channel, of_row)
        scale += s
    if CENTRED:
        mean = _row_sums(value) * (1.0 / (HEADS * WIDTH))
        tl.store(statistics + rows + row, mean, mask=row < rows)
        value = tl.where(inside, value - mean, 0.0)
    inverse = tl.rsqrt(_row_sums(value * value) * (1.0 / (HEADS * WIDTH)) + eps)
    tl.store(statistics + row, inverse, mask=row < rows)
    value *= inverse * scale
    if bias is not None:
        value += load_rows(bias, channel, of_row)
    store_rows(y, at, value, inside)


@triton.jit
def _store_sums(partials, which, sums, channel, of_row, DIM: tl.constexpr):
    """Leave one program's sums over its rows for the gradient number `which`."""
    at = (which * tl.num_programs(0) + tl.program_id(0)) * DIM + channel
    tl.store(partials + at, tl.sum(sums, axis=0, keep_dims=True), mask=of_row)


@triton.jit
def _store_all_sums(
    partials, alpha, beta, gain, bias, d_alpha, d_beta, d_gain, d_bias, channel, of_row, DIM: tl.constexpr
):  # fmt: skip
    """Leave one program's sums for what is present of alpha, beta, gain and bias, in that order."""
    after_alpha: tl.constexpr = 1 if alpha is not None else 0
    after_beta: tl.constexpr = after_alpha + (1 if beta is not None else 0)
    after_gain: tl.constexpr = after_beta + (1 if gain is not None else 0)
    if alpha is not None:
        _store_sums(partials, 0, d_alpha, channel, of_row, DIM)
    if beta is not None:
        _store_sums(partials, after_alpha, d_beta, channel, of_row, DIM)
    if gain is not None:
        _store_sums(partials, after_beta, d_gain, channel, of_row, DIM)
    if bias is not None:
        _store_sums(partials, after_gain, d_bias, channel, of_row, DIM)


@triton.jit
def norm_backward(
    grad, x, alpha, beta, gain, bias, statistics, dots, grad_x, grad_dots, partials,
    rows, offset, dot_scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, and each program's share of those of alpha, beta, gain and bias."""
    head = tl.arange(0, HEAD_BLOCK)[None, :, None]
    width = tl.arange(0, WIDTH_BLOCK)[None, None, :]
    channel = head * WIDTH + width
    of_row = (head < HEADS) & (width < WIDTH)
    nothing = tl.zeros((ROWS, HEAD_BLOCK, WIDTH_BLOCK), tl.float32)
    d_alpha, d_beta, d_gain, d_bias = nothing, nothing, nothing, nothing
    weight_at, weight_inside = tl.broadcast_to(channel, nothing.shape), tl.broadcast_to(of_row, nothing.shape)
    still = nothing + offset
    if gain is not None:
        still += load_rows(gain, weight_at, weight_inside)
    alpha_row, beta_row = alpha, beta
    if alpha is not None:
        alpha_row = load_rows(alpha, weight_at, weight_inside)
    if beta is not None:
        beta_row = load_rows(beta, weight_at, weight_inside)

    # With several stages, rows to come are on their way to shared memory while this one is computed.
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
        at = row * (HEADS * WIDTH) + channel
        inside = (row < rows) & of_row
        value = load_rows(x, at, inside)
        dy = load_rows(grad, at, inside)
        inverse = tl.load(statistics + row, mask=row < rows, other=0.0)
        normalised = value * inverse
        if CENTRED:
            mean = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
            normalised = (value - mean) * inverse  # nothing beyond the row: there dy is 0
        along = dy * normalised
        if gain is not None:
            d_gain += along
        if bias is not None:
            d_bias += dy

        scale = still
        if beta is not None:
            if dots is not None:
                t = tl.load(dots + row * HEADS + head, mask=(row < rows) & (head < HEADS), other=0.0)
            else:
                t = value * (beta_row * dot_scale)
            s, slope = _activate(t, ACTIVATION)
            through = along
            if alpha is not None:
                d_alpha += along * s
                through *= alpha_row
                s *= alpha_row
            scale += s
            if dots is not None:
                through = tl.sum(through, axis=2, keep_dims=True)
            through *= slope * dot_scale
            d_beta += through * value
            if grad_dots is not None:
                tl.store(grad_dots + row * HEADS + head, through, mask=(row < rows) & (head < HEADS))

        dx = dy * scale
        if CENTRED:
            dx -= _row_sums(dx) * (1.0 / (HEADS * WIDTH))
        dx = (dx - normalised * (_row_sums(along * scale) * (1.0 / (HEADS * WIDTH)))) * inverse
        if beta is not None:
            dx += through * beta_row
        store_rows(grad_x, at, dx, inside)

    if partials is not None:
        _store_all_sums(
            partials, alpha, beta, gain, bias, d_alpha, d_beta, d_gain, d_bias, channel, of_row, HEADS * WIDTH
        )


@triton.jit
def norm_sums(
    grad, x, alpha, beta, gain, bias, statistics, dots, grad_dots, partials,
    rows, dot_scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, CENTRED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write each program's share of the gradients of the weights, for some heads or a part of one.

    `norm_backward` has done all else; a program has WIDTH_BLOCK channels of HEAD_BLOCK heads.
    """
    parts_of_head: tl.constexpr = (WIDTH + WIDTH_BLOCK - 1) // WIDTH_BLOCK
    head = (tl.program_id(1) // parts_of_head * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[None, :, None]
    width = (tl.program_id(1) % parts_of_head * WIDTH_BLOCK + tl.arange(0, WIDTH_BLOCK))[None, None, :]
    channel = head * WIDTH + width
    inside = (head < HEADS) & (width < WIDTH)
    nothing = tl.zeros((1, HEAD_BLOCK, WIDTH_BLOCK), tl.float32)
    d_alpha, d_beta, d_gain, d_bias = nothing, nothing, nothing, nothing
    alpha_row, beta_row = alpha, beta
    if alpha is not None:
        alpha_row = load_rows(alpha, channel, inside)
    if beta is not None:
        beta_row = load_rows(beta, channel, inside)

    for tile in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        row = (tile + tl.arange(0, 1)).to(tl.int64)[:, None, None]
        at = row * (HEADS * WIDTH) + channel
        value = load_rows(x, at, inside)
        dy = load_rows(grad, at, inside)
        along = value
        if CENTRED:
            along -= tl.load(statistics + rows + row)
        along *= dy * tl.load(statistics + row)
        if gain is not None:
            d_gain += along
        if bias is not None:
            d_bias += dy
        if beta is not None:
            if dots is not None:
                s, _ = _activate(tl.load(dots + row * HEADS + head, mask=head < HEADS, other=0.0), ACTIVATION)
                through = tl.load(grad_dots + row * HEADS + head, mask=head < HEADS, other=0.0)
            else:
                s, slope = _activate(value * (beta_row * dot_scale), ACTIVATION)
                through = along * (slope * dot_scale)
                if alpha is not None:
                    through *= alpha_row
            if alpha is not None:
                d_alpha += along * s
            d_beta += through * value
    _store_all_sums(partials, alpha, beta, gain, bias, d_alpha, d_beta, d_gain, d_bias, channel, inside, HEADS * WIDTH)
