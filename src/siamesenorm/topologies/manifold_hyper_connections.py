"""Manifold-constrained Hyper-Connections (arXiv 2512.24880): the streams are mixed by a doubly stochastic matrix.

Published implementations disagree in how the matrix is constrained, in what the logits are projected from, in the
gates, in the closing and in the initial values; each is an option here, or named where it is fixed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from siamesenorm.errors import UserError
from siamesenorm.norms import DeclaredModule, RMSNorm
from siamesenorm.topologies.hyper_connections import (
    MixingConnection,
    MultiStream,
    StackedOpening,
    mix_streams,
    without_autocast,
)
from siamesenorm.topologies.start_as_pre_norm import NormClosing, NormConnection
from siamesenorm.topologies.topology import BoundaryCost, Opening, Place, ResidualSpec, Streams, Topology

OWN_LOGIT = 2.0
"""Initial logit of the stream that a sublayer reads by sigma gates, minus that of the others: 0.88 and 0.12, so that
the streams come to differ, and yet no gate is too closed to learn."""
OTHER_LOGIT = -8.0
"""Initial logit of streams that softmax gates do not read, and of permutations but the identity; that of the read
stream and of the identity is 0."""
OFF_DIAGONAL_LOGIT = -6.0
"""Initial logit of the mixing of two different streams: 1/400 of the diagonal's weight."""
MOST_PERMUTED = 5
"""Streams of which all permutations are mixed: 120 logits."""


