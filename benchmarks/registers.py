"""Registers, spills, shared memory and widths of memory accesses of our kernels, compiled for Hopper without a GPU.

    python benchmarks/registers.py    # writes performance/registers.json

Triton has an assembler and a disassembler, so a launch can be compiled ahead of time for any NVIDIA architecture.
Tensors are taken to be aligned to 16 bytes, as PyTorch allocates them. Nothing here says how fast a kernel is.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.benchmark.results import Results, Row
from siamesenorm.kernels.boundary_plain import Constants, Gains, Grads, Kept, Parts
from siamesenorm.kernels.launch import H200, Launch

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The machine code of one kernel.

    `registers` and `spilled_bytes` are of one thread, `shared_bytes` of one program; `loads` and `stores` count the
    instructions on global memory by their width in bits, asynchronous copies among the loads.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int
    loads: dict[int, int]
    stores: dict[int, int]

    @property
    def resident(self) -> int:
        """The programs for which a multiprocessor (of Hopper) has registers and threads."""
        of_a_warp = -(-32 * self.registers // 256) * 256
        return min(32, 2048 // self.threads, 65_536 // (of_a_warp * self.threads // 32))


def inspect(launch: Launch, capability: int = 90) -> Inspection:
    """Compile a launch for an architecture (90 is Hopper) and read its machine code; the tensors may be on "meta"."""
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    kernel = launch.kernel
    arguments = {name: launch.arguments[name] for name in kernel.arg_names}
    signature = {name: _type_of(value) for name, value in arguments.items()}
    for parameter in kernel.params:
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
    constants = {(i,): arguments[name] for i, name in enumerate(arguments) if signature[name] == "constexpr"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, value) in enumerate(arguments.items())
        if signature[name].startswith("*") or (signature[name] == "i32" and value % 16 == 0)
    }
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.warps, "enable_fp_fusion": True},
    )
    resources, code = _disassemble(compiled.asm["cubin"])
    return Inspection(
        registers=resources["REG"],
        spilled_bytes=resources["STACK"] + resources["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        threads=32 * launch.warps,
        loads=_widths(code, "LDG|LDGSTS"),
        stores=_widths(code, "STG"),
    )


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    # Triton compiles a kernel of its own for a number that is 1.
    return (
        "constexpr" if type(value) is int and value == 1 else {int: "i32", float: "fp32"}.get(type(value), "constexpr")
    )


def _disassemble(cubin: bytes) -> tuple[dict[str, int], str]:
    """Return the resource usage and the assembly of a compiled kernel, by the tools that come with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def output(*command: str | Path) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = output(tools / "nvdisasm", "-c", file.name)
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}, code


def _widths(code: str, opcodes: str) -> dict[int, int]:
    """Count instructions by width in bits; an opcode without a width is of 32."""
    found: Counter[int] = Counter()
    for modifiers in re.findall(rf"\b(?:{opcodes})((?:\.\w+)*)\s", code):
        width = re.search(r"\.[US]?(8|16|64|128)(?=\.|$)", modifiers)
        found[int(width[1]) if width else 32] += 1
    return dict(sorted(found.items()))


# --- the boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryKind:
    """One of the boundaries of the topologies: the gains it has, whether there is a second stream, its constants."""

    gains: tuple[str, ...]
    two_streams: bool
    constants: tuple[str, ...] = ()


BOUNDARIES = {
    "siamese attention": BoundaryKind(gains=("gate", "identity_gain"), two_streams=True, constants=("scale",)),
    "siamese mlp": BoundaryKind(
        gains=("post_norm_gain", "identity_gain", "input_gain"), two_streams=True, constants=("scale",)
    ),
    "siamese post-pre": BoundaryKind(gains=("post_norm_gain", "identity_gain"), two_streams=True, constants=("scale",)),
    "pre-norm": BoundaryKind(gains=("input_gain",), two_streams=False),
    "post-norm": BoundaryKind(gains=("post_norm_gain",), two_streams=False),
    "deepnorm": BoundaryKind(gains=("post_norm_gain",), two_streams=False, constants=("skip",)),
    "residual": BoundaryKind(gains=("post_norm_gain",), two_streams=True, constants=("identity_scale",)),
}
"""By name; `siamese post-pre` is the one without normalised input."""


