"""The Triton kernels of the boundary's backward pass; `boundary_plain` has the formulas that they compute.

As in the forward pass, rows are in registers and in fp32, None is an absent part, and what is beyond the tensors is 0.
The kernel is persistent: a program walks over its share of the rows and keeps its sums for the gains in registers; they
are added up in a fixed order afterwards, without atomics.
"""

# This is Triton's language, which mypy cannot check.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from siamesenorm.kernels.boundary_triton import load_rows, per_channel, store_rows, times


@triton.jit
def _normalised(x, statistics, norm, row, rows, CENTRED: tl.constexpr):
    """Return x^ and 1 / deviation from the statistics of the forward pass."""
    if CENTRED:
        x -= tl.load(statistics + (2 * norm + 1) * rows + row, mask=row < rows, other=0.0)[:, None]
    at = (2 * norm if CENTRED else norm) * rows + row
    inverse = tl.load(statistics + at, mask=row < rows, other=0.0)[:, None]
    return x * inverse, inverse


@triton.jit
def _post_norm(
    kept, statistics, post_norm_gain, post_norm_bias, at, inside, row, rows, CENTRED: tl.constexpr
):  # fmt: skip
    """Return U, X', and x^ with 1 / deviation; gains are rows, and what is absent is U."""
    updated = load_rows(kept, at, inside)
    x, x_hat, x_inverse = updated, updated, updated
    if post_norm_gain is not None:
        x_hat, x_inverse = _normalised(updated, statistics, 0, row, rows, CENTRED)
        x = x_hat * post_norm_gain
    if post_norm_bias is not None:
        x += post_norm_bias
    return updated, x, x_hat, x_inverse


@triton.jit
def _second_stream(identity, difference, next_scale, x, at, inside):
    """Return Y'; where it was not kept, it follows from the stream difference: see `boundary`."""
    if difference is None:
        y = load_rows(identity, at, inside)
    else:
        y = load_rows(difference, at, inside) + x / tl.load(next_scale).to(tl.float32)
    return y


@triton.jit
def _sum(x, gate, y_hat, identity_gain, identity_bias):
    """Return Z = gate X' + N(Y'); gains are rows."""
    total = x
    if gate is not None:
        total *= gate
    if identity_gain is not None:
        total += y_hat * identity_gain
    if identity_bias is not None:
        total += identity_bias
    return total


@triton.jit
def _spoiled(mean_square, inverse, eps, row, rows):
    """Return in which rows a recomputed Y' is not the one that was normalised, for which the sum below is 1."""
    return (tl.abs(mean_square + eps * inverse * inverse - 1.0) > 1e-3) & (row < rows)


