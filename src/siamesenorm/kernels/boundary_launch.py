"""Launch the Triton kernels of the boundary: shapes of programs, memory for results, the last sum of the gains' parts.

Nothing is tuned at run time. A thread holds 8 channels of a row, so that rows, gains and sums of the backward pass fit
its registers (`benchmarks/registers.py` reports them).
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from siamesenorm.kernels import boundary_backward_triton, boundary_plain, boundary_triton
from siamesenorm.kernels.boundary_plain import Backward, Forward, Gains, Grads, Kept, Parts
from siamesenorm.kernels.launch import Launch, Processor, Tile, Walk

LONGEST_WHOLE_ROW = 4096
"""The longest row that a program of the backward pass holds whole; of longer ones it has a part."""
PART_OF_A_ROW = 2048
MOST_SUMS = 4 * 4096
"""The most sums over rows for which a program of the backward pass has registers beside gains and biases.

Beyond, those that are used once a tile are read with it, and not held: the six sums of LayerNorms over rows of 4096.
"""


def forward(bounded: Tensor, output: Tensor, identity: Tensor | None, parts: Parts) -> Forward:
    """Complete the pending write and read; as `boundary_plain.forward`."""
    result, launch = plan_forward(bounded, output, identity, parts)
    if bounded.numel():
        launch.run()
    return result


def plan_forward(bounded: Tensor, output: Tensor, identity: Tensor | None, parts: Parts) -> tuple[Forward, Launch]:
    """Return memory for the results, and the launch that fills it."""
    rows, columns = bounded.shape[:-1].numel(), bounded.shape[-1]
    tile, result = Tile.of(columns), boundary_plain.empty_forward(bounded, output, identity, parts)
    arguments = {
        "bounded": bounded.contiguous(),
        "output": output.contiguous(),
        "identity": _contiguous(identity),
        **parts.constants._asdict(),
        **_dense(parts.gains),
        "bounded_next": result.bounded_next,
        "identity_next": None if identity is None else result.identity,
        "h": result.h,
        "updated": None if parts.gains.post_norm_gain is None else result.updated,
        "statistics": result.statistics,
        "rows": rows, "eps": parts.eps,
        "DIM": columns, "BLOCK": tile.width, "ROWS": tile.rows, "CENTRED": parts.centred,
    }  # fmt: skip
    return result, Launch(boundary_triton.boundary_forward, (triton.cdiv(rows, tile.rows),), arguments, tile.warps)


def backward(grads: Grads, kept: Kept, parts: Parts) -> Backward:
    """Return the gradients; as `boundary_plain.backward`."""
    result, launches = plan_backward(grads, kept, parts, Processor.of(kept.bounded.device))
    if kept.bounded.numel() == 0:
        return result._replace(gains=torch.zeros_like(result.gains[:, 0]))
    for launch in launches:
        launch.run()
    return result._replace(gains=result.gains.sum(1))


def plan_backward(grads: Grads, kept: Kept, parts: Parts, processor: Processor) -> tuple[Backward, list[Launch]]:
    """Return memory for the results, with [parts, programs, dim] for the gains, and the launches that fill it.

    Rows longer than LONGEST_WHOLE_ROW take two: the means over a row come before what is done with them.
    """
    stream, gains = kept.bounded, parts.gains
    rows, columns, sums = stream.shape[:-1].numel(), stream.shape[-1], len(gains.present)
    identity, recomputes = _contiguous(kept.identity), kept.next_scale is not None
    tile = Tile.of(columns if columns <= LONGEST_WHOLE_ROW else PART_OF_A_ROW)
    pieces, holds_gains = triton.cdiv(columns, tile.width), sums * tile.width <= MOST_SUMS
    read = [part for part in (*grads, stream, identity) if part is not None]
    walk = Walk.over(
        triton.cdiv(rows, tile.rows),
        tile_bytes=sum(part.itemsize for part in read) * tile.rows * tile.width,
        warps=tile.warps,
        threads=threads_of_sums(sums, columns),
        processor=processor,
        parts=pieces,
        most_ahead=2 if holds_gains else 1,
    )
    result = boundary_plain.empty_backward(grads, kept, parts)
    result = result._replace(gains=stream.new_empty((sums, walk.programs, columns), dtype=torch.float32))
    sources = {
        "grad_bounded_next": _contiguous(grads.bounded_next),
        "grad_h": grads.h.contiguous(),
        "kept": stream.contiguous(),
        "identity": None if recomputes else identity,
        "difference": identity if recomputes else None,
        "next_scale": kept.next_scale,
        "statistics": kept.statistics,
        "projections": torch.empty_like(kept.statistics) if pieces > 1 else None,
        **_dense(gains),
        "rows": rows, "eps": parts.eps if recomputes else 0.0,
        "DIM": columns, "BLOCK": tile.width, "CENTRED": parts.centred,
    }  # fmt: skip
    others = {
        "grad_identity_next": _contiguous(grads.identity),
        **parts.constants._asdict(),
        "grad_bounded": result.bounded,
        "grad_identity": None if gains.identity_gain is None else result.identity,
        "grad_output": None if boundary_plain.shares_gradient(grads, kept, parts) else result.output,
        "difference_next": result.difference if recomputes else None,
        "partials": result.gains,
        "ROWS": tile.rows, "STAGES": walk.stages, "HOLD_GAINS": holds_gains,
    }  # fmt: skip
    kernel = boundary_backward_triton.boundary_backward
    launches = [Launch(kernel, (walk.programs, pieces), sources | others, tile.warps)]
    if pieces > 1:
        needed = {name: part for name, part in sources.items() if name != "input_bias"}
        launches.insert(0, Launch(boundary_backward_triton.boundary_projections, (rows,), needed, tile.warps))
    return result, launches


def threads_of_sums(sums: int, columns: int) -> int:
    """Return for how many threads a multiprocessor has the registers of the backward pass with so many sums.

    They have 64, 128 or 255 registers each; several short rows in a tile, and what masks them, take some more than 64.
    """
    if sums <= 1:
        return 1024 if columns >= 1024 else 768
    return 512 if sums <= 3 else 256


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _dense(gains: Gains) -> dict[str, Tensor | None]:
    return {name: _contiguous(gain) for name, gain in gains._asdict().items()}
