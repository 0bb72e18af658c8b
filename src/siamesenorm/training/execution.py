"""How a run is executed, and on what: device, kernels, compilation and recomputation of blocks, versions."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import siamesenorm
from siamesenorm.errors import UserError
from siamesenorm.kernels import grouped  # noqa: F401 - registers an operator
from siamesenorm.kernels.launch import HAS_TRITON
from siamesenorm.norms import Norm
from siamesenorm.topologies import Kernels
from siamesenorm.topologies.boundary_family import BoundaryConnection

if TYPE_CHECKING:
    from siamesenorm.training.config import Execution, Recomputation

COMPILING_PAYS = 2e14
"""Operations of training from which compiling saves more than it costs: 2 to 4 % of a step of width 512 (performance
page) against 15 to 30 s for the first call, or more on a loaded machine, at some 1e11 operations per second."""
GRAPHS_PER_BLOCK = 4
"""Most graphs of a block: with gradients and without, each for whole and for smaller batches."""
PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.siamesenorm.grouped_linear.default,
]
"""Matrix products and attention: nearly all operations of a block."""
BYTES_PER_PARAMETER = 16
"""Weight, gradient and AdamW's two moments in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What "auto" became in a run: the kernels of the model, and whether blocks are compiled.

    Kernels that remain "auto" are fused operators for large tensors; see `operators_in_use`.
    """

    kernels: Kernels
    compiled: bool


def choose(execution: Execution, operations: float, started_with: Mapping[str, Any] | None = None) -> Choices:
    """Return the choices of a run of so many operations; a resumed run keeps what it was started with.

    Raises UserError where blocks were or are to be compiled and there is no C++ compiler.
    """
    on_cpu, earlier = execution.device.startswith("cpu"), started_with or {}
    kernels, compiled = execution.kernels, execution.compile == "on"
    if kernels == "auto":
        kernels = earlier.get("kernels", "auto" if HAS_TRITON and execution.device.startswith("cuda") else "plain")
    if execution.compile == "auto":
        pays = on_cpu and operations >= COMPILING_PAYS and compiler_for_cpu() is not None
        compiled = execution.expert_shards == 1 and earlier.get("compiled", pays)
    if compiled:
        require_compiler(execution.device)
    return Choices(kernels=kernels, compiled=compiled)


def operators_in_use(model: nn.Module, device: torch.device) -> list[str]:
    """Return which fused operators a model uses on a device: "boundary", "norm", both or none.

    With kernels "auto", tensors below `kernels.launch.SMALLEST_FUSED_BYTES` are left to the plain formulas.
    """
    triton = HAS_TRITON and device.type == "cuda"
    connections = [each for each in model.modules() if isinstance(each, BoundaryConnection) and each.fused_norms]
    norms = [each for each in model.modules() if isinstance(each, Norm) and each.kernels != "plain" and each.fusible]
    used = {"boundary": any(triton or each.everywhere for each in connections), "norm": triton and bool(norms)}
    return [name for name, is_used in used.items() if is_used]


def find_device(name: str) -> torch.device:
    """Return the device of this name; raises UserError where torch has none."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type != "meta" and torch.amp.is_autocast_available(device.type):
            return device
        error: Exception | None = None
    # Which of them it is depends on how torch was built.
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as raised:
        error = raised
    raise UserError(f"device {name!r} is not available: choose cpu, or a device that torch finds") from error


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which a run of a precision computes; that of float32 changes nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def require_memory(model: nn.Module, device: torch.device, shards: int = 1) -> None:
    """Raise UserError unless a shard of the parameters and their optimizer state fits into the memory of the device."""
    needed = BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in model.parameters()) / shards
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf"):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    if needed > available:
        raise UserError(
            f"parameters and optimizer state need {needed / 2**30:,.0f} GiB, the device has "
            f"{available / 2**30:,.0f} GiB: choose a smaller model"
        )


# --- blocks
#
# Checkpointing, compilation and sharding, in this order, work on any model whose stacks are named `blocks`, and leave
# its code, the names of its parameters and its state dict alone. A block's connections are inside it, so norms and
# gates travel with it; a compiled block holds its own recomputation, and sharding gathers its weights around both.


def checkpoint_blocks(model: nn.Module, recomputation: Recomputation = "full") -> None:
    """Keep the streams between blocks for the backward pass, which computes each block again.

    A "selective" recomputation keeps the results of matrix products and attention, too.
    """
    for block in blocks_of(model):
        block.forward = _recomputed(block.forward, recomputation)


def _recomputed(forward: Callable[..., Any], recomputation: Recomputation) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": _keep_products} if recomputation == "selective" else {}

    # A function of this file: the compiler does not enter torch's own, such as a partial of `checkpoint`.
    def recomputed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    return recomputed


def _keep_products() -> tuple[Any, Any]:
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(PRODUCTS)  # type: ignore[no-untyped-call]
    return contexts


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each block as one graph of static shapes, which blocks of one kind share.

    A compiled model equals a compiled model bit for bit, not an eager one: resume a run as it was started. Blocks whose
    streams grow have a graph for each number of streams, in training, in evaluation, and for a last batch that is
    smaller; torch's limits of graphs are raised accordingly.
    """
    blocks, limits = list(blocks_of(model)), torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS_PER_BLOCK * len(blocks))
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, limits.recompile_limit)
    for block in blocks:
        block.compile(fullgraph=True, dynamic=False, backend=backend)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of every stack: the children of each module that is named `blocks`."""
    for name, module in tuple(model.named_modules()):
        if name.rpartition(".")[2] == "blocks":
            yield from module.children()


def compiler_for_cpu() -> str | None:
    """Return the C++ compiler that compiling for a CPU would use, or None."""
    return next((name for name in _compilers() if shutil.which(shlex.split(name)[0])), None)


def require_compiler(device: str) -> None:
    """Raise `UserError` where blocks are to be compiled for a CPU and there is no C++ compiler."""
    if device.startswith("cpu") and compiler_for_cpu() is None:
        raise UserError(
            f"compiling for a CPU needs a C++ compiler, and {', '.join(_compilers())} cannot be found: name one in "
            "CXX, or use --execution.compile off"
        )


def _compilers() -> list[str]:
    return [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]


# --- the machine


def describe_environment(device: str) -> dict[str, Any]:
    """Return versions, hardware, device and the git commit (None outside a checkout) as JSON values."""
    return {
        "siamesenorm": siamesenorm.__version__,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version_of("numpy"),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device,
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def peak_memory(device: torch.device) -> int:
    """Return the most memory held: of the accelerator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
