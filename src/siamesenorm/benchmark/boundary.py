"""bench boundary: everything between one sublayer's output and the next one's input, for every topology.

A boundary is the write of one connection and the read of the next. Candidates are the plain formulas, the same
compiled, the fused operators where a topology has them, and others that the caller adds. Each is timed only if it
computes what the formulas do in fp64, gradients included; its speed is relative to a copy of as many bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from siamesenorm.benchmark import measurement
from siamesenorm.benchmark.measurement import Passes, Timings, random_like, ratio
from siamesenorm.benchmark.results import Results, Row, Session
from siamesenorm.errors import UserError
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import (
    Connection,
    Kernels,
    ResidualSpec,
    Streams,
    Topology,
    build_topology,
    transformer_places,
)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Cross = Callable[[Connection, Connection, Streams, Tensor], tuple[Tensor, ...]]
"""Takes the connections that write and read, the streams and the output; returns the next input and the streams."""


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


def cross(before: Connection, after: Connection, streams: Streams, output: Tensor) -> tuple[Tensor, ...]:
    """Write the output of one sublayer and read for the next."""
    h, streams = after.read(before.write(streams, output))
    return (h, *streams)


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The second connection of a block after the first one's write, and the closing, which shows what they did."""

    before: Connection
    after: Connection
    closing: nn.Module
    streams: Streams
    output: Tensor
    next_output: Tensor
    cross: Cross = cross

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
            measurement.perturb(part)
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
        return self.cross(self.before, self.after, self.streams, self.output)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Everything that receives a gradient, by name: streams, output, gains."""
        streams = {f"stream {number}": stream for number, stream in enumerate(self.streams)}
        parts = {"written": self.before, "read": self.after}
        gains = {f"{name} {gain}": p for name, part in parts.items() for gain, p in part.named_parameters()}
        return streams | {"output": self.output} | {name: p for name, p in gains.items() if p.requires_grad}

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

    def values(self) -> dict[str, Tensor]:
        """Return H, what the head sees, and the gradient of every input.

        Raises UserError if a stream is left in another dtype.
        """
        h, *streams = results = self.forward()
        for one, other in zip(streams, self.streams, strict=False):
            if one.dtype != other.dtype:
                raise UserError(f"its stream is {one.dtype}, where ours is {other.dtype}")
        closed = self.close(results)
        gradients = measurement.named_gradients((h, closed), self.inputs, (random_like(h, 2), random_like(closed, 1)))
        return {"input": h.detach(), "closed state": closed.detach()} | gradients

    def passes(self) -> Passes:
        """Run and return the forward and the backward pass."""
        results = self.forward()
        return measurement.run_passes(self.forward, results, list(self.inputs.values()), self.gradients(results))

    def describe(self, name: str, timings: Timings) -> Row:
        """Return times, the share of the copy rate at the least traffic, and what the backward pass keeps.

        Those are whole tensors of a stream's size, and scalars a token. Beside a compiled candidate: the ratio to it.
        """
        rows, parameters = [*self.streams, self.output], [*self.before.parameters(), *self.after.parameters()]
        traffic = measurement.traffic_of(self.forward, rows, besides=parameters)
        row: Row = measurement.describe_passes(timings, name, traffic)
        if "compiled forward" in timings:
            both, compiled = ([f"{each} forward", f"{each} backward"] for each in (name, "compiled"))
            row["both_to_compiled"] = ratio(timings, both, compiled)
        sizes = measurement.kept_for_backward(self.forward, besides=parameters)
        tokens = len(self.output)
        whole = self.output.numel() * min(tensor.element_size() for tensor in rows)
        row["kept_tensors"] = sum(size >= whole for size in sizes)
        row["kept_bytes_a_token"] = sum(sizes) / tokens
        row["kept_scalars_a_token"] = sum(size for size in sizes if size < whole) / (4 * tokens)
        return row


Others = Mapping[str, Callable[[Boundary], Cross]]
"""Further candidates by name: a function that returns how such a kernel crosses a plain boundary."""


def measure_boundaries(session: Session[BoundarySettings], others: Others = MappingProxyType({})) -> Results:
    """Measure every topology at every width and stream dtype; see `BoundarySettings`."""
    settings = session.settings
    for dim, dtype, name in itertools.product(settings.dims, settings.stream_dtypes, settings.topologies):
        with session.part(f"{name}, {dim} {dtype}") as rows, measurement.allow_kept_graphs():
            session.check_time()
            rows.extend(measure_boundary(name, dim, dtype, session, others))
    return session.results


def measure_boundary(name: str, dim: int, dtype: str, session: Session[BoundarySettings], others: Others) -> list[Row]:
    """Return a row for each candidate of one boundary that can be measured."""
    settings, topology = session.settings, build_topology(name)
    spec = ResidualSpec(
        dim=dim,
        norm=NormSpec.parse(settings.norm),
        residual_dtype=DTYPES[dtype],
        compute_dtype=DTYPES[settings.output_dtype],
        kernels="plain",
    )
    plain = Boundary.build(topology, spec, settings.tokens, session.device)
    exact, of_plain = plain.in_double(topology, spec).values(), plain.values()
    coarsest = torch.bfloat16 if "bfloat16" in (dtype, settings.output_dtype) else torch.float32
    candidates: dict[str, Boundary] = {}
    passes: dict[str, Passes] = {}
    for each in (*settings.candidates, *others):
        if absent := missing_kernels(name, each):
            session.note(absent)
            continue
        with session.noting(f"{name}, {dim} {dtype}, {each}"):
            spec = dataclasses.replace(spec, kernels=kernels_of(each))
            boundary = Boundary.build(topology, spec, settings.tokens, session.device)
            if each == "compiled":
                torch._dynamo.reset()
                boundary = dataclasses.replace(boundary, cross=torch.compile(cross, fullgraph=True, dynamic=False))
            elif each in others:
                boundary = dataclasses.replace(boundary, cross=others[each](boundary))
            measurement.check_agreement(boundary.values(), exact, of_plain, coarsest)
            passes[each] = boundary.passes()
            candidates[each] = boundary
    timings = measurement.measure_passes(passes, session.device, settings.rounds, session.deadline)
    return [
        {"topology": name, "dim": dim, "streams": dtype, "candidate": each} | boundary.describe(each, timings)
        for each, boundary in candidates.items()
    ]


def kernels_of(candidate: str) -> Kernels:
    """Return the kernels that a candidate is built with."""
    return "fused" if candidate == "fused" else "lean" if candidate == "lean" else "plain"


def missing_kernels(topology: str, candidate: str) -> str | None:
    """Return a sentence if a topology has no kernels for a candidate, or None if it has."""
    resolved = build_topology(topology)
    has = {"fused": resolved.has_fused_kernels, "lean": resolved.has_lean_kernels}
    return None if has.get(candidate, True) else f"{topology}: has no {candidate} boundary"
