"""bench boundary: everything between one sublayer's output and the next one's input, for every topology.

A boundary is the write of one connection and the read of the next. Candidates are the plain formulas, the same
compiled, the fused operators where a topology has them, and others that the caller adds. Each is timed only if it
computes what the formulas do in fp64, gradients included; the reference of its speed is a copy of the bytes that it
must move.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from siamesenorm.benchmark.measurement import (
    NO_DEADLINE,
    Action,
    CacheFlush,
    Deadline,
    Expected,
    Timings,
    allow_kept_graphs,
    copy_action,
    current,
    kept_for_backward,
    measure,
    milliseconds,
    perturb,
    random_like,
    ratio,
    resolve_device,
    rounded,
    share_of_copy_rate,
    traffic_of,
)
from siamesenorm.benchmark.results import Progress, Results, Row, measuring
from siamesenorm.errors import UserError
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import (
    Closing,
    Connection,
    Kernels,
    ResidualSpec,
    Streams,
    Topology,
    build_topology,
    transformer_places,
)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Forward = Callable[[], tuple[Tensor, ...]]
"""Returns the next sublayer's input and the streams."""


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
    rounds: int = 30


def settings_for(device: torch.device) -> BoundarySettings:
    """Return what is measured on a device: three widths on CUDA, one in fp32 on a CPU."""
    if device.type == "cuda":
        return BoundarySettings()
    return BoundarySettings(dims=(512,), tokens=8192, stream_dtypes=("float32",), output_dtype="float32", rounds=15)


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The second connection of a block after the first one's write, and the closing, which shows what they did."""

    before: Connection
    after: Connection
    closing: Closing
    streams: Streams
    output: Tensor
    next_output: Tensor

    @classmethod
    def build(cls, topology: Topology, spec: ResidualSpec, tokens: int, device: torch.device) -> Boundary:
        """Build the boundary before a block's MLP on random streams, which require gradients as the gains do."""
        attention, mlp = transformer_places(2)[1]
        generator = torch.Generator(device).manual_seed(0)

        def random(dtype: torch.dtype | None) -> Tensor:
            values = torch.randn(tokens, spec.dim, generator=generator, device=device)
            return values.to(dtype).requires_grad_()

        plain = dataclasses.replace(spec, kernels="plain")  # its reads take complete streams, as the opening returns
        with torch.no_grad():
            opened = topology.opening(spec).to(device)(random(spec.residual_dtype))
            _, read = topology.connection(attention, plain).to(device).read(opened)
        before, after = (topology.connection(place, spec).to(device) for place in (attention, mlp))
        closing = topology.closing(mlp, spec).to(device)
        for part in (before, after, closing):
            perturb(part)
        return cls(
            before=before, after=after, closing=closing,
            streams=tuple(stream.detach().clone().requires_grad_(stream.is_floating_point()) for stream in read),
            output=random(spec.compute_dtype), next_output=random(spec.compute_dtype).detach(),
        )  # fmt: skip

    def in_double(self, topology: Topology, spec: ResidualSpec) -> Boundary:
        """Return the plain formulas of the topology on the same values, in fp64."""
        wide = dataclasses.replace(spec, kernels="plain", residual_dtype=torch.float64, compute_dtype=torch.float64)
        built = Boundary.build(topology, wide, self.output.shape[0], self.output.device)
        for part in (built.before, built.after, built.closing):
            part.double()
        return dataclasses.replace(
            built,
            streams=tuple(stream.detach().double().requires_grad_() for stream in self.streams),
            output=self.output.detach().double().requires_grad_(),
            next_output=self.next_output.double(),
        )

    def forward(self) -> tuple[Tensor, ...]:
        """Return the next sublayer's input and the streams."""
        return cross(self.before, self.after, self.streams, self.output)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Everything that receives a gradient, by name: streams, output, gains."""
        streams = {f"stream {number}": stream for number, stream in enumerate(self.streams)}
        parts = {"written": self.before, "read": self.after}
        gains = {f"{name} {gain}": p for name, part in parts.items() for gain, p in part.named_parameters()}
        return streams | {"output": self.output} | {name: p for name, p in gains.items() if p.requires_grad}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of both connections."""
        return [*self.before.parameters(), *self.after.parameters()]

    def close(self, results: tuple[Tensor, ...]) -> Tensor:
        """Return what the head sees after one more write: independent of the form in which the streams are left."""
        closed: Tensor = self.closing(self.after.write(results[1:], self.next_output))
        return closed

    def gradients(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        """Return a gradient for each result: random for H; for the streams, the one that the closing returns.

        It belongs to real streams, as the lean boundary recomputes a stream from such a gradient.
        """
        closed = self.close(results)
        of_streams = torch.autograd.grad(
            closed, results[1:], random_like(closed, 1), retain_graph=True, materialize_grads=True
        )
        return [random_like(results[0], 2), *of_streams]

    def values(self, forward: Forward) -> dict[str, Tensor]:
        """Return H, what the head sees, and the gradient of every input, as `forward` computes the boundary."""
        results = forward()
        closed = self.close(results)
        inputs = self.inputs
        gradients = torch.autograd.grad(
            (results[0], closed), list(inputs.values()), (random_like(results[0], 2), random_like(closed, 1)),
            materialize_grads=True,
        )  # fmt: skip
        named = {f"gradient of {name}": one for name, one in zip(inputs, gradients, strict=True)}
        return {"input": results[0].detach(), "closed state": closed.detach()} | named

    def check_dtypes(self, forward: Forward) -> None:
        """Raise UserError unless a candidate leaves its streams in their dtype."""
        with torch.no_grad():
            _, *found = forward()
        for one, other in zip(found, self.streams, strict=False):
            if one.dtype != other.dtype:
                raise UserError(f"its stream is {one.dtype}, where ours is {other.dtype}")

    def passes(self, forward: Forward) -> dict[str, Action]:
        """Return the forward pass as training runs it, and the backward pass of a graph made once.

        Without gradients the compiler keeps less, and so does less work.
        """
        outputs = forward()
        gradients = self.gradients(outputs)
        inputs = list(self.inputs.values())

        def backward() -> None:
            torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)

        return {"forward": forward, "backward": backward}


