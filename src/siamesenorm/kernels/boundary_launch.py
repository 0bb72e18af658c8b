"""Launch the Triton kernels of the boundary: shapes of programs, memory for results, the last sum of the gains' parts.

Nothing is tuned at run time. A thread holds 8 channels of a row, so that rows, gains and sums of the backward pass fit
its registers (`benchmarks/registers.py` reports them), and a program has at least 4 warps, with several rows where they
are short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from siamesenorm.kernels import boundary_backward_triton, boundary_triton
from siamesenorm.kernels.boundary_plain import Backward, Constants, Forward, Gains, Recompute, shares_gradient
from siamesenorm.kernels.launch import Launch, Processor, Walk

CHANNELS_OF_A_THREAD = 8
LONGEST_WHOLE_ROW = 4096
"""The longest row that a program of the backward pass holds whole; of longer ones it has a part."""
PART_OF_A_ROW = 2048
MOST_SUMS = 4 * 4096
"""The most sums over rows for which a program of the backward pass has registers beside gains and biases.

Beyond, those that are used once a tile are read with it, and not held: the six sums of LayerNorms over rows of 4096.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program holds at a time: `rows` rows of `block` columns (a power of two), in `warps` warps."""

    block: int
    rows: int
    warps: int

    @classmethod
    def of(cls, columns: int) -> Tile:
        """Return the tile for rows, or parts of rows, of so many columns."""
        block = triton.next_power_of_2(columns)
        warps = min(32, max(4, block // (32 * CHANNELS_OF_A_THREAD)))
        return cls(block, max(1, warps * 32 * CHANNELS_OF_A_THREAD // block), warps)


def threads_of_sums(sums: int, columns: int) -> int:
    """Return for how many threads a multiprocessor has the registers of the backward pass with so many sums.

    They have 64, 128 or 255 registers each; several short rows in a tile, and what masks them, take some more than 64.
    """
    if sums <= 1:
        return 1024 if columns >= 1024 else 768
    return 512 if sums <= 3 else 256


def forward(
    bounded: Tensor,
    output: Tensor,
    identity: Tensor | None,
    constants: Constants,
    gains: Gains,
    eps: float,
    centred: bool,
) -> Forward:
    """Complete the pending write and read; as `boundary_plain.forward`."""
    result, launch = plan_forward(bounded, output, identity, constants, gains, eps, centred)
    if bounded.numel():
        launch.run()
    return result


def plan_forward(
    bounded: Tensor,
    output: Tensor,
    identity: Tensor | None,
    constants: Constants,
    gains: Gains,
    eps: float,
    centred: bool,
) -> tuple[Forward, Launch]:
    """Return memory for the results, and the launch that fills it."""
    shape, empty, has_post_norm = bounded.shape, bounded.new_empty, gains.post_norm_gain is not None
    rows, columns, tile = shape[:-1].numel(), shape[-1], Tile.of(shape[-1])
    result = Forward(
        empty(shape),
        empty(0 if identity is None else shape),
        output.new_empty(shape),
        empty(shape if has_post_norm else 0),
        empty((gains.norms * (2 if centred else 1), rows), dtype=torch.float32),
    )
    sources = {"bounded": bounded.contiguous(), "output": output.contiguous(), "identity": _contiguous(identity)}
    results = {
        "bounded_next": result.bounded_next,
        "identity_next": None if identity is None else result.identity,
        "h": result.h,
        "updated": result.updated if has_post_norm else None,
        "statistics": result.statistics,
    }
    shapes = {"rows": rows, "eps": eps, "DIM": columns, "BLOCK": tile.block, "ROWS": tile.rows, "CENTRED": centred}
    launch = Launch(
        kernel=boundary_triton.boundary_forward,
        grid=(triton.cdiv(rows, tile.rows),),
        arguments={**sources, **constants._asdict(), **_dense(gains), **results, **shapes},
        warps=tile.warps,
    )
    return result, launch


def backward(
    grad_bounded_next: Tensor | None,
    grad_identity: Tensor | None,
    grad_h: Tensor,
    kept: Tensor,
    identity: Tensor | Recompute | None,
    statistics: Tensor,
    constants: Constants,
    gains: Gains,
    centred: bool,
) -> Backward:
    """Return the gradients; as `boundary_plain.backward`."""
    result, launches = plan_backward(
        grad_bounded_next, grad_identity, grad_h, kept, identity, statistics, constants, gains, centred,
        Processor.of(kept.device),
    )  # fmt: skip
    if kept.numel() == 0:
        return result._replace(gains=torch.zeros_like(result.gains[:, 0]))
    for launch in launches:
        launch.run()
    return result._replace(gains=result.gains.sum(1))


def plan_backward(
    grad_bounded_next: Tensor | None,
    grad_identity: Tensor | None,
    grad_h: Tensor,
    kept: Tensor,
    identity: Tensor | Recompute | None,
    statistics: Tensor,
    constants: Constants,
    gains: Gains,
    centred: bool,
    processor: Processor,
) -> tuple[Backward, list[Launch]]:
    """Return memory for the results, with [parts, programs, dim] for the gains, and the launches that fill it.

    Rows longer than LONGEST_WHOLE_ROW take two: the means over a row come before what is done with them.
    """
    rows, columns = kept.shape[:-1].numel(), kept.shape[-1]
    recompute = identity if isinstance(identity, Recompute) else None
    second = identity.difference if isinstance(identity, Recompute) else identity
    read = [part for part in (grad_bounded_next, grad_identity, grad_h, kept, second) if part is not None]
    tile, sums = Tile.of(columns if columns <= LONGEST_WHOLE_ROW else PART_OF_A_ROW), len(gains.present)
    parts, holds_gains = triton.cdiv(columns, tile.block), sums * tile.block <= MOST_SUMS
    walk = Walk.over(
        triton.cdiv(rows, tile.rows),
        tile_bytes=sum(part.itemsize for part in read) * tile.rows * tile.block,
        warps=tile.warps,
        threads=threads_of_sums(sums, columns),
        processor=processor,
        parts=parts,
        most_ahead=2 if holds_gains else 1,
    )
    shared = shares_gradient(grad_identity, grad_h, kept, constants, gains)
    result = Backward(
        kept.new_empty(kept.shape),
        kept.new_empty(0 if gains.identity_gain is None else kept.shape),
        grad_h.new_empty(0 if shared else kept.shape),
        kept.new_empty((sums, walk.programs, columns), dtype=torch.float32),
        kept.new_empty(0 if recompute is None else kept.shape),
    )
    sources = {
        "grad_bounded_next": _contiguous(grad_bounded_next),
        "grad_h": grad_h.contiguous(),
        "kept": kept.contiguous(),
        "identity": None if recompute else _contiguous(second),
        "difference": _contiguous(second) if recompute else None,
        "next_scale": recompute.next_scale if recompute else None,
        "statistics": statistics,
        "projections": torch.empty_like(statistics) if parts > 1 else None,
        **_dense(gains),
        "rows": rows,
        "eps": recompute.eps if recompute else 0.0,
        "DIM": columns,
        "BLOCK": tile.block,
        "CENTRED": centred,
    }
    results = {
        "grad_bounded": result.bounded,
        "grad_identity": None if gains.identity_gain is None else result.identity,
        "grad_output": None if shared else result.output,
        "difference_next": result.difference if recompute else None,
        "partials": result.gains,
    }
    arguments = {
        **sources,
        **constants._asdict(),
        "grad_identity_next": _contiguous(grad_identity),
        **results,
        "ROWS": tile.rows,
        "STAGES": walk.stages,
        "HOLD_GAINS": holds_gains,
    }
    grid, warps = (walk.programs, parts), tile.warps
    kernel, first = boundary_backward_triton.boundary_backward, boundary_backward_triton.boundary_projections
    launches = [Launch(kernel=kernel, grid=grid, arguments=arguments, warps=warps)]
    if parts > 1:
        needed = {name: part for name, part in sources.items() if name != "input_bias"}
        launches.insert(0, Launch(kernel=first, grid=(rows,), arguments=needed, warps=warps))
    return result, launches


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _dense(gains: Gains) -> dict[str, Tensor | None]:
    return {name: _contiguous(gain) for name, gain in gains._asdict().items()}
