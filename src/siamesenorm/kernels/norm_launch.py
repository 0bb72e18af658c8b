"""Launch the Triton kernels of a norm: shapes of programs, memory for results, the last sum of the weights' parts.

Nothing is tuned at run time. A thread holds 8 channels of a row in the backward pass, so that rows, weights and three
sums fit its registers, and up to 16 in the forward pass, so that more of the row is in flight;
`benchmarks/registers.py` reports what the compiler makes of it. Short rows share a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from siamesenorm.kernels import norm_triton
from siamesenorm.kernels.launch import Launch, Processor, Walk, power_of_two
from siamesenorm.kernels.norm_plain import Form, Weights

SHORTEST_TILE = 1024
"""Channels that a program of 4 warps holds; shorter rows fill it together."""
LONGEST_WITH_SUMS = 4096
"""The longest row of which a program has registers for three sums; twice as long, for two."""
PART_OF_A_ROW = 2048
"""Channels of longer rows that a program sums."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program holds at a time: `rows` rows of `heads` x `width` channels (powers of two), in `warps` warps."""

    rows: int
    heads: int
    width: int
    warps: int

    @classmethod
    def of(cls, dim: int, heads: int, *, channels_of_a_thread: int) -> Tile:
        """Return the tile for rows of `dim` channels in so many heads."""
        block = power_of_two(heads), power_of_two(dim // heads)
        length = block[0] * block[1]
        warps = min(32, max(4, length // (32 * channels_of_a_thread)))
        return cls(max(1, SHORTEST_TILE // length), *block, warps)

    def part(self, length: int) -> Tile:
        """Return the tile for at most so many channels of one row: whole heads, or a part of one."""
        return Tile(1, max(1, length // self.width), min(self.width, length), max(4, length // (32 * 8)))

    @property
    def length(self) -> int:
        """Return the channels of a row."""
        return self.heads * self.width

    @property
    def arguments(self) -> dict[str, int]:
        """Return what the kernels call it."""
        return {"ROWS": self.rows, "HEAD_BLOCK": self.heads, "WIDTH_BLOCK": self.width}


def threads_of_sums(sums: int) -> int:
    """Return for how many threads a multiprocessor has the registers of `norm_backward` with so many sums."""
    return 1024 if sums <= 2 else 512


def forward(x: Tensor, weights: Weights, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and what the backward pass needs; as `norm_plain.forward`."""
    results, launch = plan_forward(x, weights, form)
    if x.numel():
        launch.run()
    return results


def plan_forward(x: Tensor, weights: Weights, form: Form) -> tuple[tuple[Tensor, Tensor, Tensor], Launch]:
    """Return memory for the results, and the launch that fills it."""
    rows, dim = x.shape[:-1].numel(), x.shape[-1]
    heads = _heads_with_dots(dim, weights, form)
    tile = Tile.of(dim, heads or 1, channels_of_a_thread=16)
    y = x.new_empty(x.shape)
    statistics = x.new_empty((2 if form.centred else 1, rows), dtype=torch.float32)
    dots = x.new_empty((rows, heads) if heads else 0, dtype=torch.float32)
    launch = Launch(
        kernel=norm_triton.norm_forward,
        grid=(triton.cdiv(rows, tile.rows),),
        arguments={
            **_sources(x, statistics, dots, weights, form),
            "y": y,
            "eps": form.eps,
            **tile.arguments,
        },
        warps=tile.warps,
    )
    return (y, statistics, dots), launch


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
    rows, dim = x.shape[:-1].numel(), x.shape[-1]
    heads, sums = _heads_with_dots(dim, weights, form), len(weights.names)
    tile = Tile.of(dim, heads or 1, channels_of_a_thread=8)
    whole = tile.length <= (LONGEST_WITH_SUMS if sums > 2 else 2 * LONGEST_WITH_SUMS) or not sums
    walk = Walk.over(
        triton.cdiv(rows, tile.rows),
        tile_bytes=2 * x.itemsize * tile.rows * tile.length,
        warps=tile.warps,
        threads=threads_of_sums(sums if whole else 0),
        processor=processor,
    )
    sources = {"grad": grad.contiguous(), **_sources(x, statistics, dots, weights, form)}
    grad_x = x.new_empty(x.shape)
    grad_dots = torch.empty_like(dots) if heads and not whole else None
    partials = x.new_empty((sums, walk.programs, dim), dtype=torch.float32) if whole else None
    gradient = Launch(
        kernel=norm_triton.norm_backward,
        grid=(walk.programs,),
        arguments={
            **sources,
            "grad_x": grad_x,
            "grad_dots": grad_dots,
            "partials": partials,
            **tile.arguments,
            "STAGES": walk.stages,
        },
        warps=tile.warps,
    )
    if partials is not None:
        return grad_x, partials, [gradient]
    partials, of_weights = _plan_sums(sources, grad_dots, tile.part(PART_OF_A_ROW), sums, processor)
    return grad_x, partials, [gradient, of_weights]


def _plan_sums(
    sources: dict[str, Any], grad_dots: Tensor | None, part: Tile, sums: int, processor: Processor
) -> tuple[Tensor, Launch]:
    """Return memory for [weights, programs, dim], and the launch that fills it."""
    x, heads, width = sources["x"], sources["HEADS"], sources["WIDTH"]
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
    launch = Launch(
        kernel=norm_triton.norm_sums,
        grid=(walk.programs, parts),
        arguments={
            **{name: source for name, source in sources.items() if name != "offset"},
            "grad_dots": grad_dots,
            "partials": partials,
            "HEAD_BLOCK": part.heads,
            "WIDTH_BLOCK": part.width,
            "STAGES": walk.stages,
        },
        warps=part.warps,
    )
    return partials, launch


def plan(x: Tensor, weights: Weights, form: Form, processor: Processor) -> list[Launch]:
    """Return the launches of a forward and a backward pass, to be inspected; the tensors may be on "meta"."""
    (y, statistics, dots), launch = plan_forward(x, weights, form)
    return [launch, *plan_backward(y, x, statistics, dots, weights, form, processor)[2]]


def _heads_with_dots(dim: int, weights: Weights, form: Form) -> int:
    """Return the number of heads that have a dot product to keep: none where every channel is its own head."""
    return 0 if weights.beta is None or form.heads == dim else form.heads


def _sources(x: Tensor, statistics: Tensor, dots: Tensor, weights: Weights, form: Form) -> dict[str, Any]:
    rows, dim = x.shape[:-1].numel(), x.shape[-1]
    heads = _heads_with_dots(dim, weights, form)
    return {
        "x": x.contiguous(),
        **{name: None if weight is None else weight.contiguous() for name, weight in weights._asdict().items()},
        "statistics": statistics,
        "dots": dots if heads else None,
        "rows": rows,
        "offset": form.offset,
        "dot_scale": form.dot_scale,
        "HEADS": heads or 1,
        "WIDTH": dim // (heads or 1),
        "ACTIVATION": form.activation,
        "CENTRED": form.centred,
    }
