"""The Triton kernels of a norm of every row, and their launches; `norm_plain` has the formulas that they compute.

A program holds tiles of [rows, heads, channels of a head] in registers, in fp32 whatever the dtypes in memory; a norm
without dot products has one head. A pointer that is None is an absent part: branches on it are decided when the kernel
is compiled. Rows, heads and channels beyond the tensors are read as zeros, so that no sum includes them. Persistence
and sums over rows are as in `boundary_backward_triton`.

Nothing is tuned at run time. A thread holds 8 channels of a row in the backward pass, so that rows, weights and three
sums fit its registers, and up to 16 in the forward pass, so that more of the row is in flight.
"""

# mypy has no types of Triton's language.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from siamesenorm.kernels.boundary_triton import load_rows, store_rows
from siamesenorm.kernels.launch import Launch, Processor, Tile, Walk
from siamesenorm.kernels.norm_plain import Form, Weights, empty_results, keeps_dots

LONGEST_WITH_SUMS = 4096
"""The longest row of which a program has registers for three sums; twice as long, for two."""
PART_OF_A_ROW = 2048
"""Channels of longer rows that a program sums."""


# --- kernels


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


# --- launches


def forward(x: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and what the backward pass needs; as `norm_plain.forward`."""
    results, launch = plan_forward(x, weights, form)
    if x.numel():
        launch.run()
    return results


def plan_forward(x: Tensor, weights: Weights, form: Form) -> tuple[tuple[Tensor, Tensor, Tensor], Launch]:
    """Return memory for the results, and the launch that fills it."""
    y, statistics, dots = empty_results(x, weights, form)
    sources = _sources(x, statistics, dots, weights, form)
    tile = Tile.of(x.shape[-1], sources["HEADS"], channels_of_a_thread=16)
    arguments = {**sources, "y": y, "eps": form.eps, "ROWS": tile.rows, **_blocks(tile)}
    return (y, statistics, dots), Launch(
        norm_forward, (triton.cdiv(sources["rows"], tile.rows),), arguments, tile.warps
    )


def backward(
    grad: Tensor, x: Tensor, statistics: Tensor, dots: Tensor, weights: Weights, form: Form
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weights; as `norm_plain.backward`."""
    grad_x, partials, launches = plan_backward(grad, x, statistics, dots, weights, form, Processor.of(x.device))
    if not x.numel():
        return grad_x, torch.zeros_like(partials[:, 0])
    for launch in launches:
        launch.run()
    return grad_x, partials.sum(1)


def plan_backward(
    grad: Tensor, x: Tensor, statistics: Tensor, dots: Tensor, weights: Weights, form: Form, processor: Processor
) -> tuple[Tensor, Tensor, list[Launch]]:
    """Return memory for the gradient of x and for [weights, programs, dim], and the launches that fill it.

    Rows too long for a program to keep sums of them take two: the second reads them again, by parts, for the sums.
    """
    sources = {"grad": grad.contiguous(), **_sources(x, statistics, dots, weights, form)}
    sums = len(weights.names)
    tile = Tile.of(x.shape[-1], sources["HEADS"])
    whole = tile.length <= (LONGEST_WITH_SUMS if sums > 2 else 2 * LONGEST_WITH_SUMS) or not sums
    walk = Walk.over(
        triton.cdiv(sources["rows"], tile.rows),
        tile_bytes=2 * x.itemsize * tile.rows * tile.length,
        warps=tile.warps,
        threads=threads_of_sums(sums if whole else 0),
        processor=processor,
    )
    grad_x = x.new_empty(x.shape)
    grad_dots = None if whole or sources["dots"] is None else torch.empty_like(dots)
    partials = x.new_empty((sums, walk.programs, x.shape[-1]), dtype=torch.float32) if whole else None
    results = {"grad_x": grad_x, "grad_dots": grad_dots, "partials": partials}
    arguments = {**sources, **results, "ROWS": tile.rows, **_blocks(tile), "STAGES": walk.stages}
    gradient = Launch(norm_backward, (walk.programs,), arguments, tile.warps)
    if partials is not None:
        return grad_x, partials, [gradient]
    partials, of_weights = _plan_sums(sources, grad_dots, tile, sums, processor)
    return grad_x, partials, [gradient, of_weights]


def _plan_sums(
    sources: dict[str, Any], grad_dots: Tensor | None, whole: Tile, sums: int, processor: Processor
) -> tuple[Tensor, Launch]:
    """Return memory for [weights, programs, dim], and the launch that fills it."""
    x, heads, width = sources["x"], sources["HEADS"], sources["WIDTH"]
    part = whole.part(PART_OF_A_ROW)
    parts = triton.cdiv(heads, part.heads) * triton.cdiv(width, part.width)
    walk = Walk.over(
        sources["rows"],
        tile_bytes=2 * x.itemsize * part.length,
        warps=part.warps,
        threads=1024,  # whatever the sums: 64 registers are enough
        processor=processor,
        parts=parts,
    )
    partials = x.new_empty((sums, walk.programs, x.shape[-1]), dtype=torch.float32)
    needed = {name: source for name, source in sources.items() if name != "offset"}
    arguments = {**needed, "grad_dots": grad_dots, "partials": partials, **_blocks(part), "STAGES": walk.stages}
    return partials, Launch(norm_sums, (walk.programs, parts), arguments, part.warps)


def plan(x: Tensor, weights: Weights, form: Form, processor: Processor) -> list[Launch]:
    """Return the launches of a forward and a backward pass, to be inspected; the tensors may be on "meta"."""
    (y, statistics, dots), launch = plan_forward(x, weights, form)
    return [launch, *plan_backward(y, x, statistics, dots, weights, form, processor)[2]]


def threads_of_sums(sums: int) -> int:
    """Return for how many threads a multiprocessor has the registers of `norm_backward` with so many sums."""
    return 1024 if sums <= 2 else 512


def _blocks(tile: Tile) -> dict[str, int]:
    return {"HEAD_BLOCK": tile.heads, "WIDTH_BLOCK": tile.width}


def _sources(x: Tensor, statistics: Tensor, dots: Tensor, weights: Weights, form: Form) -> dict[str, Any]:
    with_dots = keeps_dots(x, weights, form)
    heads = form.heads if with_dots else 1
    return {
        "x": x.contiguous(),
        **{name: None if weight is None else weight.contiguous() for name, weight in weights._asdict().items()},
        "statistics": statistics,
        "dots": dots if with_dots else None,
        "rows": x.shape[:-1].numel(),
        "offset": form.offset,
        "dot_scale": form.dot_scale,
        "HEADS": heads,
        "WIDTH": x.shape[-1] // heads,
        "ACTIVATION": form.activation,
        "CENTRED": form.centred,
    }