@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnections(MultiStream):
    """mHC with n = `streams` residual streams and a constrained mixing matrix R (arXiv 2512.24880).

    `mixing`: "sinkhorn" normalises the rows and columns of R in turn, `iterations` times, from logits over
    `temperature`; "permutations" (mHC-lite, arXiv 2601.05732) is the mean of all permutation matrices by softmax
    weights; "identity" leaves streams unmixed. `start` and `order` are Sinkhorn's: "exp" starts from the exponential,
    without eps; "softmax" as DeepSeek-V4's kernel does, with `eps` added to the first normalisation and to every sum.
    "columns-first" ends with weights that sum to 1 in every new stream, so that equal streams stay equal.
    `projection`: the dynamic logits are projected from the norm of the whole state, or "per-stream" from each stream's
    own norm by one shared map. `gates` of reads and writes: sigma and 2 sigma, or a softmax over streams.
    `readout`: "sum" of the streams, or a "learned" collapse by sigma gates (DeepSeek-V4). `single_pass` (V4.1) reads
    with the gates of the sublayer before, stream 0 at first, and closes with those of the last. `gate` is the initial
    value of the factors on the dynamic part; `dynamic=False` leaves the static logits alone. `eps` also enters the
    read gates and the norm of the state.
    At the start sigma gates make every stream Pre-Norm's, whatever the logits of reads and mixing.
    """

    title: ClassVar[str] = "Manifold-constrained Hyper-Connections"
    paper: ClassVar[str] = "Xie et al. 2025, arXiv 2512.24880"
    formula: ClassVar[str] = """\
        open    H_1 = ... = H_n = e
        read    u = RMS(vec H),  pre = sigma(a_in u W_in + b_in) + eps,  post = 2 sigma(a_out u W_out + b_out),
                R = Sinkhorn(a_r u W_r + b_r),  h = N_k(sum_i pre_i H_i)
        write   H_j <- sum_i R_ij H_i + post_j O
        close   N_f(H_1 + ... + H_n)   (readout=learned: N_f(sum_i (sigma(a u W + b)_i + eps) H_i))
        mixing=permutations: R = sum_p softmax(a_r u W_r + b_r)_p P_p;  gates=softmax: pre and post are softmaxes
        single_pass: h = N_k(sum_i pre'_i H_i), pre' of the sublayer before; close N_f(sum_i pre'_i H_i)
        exact_eps: the eps of N_k and N_f times the square of the weights' sum at the start"""
    diagram: ClassVar[str] = """\
        H_1 ──┬─▶  R  ─▶ + post_1·O ──▶ H_1
         ⋮    │    ⋮            ⋮        ⋮
        H_n ──┼─▶  R  ─▶ + post_n·O ──▶ H_n
              └─▶ pre ─▶ N ─▶ F ─▶ O"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "W = 0, b_out = 0, sigma gates: Pre-Norm in every stream, up to eps, whatever b_in and b_r",
        "the side of R that is normalised last sums to 1 exactly, the other in the limit of many iterations",
    )

    streams: int = 4
    mixing: Literal["sinkhorn", "permutations", "identity"] = "sinkhorn"
    iterations: int = 20
    start: Literal["exp", "softmax"] = "exp"
    order: Literal["columns-first", "rows-first"] = "columns-first"
    temperature: float = 1.0
    projection: Literal["joint", "per-stream"] = "joint"
    gates: Literal["sigmoid", "softmax"] = "sigmoid"
    readout: Literal["sum", "learned"] = "sum"
    single_pass: bool = False
    gate: float = 0.01
    dynamic: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 1:
            raise UserError(f"iterations of {self.title} is {self.iterations}: choose at least one")
        if self.eps < 0:
            raise UserError(f"eps of {self.title} is {self.eps}: choose 0 or more")
        if self.temperature <= 0:
            raise UserError(f"temperature of {self.title} is {self.temperature}: choose a positive number")
        if self.mixing == "permutations" and self.streams > MOST_PERMUTED:
            raise UserError(f"mixing=permutations of {self.streams} streams: choose at most {MOST_PERMUTED}")
        if self.mixing == "permutations" and self.projection == "per-stream":
            raise UserError("mixing=permutations has no logits of single streams: choose projection=joint")
        if self.single_pass and self.readout == "learned":
            raise UserError("single_pass closes with the gates of the last sublayer: leave readout at sum")

    @property
    def stream_names(self) -> tuple[str, ...]:
        """All n streams are one tensor; the gates of the next read are another."""
        return ("streams", "gates") if self.single_pass else ("streams",)

    def boundary_cost(self, place: Place) -> BoundaryCost:
        """Return the cost of the plain operations; unmixed streams are not written again."""
        cost, unmixed = super().boundary_cost(place), self.mixing == "identity"
        return dataclasses.replace(cost, forward=cost.forward - self.streams) if unmixed else cost

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return n copies of the embedding, and the gates of the first read in a single pass."""
        return GatedOpening(spec, self.streams) if self.single_pass else super().opening(spec)

    def connection(self, place: Place, spec: ResidualSpec) -> NormConnection:
        """Return the connection with its logits and its projection."""
        source = place.previous if self.single_pass else place
        connection = SinglePassConnection if self.single_pass else ManifoldHyperConnection
        return connection(self.spec_for_multiple(spec, self.sum_of_gates(source)), place, self)

    def closing(self, last: Place, spec: ResidualSpec) -> NormClosing:
        """Return the sum or the weighted sum of the streams, and the final norm."""
        if self.readout == "sum" and not self.single_pass:
            return super().closing(last, spec)
        multiple = self.sum_of_gates(last) if self.single_pass else self.streams * (0.5 + self.eps)
        return CollapseClosing(self.spec_for_multiple(spec, multiple), self, multiple)

    def preserving(self) -> Topology:
        """Return the topology with exact eps; raises UserError for softmax gates, which write O / n to each stream."""
        if self.gates == "softmax":
            raise UserError(
                f"{self.title} with gates=softmax cannot keep the function of a Pre-Norm model: the writes of its "
                "softmax gates sum to 1; choose gates=sigmoid"
            )
        return super().preserving()

    def pack(self, streams: Streams) -> Tensor:
        """Return H; in a single pass the gates are one more stream, padded with zeros to its width."""
        if not self.single_pass:
            return super().pack(streams)
        packed, gates = streams
        row = pad(gates.to(packed.dtype), (0, packed.shape[-1] - self.streams))
        return torch.cat((packed, row.unsqueeze(-2)), dim=-2)

    def unpack(self, packed: Tensor) -> Streams:
        """Return the state of a packed tensor."""
        if not self.single_pass:
            return super().unpack(packed)
        return packed[..., :-1, :], packed[..., -1, : self.streams]

    def read_logits(self, place: Place) -> list[float]:
        """Return the initial static logits of the gates with which the sublayer at `place` reads."""
        own, other = (OWN_LOGIT, -OWN_LOGIT) if self.gates == "sigmoid" else (0.0, OTHER_LOGIT)
        return [own if stream == place.index % self.streams else other for stream in range(self.streams)]

    def sum_of_gates(self, place: Place | None) -> float:
        """Return the sum of the gates of `place` at the start; None is the first read of a single pass."""
        if place is None or self.gates == "softmax":
            return 1.0
        return sum(1 / (1 + math.exp(-logit)) + self.eps for logit in self.read_logits(place))

    def mixing_logits(self) -> list[list[float]] | list[float]:
        """Return the initial static logits of the mixing, [n, n] (from, to), or one of every permutation."""
        n = self.streams
        if self.mixing == "permutations":
            return [0.0] + [OTHER_LOGIT] * (math.factorial(n) - 1)
        return [[0.0 if row == column else OFF_DIAGONAL_LOGIT for column in range(n)] for row in range(n)]


