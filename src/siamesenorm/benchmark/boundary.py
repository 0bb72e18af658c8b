"""bench boundary: everything between one sublayer's output and the next one's input, for every topology.

A boundary is the write of one connection and the read of the next. Candidates are the plain formulas, the same
compiled, the fused operator where the topology has one, and for Pre-Norm the kernels of other libraries where they are
installed; the yardstick is a copy on the same machine in the same round, of the bytes that the fused operator must move
(or, without one, as many as the topology says).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.benchmark.foreign_kernels import FOREIGN_KERNELS, refuse_another_function
from siamesenorm.benchmark.results import Results, Row, noting
from siamesenorm.benchmark.saved_bytes import kept_for_backward
from siamesenorm.benchmark.timing import (
    NO_DEADLINE,
    Action,
    CacheFlush,
    Deadline,
    Spread,
    Timings,
    copy_action,
    measure,
    ratio,
    resolve_device,
    rounded,
    share_of_copy_rate,
)
from siamesenorm.benchmark.traffic import traffic_of
from siamesenorm.norms import NormSpec
from siamesenorm.norms.rms_norm import RMSNorm
from siamesenorm.topologies import Connection, Kernels, Materials, Streams, Topology, build_topology, transformer_places
from siamesenorm.topologies.fused import FusedConnection

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
class Boundary:
    """One boundary of a topology, ready to run: the second connection of a block after the first one's write."""

    topology: Topology
    before: Connection
    after: Connection
    streams: Streams
    output: Tensor
    gradients: tuple[Tensor, ...] = field(default=())

    @classmethod
    def build(cls, topology: Topology, materials: Materials, tokens: int, device: torch.device) -> Boundary:
        """Build the boundary before a block's MLP on random streams, which require gradients as do the gains."""
        attention, mlp = transformer_places(2)[1]
        generator = torch.Generator(device).manual_seed(0)
        before, after = (topology.connection(place, materials).to(device) for place in (attention, mlp))

        def random(dtype: torch.dtype | None) -> Tensor:
            values = torch.randn(tokens, materials.dim, generator=generator, device=device)
            return values.to(dtype).requires_grad_()

        plain = dataclasses.replace(materials, kernels="plain")  # its reads take settled streams, as the opening's are
        with torch.no_grad():
            opened = topology.opening(materials).to(device)(random(materials.residual_dtype))
            _, read = topology.connection(attention, plain).to(device).read(opened)
        streams = tuple(stream.detach().clone().requires_grad_(stream.is_floating_point()) for stream in read)
        return cls(
            topology=topology, before=before, after=after, streams=streams, output=random(materials.compute_dtype)
        )

    def forward(self) -> tuple[Tensor, ...]:
        """Return the next sublayer's input and the streams."""
        return cross(self.before, self.after, self.streams, self.output)

    @property
    def inputs(self) -> list[Tensor]:
        """Everything that receives a gradient: streams, output, gains."""
        gains = [p for part in (self.before, self.after) for p in part.parameters() if p.requires_grad]
        return [*self.streams, self.output, *gains]

    def traffic(self) -> tuple[float, float]:
        """Return the bytes of the least forward and backward pass.

        They are counted on a fused boundary; of others they are the topology's passes by the mean size of its tensors.
        """
        tensors = [*self.streams, self.output]
        if isinstance(self.after, FusedConnection):
            parameters = [*self.before.parameters(), *self.after.parameters()]
            return traffic_of(self.forward, tensors, besides=parameters)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / len(tensors)
        return self.topology.cost.forward * size, self.topology.cost.backward * size


def cross(before: Connection, after: Connection, streams: Streams, output: Tensor) -> tuple[Tensor, ...]:
    """Write the output of one sublayer and read for the next."""
    h, streams = after.read(before.write(streams, output))
    return (h, *streams)


def measure_boundaries(
    settings: BoundarySettings, device_name: str = "auto", deadline: Deadline = NO_DEADLINE
) -> Results:
    """Measure every topology at every width and stream dtype; see `BoundarySettings`."""
    device = resolve_device(device_name)
    rows: list[Row] = []
    missing: list[str] = []
    for dim, dtype, name in itertools.product(settings.dims, settings.stream_dtypes, settings.topologies):
        with noting(missing, f"{name}, {dim} {dtype}"):
            deadline.check()
            rows.extend(measure_boundary(name, dim, dtype, settings, device, missing))
    return Results(
        benchmark="boundary", device=str(device), settings=vars(settings), rows=rows,
        not_measured=list(dict.fromkeys(missing)),
    )  # fmt: skip


def measure_boundary(
    name: str, dim: int, dtype: str, settings: BoundarySettings, device: torch.device, missing: list[str]
) -> list[Row]:
    """Return a row for each candidate of one boundary, and add to `missing` those that cannot be measured, and why."""
    forwards: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    boundaries: dict[str, Boundary] = {}
    actions = {"copy": copy_action(device)}
    foreign = settings.foreign if (name, settings.norm) == ("pre", "rmsnorm") else ()
    for candidate in (*settings.candidates, *foreign):
        if absent := missing_kernels(name, candidate):
            missing.append(absent)
            continue
        with noting(missing, f"{name}, {dim} {dtype}, {candidate}"):
            boundary = build_boundary(name, dim, dtype, candidate, settings, device)
            forward = forward_of(candidate, boundary)
            actions.update(passes(candidate, boundary, forward))
            boundaries[candidate], forwards[candidate] = boundary, forward
    flush = CacheFlush(device) if device.type == "cuda" else None
    timings = measure(actions, device=device, rounds=settings.rounds, prepare=flush)
    least = boundaries.get("fused", next(iter(boundaries.values()), None))
    traffic = (0.0, 0.0) if least is None else least.traffic()
    return [
        {"topology": name, "dim": dim, "streams": dtype, "candidate": candidate}
        | describe(candidate, boundary, timings, forwards[candidate], traffic)
        for candidate, boundary in boundaries.items()
    ]


