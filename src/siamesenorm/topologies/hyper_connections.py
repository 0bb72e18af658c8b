"""Hyper-Connections (arXiv 2409.19606): n streams, mixed by small learned matrices around every sublayer.

The streams are one tensor H of shape [..., n, dim]. Between a read and a write the state is the mixed streams and the
weights with which the sublayer's output is added: both come from the same H, before the update.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.norms import NormSpec
from siamesenorm.topologies.start_as_pre_norm import NormClosing, NormConnection
from siamesenorm.topologies.topology import BoundaryCost, Opening, Place, ResidualSpec, Streams, Topology


@dataclass(frozen=True, kw_only=True)
class MultiStream(Topology):
    """A topology with n interchangeable streams in one tensor H [..., n, dim].

    `exact_eps` multiplies the eps of a norm that reads c x, at the start, by c^2, so that it equals the norm of x. A
    model that starts as a given Pre-Norm has it.
    """

    pre_norm_refusal: ClassVar[str | None] = None

    streams: int = 2
    exact_eps: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streams < 1:
            raise UserError(f"streams of {self.title} is {self.streams}: choose at least one")

    @property
    def stream_names(self) -> tuple[str, ...]:
        """All n streams are one tensor."""
        return ("streams",)

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return n copies of the embedding."""
        if spec.axis != -1:
            raise UserError(f"{self.title} needs channels last: it keeps its streams on the axis before the channels")
        return StackedOpening(spec, self.streams)

    def closing(self, last: Place, spec: ResidualSpec) -> NormClosing:
        """Return the sum of the streams and the final norm."""
        return SumClosing(self.spec_for_multiple(spec, self.streams), self.streams)

    def spec_for_multiple(self, spec: ResidualSpec, multiple: float) -> ResidualSpec:
        """Return the specification of a norm that reads `multiple` times a stream at the start: see `exact_eps`."""
        eps = spec.mean_square_eps
        if not self.exact_eps or eps is None or multiple == 1:
            return spec
        return spec.with_norm_options(eps=eps * multiple**2)

    def boundary_cost(self, place: Place) -> BoundaryCost:
        """Return the cost of the plain operations for n > 1: they keep 2n tensors of the streams, N's input and O."""
        n = self.streams
        return BoundaryCost(forward=4 * n + 3, backward=4 * n + 4, saved=2 * n + 2)

    def preserving(self) -> Topology:
        """Return the topology with exact eps."""
        return dataclasses.replace(self, exact_eps=True)

    def pack(self, streams: Streams) -> Tensor:
        """Return H, which is packed already."""
        return streams[0]

    def unpack(self, packed: Tensor) -> Streams:
        """Return H as the only tensor of the state."""
        return (packed,)


