"""Pre-Norm's boundary by the kernels of other libraries: an addition and an RMSNorm in one.

    python benchmarks/foreign_kernels.py    # on CUDA, with those that are installed; writes gpu/foreign_kernels.json

None of them has a boundary of two streams. Each is called as its own documentation says, on [tokens, dim].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.benchmark.boundary import Boundary, BoundarySettings, Cross, measure_boundaries, settings_for
from siamesenorm.benchmark.measurement import resolve_device
from siamesenorm.benchmark.results import Results, Session
from siamesenorm.errors import UserError
from siamesenorm.norms import RMSNorm

AddedNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Takes output O, stream Y, gain and eps, and returns the next sublayer's input H = RMSNorm(Y + O) and Y + O."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKernel:
    """Where a library keeps its kernel (in one of these modules, by version), and how it is called."""

    package: str
    modules: tuple[str, ...]
    name: str
    call: Callable[[Any, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

    def load(self) -> AddedNorm:
        """Import the kernel; raises UserError if the library is not installed, or has no such kernel."""
        for module in self.modules:
            try:
                kernel = getattr(importlib.import_module(module), self.name)
            except (ImportError, AttributeError) as error:
                reason = error
            else:
                return lambda output, stream, gain, eps: self.call(kernel, output, stream, gain, eps)
        raise UserError(f"{self.package} cannot be used: {reason}") from reason

    def cross(self, boundary: Boundary) -> Cross:
        """Return how this kernel crosses Pre-Norm's boundary."""
        kernel = self.load()
        (norm,) = (part for part in boundary.after.modules() if isinstance(part, RMSNorm))
        assert norm.gain is not None
        gain = norm.gain
        return lambda before, after, streams, output: kernel(output, streams[0], gain, norm.eps)


def _liger(kernel: Any, output: Tensor, stream: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h, added = kernel.apply(output, stream, gain, eps, 0.0, "gemma", False)  # everything in fp32, as ours
    return h, added


def _with_residual(kernel: Any, output: Tensor, stream: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    in_fp32 = stream.dtype == torch.float32
    h, added = kernel(output, gain, None, residual=stream, eps=eps, prenorm=True, residual_in_fp32=in_fp32)
    return h, added


def _quack(kernel: Any, output: Tensor, stream: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h, added = kernel(output, gain, residual=stream, residual_dtype=stream.dtype, eps=eps, prenorm=True)
    return h, added


FOREIGN_KERNELS = {
    "liger": ForeignKernel(
        package="liger-kernel", modules=("liger_kernel.ops",), name="LigerFusedAddRMSNormFunction", call=_liger
    ),
    "flash-attn": ForeignKernel(
        package="flash-attn", modules=("flash_attn.ops.triton.layer_norm",), name="rms_norm_fn", call=_with_residual
    ),
    "fla": ForeignKernel(
        package="flash-linear-attention",
        modules=("fla.modules.layernorm", "fla.modules.norm.layernorm"),
        name="rms_norm",
        call=_with_residual,
    ),
    "quack": ForeignKernel(package="quack-kernels", modules=("quack",), name="rmsnorm", call=_quack),
}


def measure_foreign_kernels(
    settings: BoundarySettings, device: torch.device, libraries: tuple[str, ...] = tuple(FOREIGN_KERNELS)
) -> Results:
    """Measure Pre-Norm's boundary with RMSNorm, by our candidates and by other libraries."""
    others = {name: FOREIGN_KERNELS[name].cross for name in libraries}
    settings = replace(settings, topologies=("pre",), norm="rmsnorm")
    return measure_boundaries(Session("boundary", settings, device), others)


def main() -> None:
    """Measure, write the file, print the table."""
    device = resolve_device("cuda")
    out = Path(__file__).parent / "gpu/foreign_kernels.json"
    measure_foreign_kernels(settings_for(device), device).show(out)


if __name__ == "__main__":
    main()