def sinkhorn(logits: Tensor, dims: Sequence[int]) -> Tensor:
    """Normalise exp(logits) along each dimension in turn, in the logarithmic domain: no sum can vanish."""
    for dim in dims:
        logits = logits - logits.logsumexp(dim, keepdim=True)
    return logits.exp()


def sinkhorn_kernel(logits: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """Normalise as DeepSeek-V4's kernel: a softmax plus eps first, then division by sums plus eps."""
    matrix = logits.softmax(dims[0]) + eps
    for dim in dims[1:]:
        matrix = matrix / (matrix.sum(dim, keepdim=True) + eps)
    return matrix


class MixingLogits(DeclaredModule):
    """The static logits `mix_<name>`, and with dynamic mixing scale_<name> (u W) added to each; see `initial`.

    `project_<name>` W starts at 0 and is decayed; the static logits and `scale_<name>` [1] are not. u is the norm of
    the state [n dim], or of each stream [dim]: W then has one column for each logit of a stream.
    """

    def __init__(
        self, topology: ManifoldHyperConnections, spec: ResidualSpec, initial: Mapping[str, Sequence[Any]]
    ) -> None:
        super().__init__()
        self.names = tuple(initial)
        self.joint = topology.projection == "joint"
        self.dynamic = topology.dynamic
        for name, values in initial.items():
            shape = torch.tensor(values, device="cpu").shape
            self.declare(f"mix_{name}", tuple(shape), initial=list(values))
        if self.dynamic:
            count = 1 if self.joint else topology.streams
            width = spec.dim * (topology.streams // count)
            self.norm = RMSNorm(width, affine=False, eps=topology.eps).select_kernels(spec.kernels)
            for name in self.names:
                size = getattr(self, f"mix_{name}").numel() // count
                self.declare(f"project_{name}", (width, size), initial=0.0, decay=True)
            for name in self.names:
                self.declare(f"scale_{name}", (1,), initial=topology.gate)

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of every name, [..., *shape] in the dtype of the streams [..., n, dim]."""
        static = [getattr(self, f"mix_{name}").to(streams.dtype) for name in self.names]
        if not self.dynamic:
            return tuple(static)
        weights = [getattr(self, f"project_{name}").to(streams.dtype) for name in self.names]
        normalised = self.norm(streams.flatten(-2) if self.joint else streams)
        projected = torch.matmul(normalised, torch.cat(weights, dim=-1))
        maps = torch.split(projected, [weight.shape[-1] for weight in weights], dim=-1)
        scales = [getattr(self, f"scale_{name}").to(streams.dtype) for name in self.names]
        lead = streams.shape[:-2]
        return tuple(s + scale * m.reshape(*lead, *s.shape) for s, scale, m in zip(static, scales, maps, strict=True))


class ManifoldHyperConnection(MixingConnection):
    """Gates of read and write, and a constrained mixing matrix."""

    permutations: Tensor | None

    def __init__(self, spec: ResidualSpec, place: Place, topology: ManifoldHyperConnections) -> None:
        super().__init__(spec, place)
        self.topology = topology
        self.multiple = topology.sum_of_gates(place)
        n = topology.streams
        initial: dict[str, Sequence[Any]] = {"in": topology.read_logits(place)}
        if topology.mixing != "identity":
            initial["residual"] = topology.mixing_logits()
        self.logits = MixingLogits(topology, spec, {**initial, "out": [0.0] * n})
        matrices = [[[float(row == to) for to in range(n)] for row in order] for order in permutations(range(n))]
        self.constant("permutations", matrices if topology.mixing == "permutations" else None)

    def mixing_weights(self, streams: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return pre [..., n], R [..., n, n] (from, to) or None for the identity, and post [..., n]."""
        pre, *mixing, post = self.logits(streams)
        residual = self.project(mixing[0]) if mixing else None
        if self.topology.gates == "softmax":
            return pre.softmax(-1), residual, post.softmax(-1)
        return pre.sigmoid() + self.topology.eps, residual, 2 * post.sigmoid()

    def project(self, logits: Tensor) -> Tensor:
        """Return the doubly stochastic matrix [..., n, n] (from, to) of logits [..., n, n] or [..., n!]."""
        topology = self.topology
        if self.permutations is not None:
            return torch.einsum("...p,pij->...ij", logits.softmax(-1), self.permutations.to(logits.dtype))
        dims = ((-1, -2) if topology.order == "columns-first" else (-2, -1)) * topology.iterations
        logits = logits / topology.temperature
        return sinkhorn(logits, dims) if topology.start == "exp" else sinkhorn_kernel(logits, dims, topology.eps)


class SinglePassConnection(ManifoldHyperConnection):
    """The same with the gates of the sublayer before: the state is H and the gates of the next read."""

    def __init__(self, spec: ResidualSpec, place: Place, topology: ManifoldHyperConnections) -> None:
        super().__init__(spec, place, topology)
        self.multiple = topology.sum_of_gates(place.previous)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return N(sum_i pre'_i H_i), and R^T H with the gates of the write and of the next read."""
        h, *state = self.mix(*streams)
        return h, tuple(state)

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return R^T H + post O, and the gates of the next read."""
        *state, gates = streams
        return (*super().write(tuple(state), output), gates.expand(state[0].shape[:-1]))


class GatedOpening(StackedOpening):
    """H [..., n, dim], n copies of the embedding, and gates [..., n] that read stream 0."""

    def forward(self, embedding: Tensor) -> Streams:
        """Return H and the gates."""
        (packed,) = super().forward(embedding)
        return packed, pad(torch.ones_like(packed[..., 0, :1]), (0, self.count - 1))


class CollapseClosing(NormClosing):
    """The final norm of the streams' sum, weighted by the last gates in a single pass, else by sigma gates."""

    def __init__(self, spec: ResidualSpec, topology: ManifoldHyperConnections, multiple: float) -> None:
        super().__init__(spec)
        self.eps = topology.eps
        self.multiple = multiple
        logits = {"in": [0.0] * topology.streams}
        self.logits = None if topology.single_pass else MixingLogits(topology, spec, logits)
        self.norm = spec.build_final_norm()

    def forward(self, streams: Streams) -> Tensor:
        """Return N_f(sum_i gate_i H_i)."""
        packed = streams[0]
        wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
        with without_autocast(packed.device):
            gates = streams[1].to(wide.dtype) if self.logits is None else self.logits(wide)[0].sigmoid() + self.eps
            collapsed = mix_streams(gates, wide)
        return self.to_compute(self.norm(collapsed).to(packed.dtype))
