"""What it takes to run one Triton kernel, as a value: it can be run on a GPU, or compiled and inspected without one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def can_launch_on(x: Tensor) -> bool:
    """Return whether Triton kernels can be launched on rows like x: on CUDA, and of a dtype below fp64."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def is_transformed() -> bool:
    """Return whether a transformation of torch.func is at work: operators of one's own are opaque to most of them."""
    return bool(torch._C._are_functorch_transforms_active())


def shows_itself(x: Tensor) -> bool:
    """Return whether an operator that knows neither shards (DTensor) nor torch.func may be given x."""
    return type(x) in (Tensor, torch.nn.Parameter) and not is_transformed()


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
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
            # Said aloud, for Triton's default for fusing multiplications with additions is about to change.
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, enable_fp_fusion=True)


@dataclass(frozen=True, slots=True)
class Processor:
    """The multiprocessors of a device, and how many bytes of shared memory a program can have."""

    count: int
    memory: int

    @classmethod
    def of(cls, device: torch.device) -> Processor:
        """Return those of a device; an interpreter, on a CPU, is given few: its programs run one after the other."""
        return _of_gpu(device) if device.type == "cuda" else cls(count=2, memory=0)


H200 = Processor(count=132, memory=232_448)


@cache
def _of_gpu(device: torch.device) -> Processor:
    properties: Any = torch.cuda.get_device_properties(device)
    memory = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Processor(count=properties.multi_processor_count, memory=memory)
