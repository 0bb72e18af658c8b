"""One boundary of a topology, ready to run and compare: a write, a read, and the closing that shows what they did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from siamesenorm.benchmark.agreement import perturb, random_like
from siamesenorm.benchmark.traffic import traffic_of
from siamesenorm.errors import UserError
from siamesenorm.topologies import Closing, Connection, ResidualSpec, Streams, Topology, transformer_places

Forward = Callable[[], tuple[Tensor, ...]]
"""Returns the next sublayer's input and the streams."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The second connection of a block after the first one's write, and the end of the model after that."""

    before: Connection
    after: Connection
    closing: Closing
    streams: Streams
    output: Tensor
    next_output: Tensor

    @classmethod
    def build(cls, topology: Topology, spec: ResidualSpec, tokens: int, device: torch.device) -> Boundary:
        """Build the boundary before a block's MLP on random streams, which require gradients as do the gains."""
        attention, mlp = transformer_places(2)[1]
        generator = torch.Generator(device).manual_seed(0)

        def random(dtype: torch.dtype | None) -> Tensor:
            values = torch.randn(tokens, spec.dim, generator=generator, device=device)
            return values.to(dtype).requires_grad_()

        plain = dataclasses.replace(spec, kernels="plain")  # its reads take settled streams, as the opening's are
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
        """Return what the head sees after one more write: the same in whatever form the streams are left."""
        closed: Tensor = self.closing(self.after.write(results[1:], self.next_output))
        return closed

    def gradients(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        """Return a gradient for each result: a random one for H, and for the streams what the closing hands back.

        It is that of real streams, as the lean boundary finds the stream that it did not keep in such a gradient.
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

    def refuse_other_dtypes(self, forward: Forward) -> None:
        """Raise UserError unless a candidate leaves its streams in the dtype in which it found them."""
        with torch.no_grad():
            _, *found = forward()
        for one, other in zip(found, self.streams, strict=False):
            if one.dtype != other.dtype:
                raise UserError(f"its stream is {one.dtype}, where ours is {other.dtype}")

    def traffic(self, forward: Forward) -> tuple[int, int]:
        """Return the bytes that the forward and backward pass move at least; see `traffic_of`."""
        return traffic_of(forward, [*self.streams, self.output], besides=self.parameters)


def cross(before: Connection, after: Connection, streams: Streams, output: Tensor) -> tuple[Tensor, ...]:
    """Write the output of one sublayer and read for the next."""
    h, streams = after.read(before.write(streams, output))
    return (h, *streams)