def boundary_launches(
    kind: BoundaryKind,
    dim: int,
    *,
    streams: torch.dtype = torch.bfloat16,
    output: torch.dtype = torch.bfloat16,
    centred: bool = False,
    lean: bool = False,
    tokens: int = 16_384,
) -> Iterator[tuple[str, Launch]]:
    """Yield (pass, launch) of a boundary as on an H200, with fp32 gains, and biases if it is centred.

    `lean` takes the backward pass that rebuilds the identity stream.
    """
    from siamesenorm.kernels.boundary_launch import plan_backward, plan_forward

    def rows(dtype: torch.dtype) -> Tensor:
        return torch.empty(tokens, dim, dtype=dtype, device="meta")

    def number(name: str) -> Tensor | None:
        return torch.empty((), device="meta") if name in kind.constants else None

    biases = tuple(gain.replace("gain", "bias") for gain in kind.gains if gain != "gate") if centred else ()
    learned = {*kind.gains, *biases}
    gains = Gains(*(torch.empty(dim, device="meta") if name in learned else None for name in Gains._fields))
    constants = Constants(*map(number, Constants._fields))
    identity = rows(streams) if kind.two_streams else None
    normalised = None if gains.identity_gain is None else identity
    next_scale = torch.empty((), device="meta") if lean else None
    parts = Parts(constants, gains, 1e-5, centred)
    result, launch = plan_forward(rows(streams), rows(output), identity, parts)
    yield "forward", launch
    stream = result.bounded_next if gains.post_norm_gain is None else result.updated
    kept = Kept(stream, normalised, result.statistics, next_scale)
    _, launches = plan_backward(Grads(rows(streams), identity, rows(output)), kept, parts, H200)
    for launch in launches:
        yield launch.kernel.__name__.removeprefix("boundary_"), launch


# --- the table

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NORMS = ("rmsnorm", "layernorm")
WIDTHS = (
    (1024, "bfloat16"), (2048, "bfloat16"), (4096, "bfloat16"),
    (512, "float32"), (1024, "float32"), (2048, "float32"), (4096, "float32"),
)  # fmt: skip
"""The sizes at which nothing may spill, and in fp32 one below and one beyond them."""


def inspect_kernels(kinds: tuple[str, ...] = tuple(BOUNDARIES)) -> Results:
    """Return registers, spills and access widths of every boundary's kernels, by norm, at the usual widths."""
    rows: list[Row] = []
    missing = [] if find_spec("triton") else ["triton is not installed"]
    for kind, norm, (dim, streams) in itertools.product(kinds, NORMS, WIDTHS) if not missing else ():
        launches = boundary_launches(BOUNDARIES[kind], dim, streams=DTYPES[streams], centred=norm == "layernorm")
        for direction, launch in launches:
            found = inspect(launch)
            rows.append(
                {
                    "boundary": kind, "norm": norm, "dim": dim, "streams": streams, "pass": direction,
                    "registers": found.registers, "spilled_bytes": found.spilled_bytes, "threads": found.threads,
                    "shared_bytes": found.shared_bytes, "loads_128": found.loads.get(128, 0),
                    "stores_128": found.stores.get(128, 0),
                }
            )  # fmt: skip
    return Results(benchmark="registers", device="cpu", settings={"capability": 90}, rows=rows, not_measured=missing)


def main() -> None:
    """Compile every kernel, write the file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "performance/registers.json")
    inspect_kernels().show(parser.parse_args().out)


if __name__ == "__main__":
    main()