@triton.jit
def _verify(
    y_hat, y_inverse, projections, norm, eps, inside, row, rows, DIM: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """Return y^, with NaN in every row whose Y' is not the one that the forward pass normalised.

    For a program with a part of the row, `boundary_projections` has stored NaN there.
    """
    if projections is None:
        mean_square = tl.sum(tl.where(inside, y_hat * y_hat, 0.0), axis=1) * (1.0 / DIM)
        spoiled = _spoiled(mean_square, tl.sum(y_inverse, axis=1), eps, row, rows)
    else:
        along = tl.load(projections + (2 * norm if CENTRED else norm) * rows + row, mask=row < rows, other=0.0)
        spoiled = along != along
    return tl.where(spoiled[:, None], float("nan"), y_hat)


@triton.jit
def _pull_back(
    v, normalised, inverse, projections, norm, row, rows, DIM: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """Return the gradient of x from that of x^: inverse (v - x^ mean(v x^) [- mean(v)]).

    The means are read from `projections`, where there are some: a program then has a part of the row alone.
    """
    if projections is None:
        along = tl.sum(v * normalised, axis=1) * (1.0 / DIM)
    else:
        along = tl.load(projections + (2 * norm if CENTRED else norm) * rows + row, mask=row < rows, other=0.0)
    result = v - normalised * along[:, None]
    if CENTRED:
        if projections is None:
            mean = tl.sum(v, axis=1) * (1.0 / DIM)
        else:
            mean = tl.load(projections + (2 * norm + 1) * rows + row, mask=row < rows, other=0.0)
        result -= mean[:, None]
    return result * inverse


@triton.jit
def _store_sums(partials, which, present, sums, column, DIM: tl.constexpr):
    """Leave one program's sums over its rows, for gain or bias number `which` of those that are present."""
    if present is not None:
        at = (which * tl.num_programs(0) + tl.program_id(0)) * DIM + column
        tl.store(partials + at, tl.sum(sums, axis=0), mask=column < DIM)


@triton.jit
def _store_all_sums(
    partials, post_norm_gain, gate, identity_gain, input_gain, post_norm_bias, identity_bias, input_bias,
    d_post_norm_gain, d_gate, d_identity_gain, d_input_gain, d_post_norm_bias, d_identity_bias, d_input_bias,
    column, DIM: tl.constexpr,
):  # fmt: skip
    """Leave one program's sums, in the order of `boundary_plain.Gains`, the absent ones left out."""
    with_post_norm: tl.constexpr = 1 if post_norm_gain is not None else 0
    with_gate: tl.constexpr = with_post_norm + (1 if gate is not None else 0)
    with_identity: tl.constexpr = with_gate + (1 if identity_gain is not None else 0)
    gains: tl.constexpr = with_identity + (1 if input_gain is not None else 0)
    with_post_norm_bias: tl.constexpr = gains + (1 if post_norm_bias is not None else 0)
    with_identity_bias: tl.constexpr = with_post_norm_bias + (1 if identity_bias is not None else 0)
    _store_sums(partials, 0, post_norm_gain, d_post_norm_gain, column, DIM)
    _store_sums(partials, with_post_norm, gate, d_gate, column, DIM)
    _store_sums(partials, with_gate, identity_gain, d_identity_gain, column, DIM)
    _store_sums(partials, with_identity, input_gain, d_input_gain, column, DIM)
    _store_sums(partials, gains, post_norm_bias, d_post_norm_bias, column, DIM)
    _store_sums(partials, with_post_norm_bias, identity_bias, d_identity_bias, column, DIM)
    _store_sums(partials, with_identity_bias, input_bias, d_input_bias, column, DIM)


@triton.jit
def boundary_backward(
    grad_bounded_next, grad_identity_next, grad_h, kept, identity, difference, statistics, projections,
    skip, scale, identity_scale, next_scale,
    post_norm_gain, post_norm_bias, gate, identity_gain, identity_bias, input_gain, input_bias,
    grad_bounded, grad_identity, grad_output, difference_next, partials,
    rows, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr, STAGES: tl.constexpr,
    HOLD_GAINS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both streams and the output, and each program's share of those of gains and biases.

    Without HOLD_GAINS, what is used once a tile is read with it: registers hold the sums, and the gains used twice.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    post_norm_row = None if post_norm_gain is None else per_channel(post_norm_gain, column, DIM)
    post_norm_held = None if post_norm_bias is None else per_channel(post_norm_bias, column, DIM)
    gate_row = None if gate is None else per_channel(gate, column, DIM)
    identity_row = None if identity_gain is None else per_channel(identity_gain, column, DIM)
    identity_held = None if identity_bias is None else per_channel(identity_bias, column, DIM)
    input_held = None if input_gain is None else per_channel(input_gain, column, DIM)
    identity_norm: tl.constexpr = 1 if post_norm_gain is not None else 0
    input_norm: tl.constexpr = identity_norm + (1 if identity_gain is not None else 0)
    nothing = tl.zeros((ROWS, BLOCK), tl.float32)
    d_post_norm_gain, d_gate, d_identity_gain, d_input_gain = nothing, nothing, nothing, nothing
    d_post_norm_bias, d_identity_bias, d_input_bias = nothing, nothing, nothing

    # With several stages, rows to come are on their way to shared memory while this one is computed.
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * DIM + column[None, :]
        inside = (row < rows)[:, None] & (column < DIM)[None, :]
        post_norm_shift = (
            post_norm_held if HOLD_GAINS or post_norm_bias is None else per_channel(post_norm_bias, column, DIM)
        )
        identity_shift = (
            identity_held if HOLD_GAINS or identity_bias is None else per_channel(identity_bias, column, DIM)
        )
        input_row = input_held if HOLD_GAINS or input_gain is None else per_channel(input_gain, column, DIM)
        updated, x, x_hat, x_inverse = _post_norm(
            kept, statistics, post_norm_row, post_norm_shift, at, inside, row, rows, CENTRED
        )  # fmt: skip
        y_hat, y_inverse = x, x
        if identity_gain is not None:
            y = _second_stream(identity, difference, next_scale, x, at, inside)
            y_hat, y_inverse = _normalised(y, statistics, identity_norm, row, rows, CENTRED)
            if difference is not None:
                store_rows(difference_next, at, y - updated / tl.load(scale).to(tl.float32), inside)
                y_hat = _verify(
                    y_hat, y_inverse, projections, identity_norm, eps, inside, row, rows, DIM, CENTRED
                )  # fmt: skip
        total = _sum(x, gate_row, y_hat, identity_row, identity_shift)

        d_total = load_rows(grad_h, at, inside)
        if input_gain is not None:
            z_hat, z_inverse = _normalised(total, statistics, input_norm, row, rows, CENTRED)
            d_input_gain += d_total * z_hat
            d_input_bias += d_total
            v = d_total * input_row
            d_total = _pull_back(v, z_hat, z_inverse, projections, input_norm, row, rows, DIM, CENTRED)

        dx = d_total
        if gate is not None:
            d_gate += d_total * x
            dx = d_total * gate_row
        if grad_bounded_next is not None:
            dx += load_rows(grad_bounded_next, at, inside)
        if post_norm_gain is not None:
            d_post_norm_gain += dx * x_hat
            d_post_norm_bias += dx
            dx = _pull_back(dx * post_norm_row, x_hat, x_inverse, projections, 0, row, rows, DIM, CENTRED)
        store_rows(grad_bounded, at, times(dx, skip), inside)
        d_update = times(dx, scale)

        if identity_gain is not None:
            d_identity_gain += d_total * y_hat
            d_identity_bias += d_total
            v = d_total * identity_row
            dy = _pull_back(v, y_hat, y_inverse, projections, identity_norm, row, rows, DIM, CENTRED)
            if grad_identity_next is not None:
                dy += load_rows(grad_identity_next, at, inside)
            store_rows(grad_identity, at, dy, inside)
            d_update += times(dy, identity_scale)
        elif grad_identity_next is not None:
            d_update += times(load_rows(grad_identity_next, at, inside), identity_scale)
        if grad_output is not None:
            store_rows(grad_output, at, d_update, inside)

    _store_all_sums(
        partials, post_norm_gain, gate, identity_gain, input_gain, post_norm_bias, identity_bias, input_bias,
        d_post_norm_gain, d_gate, d_identity_gain, d_input_gain, d_post_norm_bias, d_identity_bias, d_input_bias,
        column, DIM,
    )  # fmt: skip


@triton.jit
def _store_projections(projections, norm, along, sums, row, rows, DIM: tl.constexpr, CENTRED: tl.constexpr):
    at = (2 * norm if CENTRED else norm) * rows + row
    tl.store(projections + at, tl.sum(along, axis=1) * (1.0 / DIM), mask=row < rows)
    if CENTRED:
        tl.store(projections + (2 * norm + 1) * rows + row, tl.sum(sums, axis=1) * (1.0 / DIM), mask=row < rows)


@triton.jit
def _rebuild_part(
    kept, identity, difference, next_scale, statistics,
    post_norm_gain, post_norm_bias, gate, identity_gain, identity_bias,
    column, row, rows, DIM: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Return Z, x^ and y^ of a part of the rows; the gains are pointers."""
    post_norm_row = None if post_norm_gain is None else per_channel(post_norm_gain, column, DIM)
    post_norm_shift = None if post_norm_bias is None else per_channel(post_norm_bias, column, DIM)
    gate_row = None if gate is None else per_channel(gate, column, DIM)
    identity_row = None if identity_gain is None else per_channel(identity_gain, column, DIM)
    identity_shift = None if identity_bias is None else per_channel(identity_bias, column, DIM)
    at, inside = row[:, None] * DIM + column[None, :], (row < rows)[:, None] & (column < DIM)[None, :]
    _, x, x_hat, _ = _post_norm(kept, statistics, post_norm_row, post_norm_shift, at, inside, row, rows, CENTRED)
    y_hat = x
    if identity_gain is not None:
        y = _second_stream(identity, difference, next_scale, x, at, inside)
        identity_norm: tl.constexpr = 1 if post_norm_gain is not None else 0
        y_hat, _ = _normalised(y, statistics, identity_norm, row, rows, CENTRED)
    return _sum(x, gate_row, y_hat, identity_row, identity_shift), x_hat, y_hat


@triton.jit
def boundary_projections(
    grad_bounded_next, grad_h, kept, identity, difference, next_scale, statistics, projections,
    post_norm_gain, post_norm_bias, gate, identity_gain, identity_bias, input_gain,
    rows, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Write mean(v x^) (and mean(v), if it is centred) of every norm: what the backward pass of long rows starts from.

    A program reads its row by parts of BLOCK columns, twice: the input norm's means come before the others'.
    """
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    identity_norm: tl.constexpr = 1 if post_norm_gain is not None else 0
    input_norm: tl.constexpr = identity_norm + (1 if identity_gain is not None else 0)
    nothing = tl.zeros((1, BLOCK), tl.float32)

    if input_gain is not None:
        along, sums = nothing, nothing
        for start in range(0, DIM, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total, _, _ = _rebuild_part(
                kept, identity, difference, next_scale, statistics,
                post_norm_gain, post_norm_bias, gate, identity_gain, identity_bias,
                column, row, rows, DIM, CENTRED,
            )  # fmt: skip
            z_hat, _ = _normalised(total, statistics, input_norm, row, rows, CENTRED)
            v = load_rows(grad_h, row[:, None] * DIM + column[None, :], (column < DIM)[None, :])
            v *= per_channel(input_gain, column, DIM)
            along += v * z_hat
            sums += v
        _store_projections(projections, input_norm, along, sums, row, rows, DIM, CENTRED)
        # What one thread has just stored, all of them read.
        tl.debug_barrier()

    x_along, x_sums, y_along, y_sums, y_squares = nothing, nothing, nothing, nothing, nothing
    for start in range(0, DIM, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at, inside = row[:, None] * DIM + column[None, :], (column < DIM)[None, :]
        total, x_hat, y_hat = _rebuild_part(
            kept, identity, difference, next_scale, statistics,
            post_norm_gain, post_norm_bias, gate, identity_gain, identity_bias,
            column, row, rows, DIM, CENTRED,
        )  # fmt: skip
        d_total = load_rows(grad_h, at, inside)
        if input_gain is not None:
            z_hat, z_inverse = _normalised(total, statistics, input_norm, row, rows, CENTRED)
            v = d_total * per_channel(input_gain, column, DIM)
            d_total = _pull_back(v, z_hat, z_inverse, projections, input_norm, row, rows, DIM, CENTRED)
        if post_norm_gain is not None:
            dx = d_total
            if gate is not None:
                dx = d_total * per_channel(gate, column, DIM)
            if grad_bounded_next is not None:
                dx += load_rows(grad_bounded_next, at, inside)
            v = dx * per_channel(post_norm_gain, column, DIM)
            x_along += v * x_hat
            x_sums += v
        if identity_gain is not None:
            v = d_total * per_channel(identity_gain, column, DIM)
            y_along += v * y_hat
            y_sums += v
            y_squares += tl.where(inside, y_hat * y_hat, 0.0)
    if post_norm_gain is not None:
        _store_projections(projections, 0, x_along, x_sums, row, rows, DIM, CENTRED)
    if identity_gain is not None:
        if difference is not None:
            at = (2 * identity_norm if CENTRED else identity_norm) * rows + row
            spoiled = _spoiled(tl.sum(y_squares, axis=1) * (1.0 / DIM), tl.load(statistics + at), eps, row, rows)
            y_along = tl.where(spoiled[:, None], float("nan"), y_along)
        _store_projections(projections, identity_norm, y_along, y_sums, row, rows, DIM, CENTRED)
