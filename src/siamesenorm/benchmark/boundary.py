"""bench boundary: everything between one sublayer's output and the next one's input, for every topology.

A boundary is the write of one connection and the read of the next. Candidates are the plain formulas, the same
compiled, the fused operator where the topology has one, and for Pre-Norm the kernels of other libraries where they are
installed. Each must first compute what the formulas do in fp64, gradients too; the yardstick of its speed is a copy on
the same machine in the same round, of the bytes that it must move for what it takes, returns and keeps.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siamesenorm.benchmark.agreement import Expected
from siamesenorm.benchmark.foreign_kernels import FOREIGN_KERNELS
from siamesenorm.benchmark.measured_boundary import Boundary, Forward, cross
from siamesenorm.benchmark.results import Progress, Results, Row, noting, unseen
from siamesenorm.benchmark.saved_bytes import kept_for_backward
from siamesenorm.benchmark.timing import (
    NO_DEADLINE,
    Action,
    CacheFlush,
    Deadline,
    Spread,
    Timings,
    allow_kept_graphs,
    copy_action,
    current,
    measure,
    ratio,
    resolve_device,
    rounded,
    share_of_copy_rate,
)
from siamesenorm.norms import NormSpec
from siamesenorm.norms.rms_norm import RMSNorm
from siamesenorm.topologies import Kernels, ResidualSpec, Streams, Topology, build_topology

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class BoundarySettings:
    """What is measured: widths, tokens, the dtype of the streams (outputs are bf16 on CUDA), rounds."""

    topologies: tuple[str, ...] = ("siamese", "pre", "siamese-post-pre", "post", "residual", "dhc-2")
    dims: tuple[int, ...] = (2048, 1024, 4096)
    tokens: int = 16384
    stream_dtypes: tuple[str, ...] = ("bfloat16", "float32")
    output_dtype: str = "bfloat16"
    norm: str = "rmsnorm"
    candidates: tuple[str, ...] = ("plain", "compiled", "fused", "lean")
    foreign: tuple[str, ...] = tuple(FOREIGN_KERNELS)
    rounds: int = 30


def settings_for(device: torch.device) -> BoundarySettings:
    """Return what is measured on a device: three widths on CUDA, one in fp32 on a CPU."""
    if device.type == "cuda":
        return BoundarySettings()
    return BoundarySettings(
        dims=(512,), tokens=8192, stream_dtypes=("float32",), output_dtype="float32", foreign=(), rounds=15
    )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute a boundary."""

    boundary: Boundary
    forward: Forward
    passes: dict[str, Action]

    @classmethod
    def build(cls, name: str, boundary: Boundary, expected: Expected) -> Candidate:
        """Run both passes of a candidate once; raises UserError if it cannot, or computes something else."""
        forward = forward_of(name, boundary)
        boundary.refuse_other_dtypes(forward)
        expected.refuse_another(boundary.values(forward))
        passes = passes_of(boundary, forward)
        for run in passes.values():
            run()
        return cls(boundary=boundary, forward=forward, passes=passes)


def expected_of(topology: Topology, plain: Boundary, spec: ResidualSpec) -> Expected:
    """Return what every candidate of a topology must compute."""
    exact = plain.in_double(topology, spec)
    return Expected.of(exact.values(exact.forward), plain.values(plain.forward), coarsest(plain.streams, plain.output))


def coarsest(streams: Streams, output: Tensor) -> torch.dtype:
    """Return bf16 where streams or outputs are, else fp32."""
    return torch.bfloat16 if torch.bfloat16 in {each.dtype for each in (*streams, output)} else torch.float32


def measure_boundaries(
    settings: BoundarySettings,
    device_name: str = "auto",
    deadline: Deadline = NO_DEADLINE,
    progress: Progress = unseen,
) -> Results:
    """Measure every topology at every width and stream dtype; see `BoundarySettings`.

    `progress` is called with the results so far after each. What fails is noted, and the rest goes on.
    """
    device = resolve_device(device_name)
    results = Results(benchmark="boundary", device=str(device), settings=vars(settings))
    missing = results.not_measured
    for dim, dtype, name in itertools.product(settings.dims, settings.stream_dtypes, settings.topologies):
        with current(device), allow_kept_graphs(), noting(missing, f"{name}, {dim} {dtype}"):
            deadline.check()
            results.rows.extend(measure_boundary(name, dim, dtype, settings, device, missing, deadline))
        progress(results)
    return results