@dataclass(frozen=True, kw_only=True)
class HyperConnections(MultiStream):
    """Static or dynamic Hyper-Connections with n = `streams` residual streams (arXiv 2409.19606).

    Dynamic ones add s tanh(norm(H) W) to the static mixing weights, W = 0 and s = 0.01 at the start. `stream_norm` is
    that norm, with `stream_eps`: LayerNorm in the paper, RMSNorm without eps in a widely used implementation.
    `tanh=False` leaves the tanh out. The paper also scales the initial weights of the output projections by a factor of
    sqrt(n), in a direction that could not be verified: it is not applied.
    At the start both forms equal Pre-Norm in every stream, up to the eps of the final norm.
    """

    title: ClassVar[str] = "Hyper-Connections"
    paper: ClassVar[str] = "Zhu et al. 2024, arXiv 2409.19606"
    formula: ClassVar[str] = """\
        open    H_1 = ... = H_n = e
        read    h = N_k(A_m^T H),  H~ = A_r^T H
        write   H <- H~ + B O
        close   N_f(H_1 + ... + H_n)
        static  A_m = one-hot(k mod n), A_r = I, B = 1 at the start
        dynamic A_m + s tanh(norm(H) W_m), A_r + s tanh(norm(H) W_r), B + s' tanh(norm(H) w_B)
        exact_eps: the eps of N_f times n^2"""
    diagram: ClassVar[str] = """\
        H_1 ──┬─▶ A_r ─▶ + B_1·O ──▶ H_1
         ⋮    │    ⋮         ⋮        ⋮
        H_n ──┼─▶ A_r ─▶ + B_n·O ──▶ H_n
              └─▶ A_m ─▶ N ─▶ F ─▶ O"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "at the start: Pre-Norm in every stream, up to the eps of the final norm",
        "at the start the dynamic form is the static one, exactly",
    )

    dynamic: bool = True
    stream_norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    stream_eps: float = 1e-5
    tanh: bool = True

    def connection(self, place: Place, spec: ResidualSpec) -> NormConnection:
        """Return the static or dynamic connection."""
        if self.dynamic:
            return DynamicHyperConnection(spec, place, self)
        return HyperConnection(spec, place, self.streams)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which autocast lowers no matrix product; devices without autocast (meta) need none."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class StackedOpening(Opening):
    """H [..., n, dim]: n copies of the embedding."""

    def forward(self, embedding: Tensor) -> Streams:
        """Return H."""
        return (torch.stack((self.to_residual(embedding),) * self.count, dim=-2),)


class SumClosing(NormClosing):
    """The final norm of the sum of `count` streams, which are equal at the start."""

    def __init__(self, spec: ResidualSpec, count: int) -> None:
        super().__init__(spec)
        self.multiple = count
        self.norm = spec.build_final_norm()

    def forward(self, streams: Streams) -> Tensor:
        """Return N_f(sum_i H_i)."""
        return self.to_compute(self.norm(streams[0].sum(-2)))


def mix_streams(weights: Tensor, streams: Tensor) -> Tensor:
    """Return sum_i weights_i H_i for weights [..., n] and streams [..., n, dim]."""
    return torch.matmul(weights.unsqueeze(-2), streams).squeeze(-2)


class MixingConnection(NormConnection):
    """Around one sublayer: h = norm(A_m^T H), H~ = A_r^T H; H <- H~ + B O, with weights from `mixing_weights`.

    At their initial values the n streams stay equal, and `multiple` is the sum of A_m.
    """

    def __init__(self, spec: ResidualSpec, place: Place) -> None:
        super().__init__(spec)
        self.norm = spec.build_input_norm(place)

    def mixing_weights(self, streams: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return A_m [..., n], A_r [..., n, n] (from, to; None for I) and B [..., n] of the streams [..., n, dim]."""
        raise NotImplementedError

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return N(A_m^T H), and A_r^T H with B for the write."""
        h, mixed, mix_out, _ = self.mix(streams[0])
        return h, (mixed, mix_out)

    def mix(self, packed: Tensor, gates: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return N(gates^T H), where the gates are A_m unless they are given, and A_r^T H, B and A_m."""
        wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
        with without_autocast(packed.device):
            mix_in, mix_residual, mix_out = self.mixing_weights(wide)
            h = mix_streams(mix_in if gates is None else gates.to(wide.dtype), wide)
            mixed = wide if mix_residual is None else torch.matmul(mix_residual.mT, wide)
            mixed = mixed.to(packed.dtype)
        return self.to_compute(self.norm(h).to(packed.dtype)), mixed, mix_out, mix_in

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return H~ + B O."""
        mixed, mix_out = streams
        update = mix_out.unsqueeze(-1) * output.unsqueeze(-2).to(mix_out.dtype)
        return ((mixed + update).to(mixed.dtype),)


class HyperConnection(MixingConnection):
    """Static Hyper-Connection: `mix_in` A_m [n], `mix_residual` A_r [n, n] (from, to), `mix_out` B [n]."""

    mix_in: Tensor
    mix_residual: Tensor
    mix_out: Tensor

    def __init__(self, spec: ResidualSpec, place: Place, count: int) -> None:
        super().__init__(spec, place)
        identity = [[float(row == column) for column in range(count)] for row in range(count)]
        self.declare("mix_in", (count,), initial=identity[place.index % count])
        self.declare("mix_residual", (count, count), initial=identity)
        self.declare("mix_out", (count,), initial=1.0)

    def mixing_weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return A_m [..., n], A_r [..., n, n] and B [..., n] in the dtype of the streams given."""
        return (self.mix_in.to(streams.dtype), self.mix_residual.to(streams.dtype), self.mix_out.to(streams.dtype))


class DynamicHyperConnection(HyperConnection):
    """Dynamic Hyper-Connection: the mixing weights depend on each token's streams.

    `project_in` W_m [dim], `project_residual` W_r [dim, n], `project_out` w_B [dim] start at 0 and are decayed, the
    static parts and the two scales [1] are not.
    """

    project_in: Tensor
    project_residual: Tensor
    project_out: Tensor
    scale_in: Tensor
    scale_out: Tensor

    def __init__(self, spec: ResidualSpec, place: Place, topology: HyperConnections) -> None:
        super().__init__(spec, place, topology.streams)
        self.stream_norm = (
            NormSpec.parse(topology.stream_norm, eps=topology.stream_eps).build(spec.dim).select_kernels(spec.kernels)
        )
        self.squash = nn.Tanh() if topology.tanh else nn.Identity()
        self.declare("project_in", (spec.dim,), initial=0.0, decay=True)
        self.declare("project_residual", (spec.dim, topology.streams), initial=0.0, decay=True)
        self.declare("project_out", (spec.dim,), initial=0.0, decay=True)
        self.declare("scale_in", (1,), initial=0.01)
        self.declare("scale_out", (1,), initial=0.01)

    def mixing_weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the static weights plus the dynamic ones, each [..., n] or [..., n, n]."""
        mix_in, mix_residual, mix_out = super().mixing_weights(streams)
        normalised = self.stream_norm(streams)
        projections = torch.cat((self.project_in[:, None], self.project_residual, self.project_out[:, None]), dim=-1)
        dynamic = self.squash(torch.matmul(normalised, projections.to(streams.dtype)))
        scale_in, scale_out = self.scale_in.to(streams.dtype), self.scale_out.to(streams.dtype)
        return (
            mix_in + scale_in * dynamic[..., 0],
            mix_residual + scale_in * dynamic[..., 1:-1],
            mix_out + scale_out * dynamic[..., -1],
        )
