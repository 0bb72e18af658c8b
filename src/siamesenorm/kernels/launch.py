"""Where the fused operators are used, and the launch of a Triton kernel as a value: to be run, or to be inspected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from siamesenorm.errors import UserError

HAS_TRITON = find_spec("triton") is not None
SMALLEST_FUSED_BYTES = 2**20
"""Bytes of the smallest tensor for which "auto" uses an operator.

An operator takes the host 0.1 to 0.2 ms for both passes, longer than the few launches of the plain formulas.
"""
SHORTEST_TILE = 1024
"""Channels that a program of 4 warps holds; shorter rows share it."""
PREFETCH_BYTES = 96 * 1024
"""Bytes of a multiprocessor's shared memory for prefetched rows; one tile is prefetched wherever it fits.

It is three times what hides the memory latency of an H200, 4.8 TB/s x 0.8 us / 132; more costs registers.
"""


def can_launch_on(x: Tensor) -> bool:
    """Return whether Triton kernels can be launched on rows like x: on CUDA, and of a dtype below fp64."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation is active, which the operators do not support.

    Forward-mode differentiation would raise no error: where nothing requires gradients, the tangent is lost.
    """
    return forward_ad._current_level >= 0 or bool(torch._C._are_functorch_transforms_active())


def is_plain(x: Tensor) -> bool:
    """Return whether x is an ordinary tensor, or a fake one: not sharded (DTensor) and under no transformation."""
    return type(x) in (Tensor, torch.nn.Parameter, FakeTensor) and not is_transformed()


def suits_operator(x: Tensor) -> bool:
    """Return whether "auto" may use an operator for x: it supports ordinary tensors, and pays on large ones."""
    return is_plain(x) and x.numel() * x.itemsize >= SMALLEST_FUSED_BYTES


def refuse_transformations(operator: str) -> None:
    """Raise UserError under a transformation that an operator does not support."""
    if is_transformed():
        raise UserError(f"the fused {operator} does not support torch.func and forward-mode AD: use plain kernels")


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, the number of its programs in each dimension, its arguments by name, and warps a program."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int

    def run(self) -> None:
        """Run the kernel on the device of its tensors, whichever is current."""
        device = next(value.device for value in self.arguments.values() if isinstance(value, Tensor))
        if device.type == "cpu":  # Triton's interpreter
            self.kernel[self.grid](**self.arguments, num_warps=self.warps)
            return
        with torch.cuda.device(device):
            # Explicit, as Triton's default for fusing multiplications with additions is about to change.
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, enable_fp_fusion=True)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program holds at a time: `rows` rows of `heads` x `width` channels (powers of two), in `warps` warps."""

    rows: int
    heads: int
    width: int
    warps: int

    @classmethod
    def of(cls, dim: int, heads: int = 1, *, channels_of_a_thread: int = 8) -> Tile:
        """Return the tile for rows, or parts of rows, of `dim` channels; short rows fill a program of 4 warps."""
        heads, width = power_of_two(heads), power_of_two(dim // heads)
        warps = min(32, max(4, heads * width // (32 * channels_of_a_thread)))
        return cls(max(1, SHORTEST_TILE // (heads * width)), heads, width, warps)

    def part(self, length: int) -> Tile:
        """Return the tile for at most `length` channels of one row: whole heads, or a part of one."""
        return Tile(1, max(1, length // self.width), min(self.width, length), max(4, length // (32 * 8)))

    @property
    def length(self) -> int:
        """The channels of a row."""
        return self.heads * self.width


@dataclass(frozen=True, slots=True)
class Processor:
    """The multiprocessors of a device, and how many bytes of shared memory a program can have."""

    count: int
    memory: int

    @staticmethod
    @cache
    def of(device: torch.device) -> Processor:
        """Return those of a device; few on a CPU, where the interpreter runs programs one after the other."""
        if device.type != "cuda":
            return Processor(count=2, memory=0)
        properties: Any = torch.cuda.get_device_properties(device)
        memory = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        return Processor(count=properties.multi_processor_count, memory=memory)


H200 = Processor(count=132, memory=232_448)


@dataclass(frozen=True, slots=True)
class Walk:
    """How a persistent kernel goes over the rows: its number of programs, each with `stages - 1` tiles prefetched.

    Tiles are prefetched to shared memory while the program computes the one before them.
    """

    programs: int
    stages: int

    @classmethod
    def over(
        cls, tiles: int, *, tile_bytes: int, warps: int, threads: int, processor: Processor, parts: int = 1,
        most_ahead: int = 2,
    ) -> Walk:  # fmt: skip
        """Return the walk over so many tiles, each of which reads `tile_bytes`, in one wave of programs.

        `threads` are those for which a multiprocessor has registers, and `parts` the programs that share a row.
        """
        resident = max(1, threads // (32 * warps))
        programs = max(1, min(processor.count * resident // parts, tiles))
        one_ahead = resident * tile_bytes
        # A little memory is needed for the sums over a row.
        fitting = max(0, processor.memory - 8192) // one_ahead
        return cls(programs, stages=1 + min(most_ahead, fitting, max(1, PREFETCH_BYTES // one_ahead)))