def measure_boundary(
    name: str,
    dim: int,
    dtype: str,
    settings: BoundarySettings,
    device: torch.device,
    missing: list[str],
    deadline: Deadline = NO_DEADLINE,
) -> list[Row]:
    """Return a row for each candidate of one boundary, and add to `missing` those that cannot be measured, and why."""
    topology = build_topology(name)
    spec = ResidualSpec(
        dim=dim,
        norm=NormSpec.parse(settings.norm),
        residual_dtype=DTYPES[dtype],
        compute_dtype=DTYPES[settings.output_dtype],
    )
    foreign = settings.foreign if (name, settings.norm) == ("pre", "rmsnorm") else ()

    def build(kernels: Kernels) -> Boundary:
        chosen = dataclasses.replace(spec, kernels=kernels)
        return Boundary.build(topology, chosen, settings.tokens, device)

    expected = expected_of(topology, build("plain"), spec)
    candidates: dict[str, Candidate] = {}
    for each in (*settings.candidates, *foreign):
        if absent := missing_kernels(name, each):
            missing.extend({absent} - set(missing))
            continue
        with noting(missing, f"{name}, {dim} {dtype}, {each}"):
            candidates[each] = Candidate.build(each, build(kernels_of(each)), expected)
    actions = {"copy": copy_action(device)}
    for each, candidate in candidates.items():
        actions |= {f"{each} {direction}": run for direction, run in candidate.passes.items()}
    flush = CacheFlush(device) if device.type == "cuda" else None
    timings = measure(actions, device=device, rounds=settings.rounds, prepare=flush, deadline=deadline)
    return [
        {"topology": name, "dim": dim, "streams": dtype, "candidate": each} | describe(each, candidate, timings)
        for each, candidate in candidates.items()
    ]


def kernels_of(candidate: str) -> Kernels:
    """Return the kernels that a candidate is built with."""
    return "fused" if candidate == "fused" else "lean" if candidate == "lean" else "plain"


def missing_kernels(topology: str, candidate: str) -> str | None:
    """Return in words that a topology has no kernels for a candidate, or None if it has."""
    resolved = build_topology(topology)
    has = {"fused": resolved.has_fused_kernels, "lean": resolved.has_lean_kernels}
    return None if has.get(candidate, True) else f"{topology}: has no {candidate} boundary"


def forward_of(candidate: str, boundary: Boundary) -> Forward:
    """Return how a candidate computes the boundary's forward pass; raises UserError for a kernel that cannot."""
    if candidate == "compiled":
        return compiled_forward(boundary)
    return foreign_forward(candidate, boundary) if candidate in FOREIGN_KERNELS else boundary.forward


def foreign_forward(library: str, boundary: Boundary) -> Forward:
    """Return Pre-Norm's forward pass by another library; raises UserError if it is not here."""
    kernel = FOREIGN_KERNELS[library].load()
    (norm,) = (part for part in boundary.after.modules() if isinstance(part, RMSNorm))
    (stream,) = boundary.streams

    return lambda: kernel(boundary.output, stream, norm.gain, norm.eps)


def compiled_forward(boundary: Boundary) -> Forward:
    """Return the boundary's forward pass as the compiler makes it, without recompilation between boundaries."""
    torch._dynamo.reset()
    compiled = torch.compile(cross, fullgraph=True, dynamic=False)
    return lambda: compiled(boundary.before, boundary.after, boundary.streams, boundary.output)


def passes_of(boundary: Boundary, forward: Forward) -> dict[str, Action]:
    """Return the forward pass as training runs it, with all that it keeps, and the backward pass of a graph made once.

    The compiler leaves out what is kept, and so does less, where there is no gradient.
    """
    outputs = forward()
    gradients = boundary.gradients(outputs)
    inputs = list(boundary.inputs.values())

    def back() -> None:
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)

    return {"forward": forward, "backward": back}


def describe(name: str, candidate: Candidate, timings: Timings) -> dict[str, Any]:
    """Return times, the share of the copy rate at the least traffic, ratios to the compiler, and what is kept."""
    record: dict[str, Any] = {}
    moved = candidate.boundary.traffic(candidate.forward)
    for direction, size in zip(("forward", "backward"), moved, strict=True):
        seconds = timings[f"{name} {direction}"]
        record[f"{direction}_ms"] = Spread.of([1e3 * one for one in seconds])
        record[f"{direction}_share_of_copy_rate"] = share_of_copy_rate(size, seconds, timings["copy"])
    if "compiled forward" in timings:
        both = {
            each: [f + b for f, b in zip(timings[f"{each} forward"], timings[f"{each} backward"], strict=True)]
            for each in {name, "compiled"}
        }
        record["both_to_compiled"] = ratio(both, name, "compiled")
    return rounded(record | kept_of(candidate.boundary, candidate.forward))


def kept_of(boundary: Boundary, forward: Forward) -> dict[str, Any]:
    """Return what the backward pass keeps of a boundary: whole tensors of the streams' size, and scalars a token."""
    kept = kept_for_backward(forward, besides=boundary.parameters)
    tokens = boundary.output.shape[0]
    sizes = [piece.bytes for piece in kept]
    whole = boundary.output.numel() * min(tensor.element_size() for tensor in (*boundary.streams, boundary.output))
    return {
        "kept_tensors": sum(size >= whole for size in sizes),
        "kept_bytes_a_token": sum(sizes) / tokens,
        "kept_scalars_a_token": sum(size for size in sizes if size < whole) / (4 * tokens),
    }