def cross(before: Connection, after: Connection, streams: Streams, output: Tensor) -> tuple[Tensor, ...]:
    """Write the output of one sublayer and read for the next."""
    h, streams = after.read(before.write(streams, output))
    return (h, *streams)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute a boundary."""

    boundary: Boundary
    forward: Forward
    passes: dict[str, Action]

    @classmethod
    def build(cls, boundary: Boundary, forward: Forward, expected: Expected) -> Candidate:
        """Run both passes of a candidate once; raises UserError if it computes something else."""
        boundary.check_dtypes(forward)
        expected.check(boundary.values(forward))
        passes = boundary.passes(forward)
        for run in passes.values():
            run()
        return cls(boundary=boundary, forward=forward, passes=passes)


Others = Mapping[str, Callable[[Boundary], Forward]]
"""Further candidates by name: a function that returns the forward pass of a plain boundary."""


def measure_boundaries(
    settings: BoundarySettings,
    device_name: str = "auto",
    deadline: Deadline = NO_DEADLINE,
    progress: Progress = lambda results: None,
    others: Others = MappingProxyType({}),
) -> Results:
    """Measure every topology at every width and stream dtype; see `BoundarySettings`.

    `progress` is called with the results so far after each. A failure is noted, and the rest is measured.
    """
    device = resolve_device(device_name)
    results = Results(benchmark="boundary", device=str(device), settings=vars(settings))
    missing = results.not_measured
    for dim, dtype, name in itertools.product(settings.dims, settings.stream_dtypes, settings.topologies):
        with current(device), allow_kept_graphs(), measuring(f"{name}, {dim} {dtype}", missing):
            deadline.check()
            results.rows.extend(measure_boundary(name, dim, dtype, settings, device, missing, deadline, others))
        progress(results)
    return results


def measure_boundary(
    name: str,
    dim: int,
    dtype: str,
    settings: BoundarySettings,
    device: torch.device,
    missing: list[str],
    deadline: Deadline,
    others: Others,
) -> list[Row]:
    """Return a row for each candidate of one boundary; add to `missing` those that cannot be measured, and why."""
    topology = build_topology(name)
    spec = ResidualSpec(
        dim=dim,
        norm=NormSpec.parse(settings.norm),
        residual_dtype=DTYPES[dtype],
        compute_dtype=DTYPES[settings.output_dtype],
    )

    def build(kernels: Kernels) -> Boundary:
        return Boundary.build(topology, dataclasses.replace(spec, kernels=kernels), settings.tokens, device)

    plain = build("plain")
    exact = plain.in_double(topology, spec)
    coarsest = torch.bfloat16 if "bfloat16" in (dtype, settings.output_dtype) else torch.float32
    expected = Expected.of(exact.values(exact.forward), plain.values(plain.forward), coarsest)
    candidates: dict[str, Candidate] = {}
    for each in (*settings.candidates, *others):
        if absent := missing_kernels(name, each):
            missing.extend({absent} - set(missing))
            continue
        with measuring(f"{name}, {dim} {dtype}, {each}", missing):
            boundary = build(kernels_of(each))
            forward = others[each](boundary) if each in others else forward_of(each, boundary)
            candidates[each] = Candidate.build(boundary, forward, expected)
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
    """Return a sentence if a topology has no kernels for a candidate, or None if it has."""
    resolved = build_topology(topology)
    has = {"fused": resolved.has_fused_kernels, "lean": resolved.has_lean_kernels}
    return None if has.get(candidate, True) else f"{topology}: has no {candidate} boundary"


def forward_of(candidate: str, boundary: Boundary) -> Forward:
    """Return the forward pass of a candidate, compiled without recompilation between boundaries if that is asked."""
    if candidate != "compiled":
        return boundary.forward
    torch._dynamo.reset()
    compiled = torch.compile(cross, fullgraph=True, dynamic=False)
    return lambda: compiled(boundary.before, boundary.after, boundary.streams, boundary.output)


def describe(name: str, candidate: Candidate, timings: Timings) -> dict[str, Any]:
    """Return times, the share of the copy rate at the least traffic, the ratio to the compiler, and what is kept."""
    boundary = candidate.boundary
    moved = traffic_of(candidate.forward, [*boundary.streams, boundary.output], besides=boundary.parameters)
    record: dict[str, Any] = {}
    both = []
    for direction, size in zip(("forward", "backward"), moved, strict=True):
        both.append(f"{name} {direction}")
        record[f"{direction}_ms"] = milliseconds(timings, both[-1])
        record[f"{direction}_share_of_copy_rate"] = share_of_copy_rate(timings, both[-1], size)
    if "compiled forward" in timings:
        record["both_to_compiled"] = ratio(timings, both, ("compiled forward", "compiled backward"))
    return rounded(record | kept_of(boundary, candidate.forward))


def kept_of(boundary: Boundary, forward: Forward) -> dict[str, Any]:
    """Return what the backward pass keeps of a boundary: whole tensors of the streams' size, and scalars a token."""
    sizes = kept_for_backward(forward, besides=boundary.parameters)
    tokens = boundary.output.shape[0]
    whole = boundary.output.numel() * min(tensor.element_size() for tensor in (*boundary.streams, boundary.output))
    return {
        "kept_tensors": sum(size >= whole for size in sizes),
        "kept_bytes_a_token": sum(sizes) / tokens,
        "kept_scalars_a_token": sum(size for size in sizes if size < whole) / (4 * tokens),
    }