def build_boundary(
    name: str, dim: int, dtype: str, candidate: str, settings: BoundarySettings, device: torch.device
) -> Boundary:
    """Return the boundary with the candidate's kernels."""
    materials = Materials(
        dim=dim,
        norm=NormSpec.parse(settings.norm),
        residual_dtype=DTYPES[dtype],
        compute_dtype=DTYPES[settings.output_dtype],
        kernels=kernels_of(candidate),
    )
    return Boundary.build(build_topology(name), materials, settings.tokens, device)


def kernels_of(candidate: str) -> Kernels:
    """Return the kernels that a candidate is built with."""
    return "fused" if candidate == "fused" else "lean" if candidate == "lean" else "plain"


def missing_kernels(topology: str, candidate: str) -> str | None:
    """Return in words that a topology has no kernels for a candidate, or None if it has."""
    resolved = build_topology(topology)
    has = {"fused": resolved.has_fused_kernels, "lean": resolved.has_lean_kernels}
    return None if has.get(candidate, True) else f"{topology}: has no {candidate} boundary"


def forward_of(candidate: str, boundary: Boundary) -> Callable[[], tuple[Tensor, ...]]:
    """Return how a candidate computes the boundary's forward pass; raises UserError for a kernel that cannot."""
    if candidate == "compiled":
        return compiled_forward(boundary)
    return foreign_forward(candidate, boundary) if candidate in FOREIGN_KERNELS else boundary.forward


def foreign_forward(library: str, boundary: Boundary) -> Callable[[], tuple[Tensor, ...]]:
    """Return Pre-Norm's forward pass by another library; raises UserError unless it computes what ours does."""
    kernel = FOREIGN_KERNELS[library].load()
    (norm,) = (part for part in boundary.after.modules() if isinstance(part, RMSNorm))
    (stream,) = boundary.streams

    def forward() -> tuple[Tensor, Tensor]:
        return kernel(boundary.output, stream, norm.gain, norm.eps)

    refuse_another_function(forward(), boundary.forward())
    return forward


def compiled_forward(boundary: Boundary) -> Callable[[], tuple[Tensor, ...]]:
    """Return the boundary's forward pass as the compiler makes it, without recompilation between boundaries."""
    torch._dynamo.reset()
    compiled = torch.compile(cross, fullgraph=True, dynamic=False)
    return lambda: compiled(boundary.before, boundary.after, boundary.streams, boundary.output)


def passes(candidate: str, boundary: Boundary, forward: Callable[[], tuple[Tensor, ...]]) -> dict[str, Action]:
    """Return the forward pass, without a graph, and the backward pass of a graph made once."""
    outputs = forward()
    gradients = [torch.randn_like(output) for output in outputs]
    inputs = boundary.inputs

    def ahead() -> None:
        with torch.no_grad():
            forward()

    def back() -> None:
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)

    return {f"{candidate} forward": ahead, f"{candidate} backward": back}


def describe(
    candidate: str,
    boundary: Boundary,
    timings: Timings,
    forward: Callable[[], tuple[Tensor, ...]],
    traffic: tuple[float, float],
) -> dict[str, Any]:
    """Return times, the share of the copy rate at the least traffic, ratios to the compiler, and what is kept."""
    record: dict[str, Any] = {}
    for direction, moved in zip(("forward", "backward"), traffic, strict=True):
        seconds = timings[f"{candidate} {direction}"]
        record[f"{direction}_ms"] = Spread.of([1e3 * one for one in seconds])
        record[f"{direction}_share_of_copy_rate"] = share_of_copy_rate(moved, seconds, timings["copy"])
    if "compiled forward" in timings:
        both = {
            name: [f + b for f, b in zip(timings[f"{name} forward"], timings[f"{name} backward"], strict=True)]
            for name in {candidate, "compiled"}
        }
        record["both_to_compiled"] = ratio(both, candidate, "compiled")
    record |= kept_of(boundary, forward)
    return rounded(record)


def kept_of(boundary: Boundary, forward: Callable[[], tuple[Tensor, ...]]) -> dict[str, Any]:
    """Return what the backward pass keeps of a boundary: whole tensors of the streams' size, and scalars a token."""
    parameters: list[nn.Parameter] = [*boundary.before.parameters(), *boundary.after.parameters()]
    kept = kept_for_backward(forward, besides=parameters)
    tokens = boundary.output.shape[0]
    sizes = [piece.bytes for piece in kept]
    whole = boundary.output.numel() * min(tensor.element_size() for tensor in (*boundary.streams, boundary.output))
    return {
        "kept_tensors": sum(size >= whole for size in sizes),
        "kept_bytes_a_token": sum(sizes) / tokens,
        "kept_scalars_a_token": sum(size for size in sizes if size < whole) / (4 * tokens),
    }
