"""Manifold-constrained Hyper-Connections (arXiv 2512.24880): the streams are mixed by a doubly stochastic matrix.

Published implementations disagree in the start and the order of Sinkhorn's iteration, in the closing and in the initial
values; each is an option here, or named where it is fixed. comb_ij is the weight of stream j in the new stream i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.norms import DeclaredModule, Inexact, NormFunction, RMSNorm
from siamesenorm.topologies.hyper_connections import MixingConnection, MultiStream, mix_streams, without_autocast
from siamesenorm.topologies.start_as_pre_norm import copy_function
from siamesenorm.topologies.topology import Closing, Connection, Place, ResidualSpec, Streams

OWN_LOGIT = 2.0
"""Initial logit of the stream that a sublayer reads, minus that of the others: sigma = 0.88 and 0.12, so that the
streams come to differ, and yet no gate is too closed to learn."""
OFF_DIAGONAL_LOGIT = -6.0
"""Initial logit of the mixing of two different streams: 1/400 of the diagonal's weight."""


@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnections(MultiStream):
    """mHC with n = `streams` residual streams, mixed through Sinkhorn's projection (arXiv 2512.24880).

    `start` and `order`: "exp" starts Sinkhorn's `iterations` from the exponential, without any eps; "softmax" as
    DeepSeek-V4's kernel does, with `eps` added to the first normalisation and to every sum. "columns-first" ends on the
    rows of comb, so that equal streams stay equal (the paper; the kernel, which stores the transpose of comb).
    `readout`: "sum" of the streams, or a "learned" collapse by sigma gates (DeepSeek-V4). `gate` is the initial value
    of the factors on the dynamic part; `dynamic=False` leaves the static part b alone. `eps` also enters pre and RMS.
    At the start W = 0 and post = 1: every stream is Pre-Norm's, whatever b_pre and b_res.
    """

    title: ClassVar[str] = "Manifold-constrained Hyper-Connections"
    paper: ClassVar[str] = "Xie et al. 2025, arXiv 2512.24880"
    formula: ClassVar[str] = """\
        open    H_1 = ... = H_n = e
        read    m = W RMS(vec H),  pre = sigma(a_0 m_pre + b_pre) + eps,  post = 2 sigma(a_1 m_post + b_post),
                comb = Sinkhorn(a_2 m_res + b_res),  h = N_k(sum_i pre_i H_i)
        write   H_i <- sum_j comb_ij H_j + post_i O
        close   N_f(H_1 + ... + H_n)   (readout=learned: N_f(sum_i (sigma(a m_i + b_i) + eps) H_i))
        exact_eps: the eps of N_k and N_f times the square of the weights' sum at the start"""
    diagram: ClassVar[str] = """\
        H_1 ──┬─▶ comb ─▶ + post_1·O ──▶ H_1
         ⋮    │    ⋮            ⋮         ⋮
        H_n ──┼─▶ comb ─▶ + post_n·O ──▶ H_n
              └─▶ pre ─▶ N ─▶ F ─▶ O"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "W = 0, b_post = 0: Pre-Norm in every stream, up to eps, whatever b_pre and b_res",
        "the side of comb that is normalised last sums to 1 exactly, the other in the limit of many iterations",
    )

    streams: int = 4
    iterations: int = 20
    start: Literal["exp", "softmax"] = "exp"
    order: Literal["columns-first", "rows-first"] = "columns-first"
    readout: Literal["sum", "learned"] = "sum"
    gate: float = 0.01
    dynamic: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse an iteration that never runs, and a negative eps."""
        super().__post_init__()
        if self.iterations < 1:
            raise UserError(f"iterations of {self.title} is {self.iterations}: choose at least one")
        if self.eps < 0:
            raise UserError(f"eps of {self.title} is {self.eps}: choose 0 or more")

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with its logits and its projection."""
        own = place.index % self.streams
        logits = [OWN_LOGIT if stream == own else -OWN_LOGIT for stream in range(self.streams)]
        return ManifoldHyperConnection(self.spec_for_multiple(spec, self.sum_of_gates(logits)), place, self, logits)

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the sum or the learned collapse, and the final norm."""
        if self.readout == "sum":
            return super().closing(last, spec)
        return CollapseClosing(self.spec_for_multiple(spec, self.sum_of_gates([0.0] * self.streams)), self)

    def sum_of_gates(self, logits: Sequence[float]) -> float:
        """Return the sum of sigma(logit) + eps."""
        return sum(1 / (1 + math.exp(-logit)) + self.eps for logit in logits)

    def build_logits(self, spec: ResidualSpec, biases: Sequence[Sequence[float]]) -> Logits:
        """Return the static or dynamic logits with these initial biases."""
        if not self.dynamic:
            return Logits(biases)
        return DynamicLogits(spec, biases, width=self.streams * spec.dim, gate=self.gate, eps=self.eps)

    def build_projection(self) -> Callable[[Tensor], Tensor]:
        """Return the map of logits [..., n, n] to a doubly stochastic matrix."""
        dims = ((-2, -1) if self.order == "columns-first" else (-1, -2)) * self.iterations
        if self.start == "exp":
            return partial(sinkhorn, dims=dims)
        return partial(sinkhorn_kernel, dims=dims, eps=self.eps)


def sinkhorn(logits: Tensor, *, dims: Sequence[int]) -> Tensor:
    """Normalise exp(logits) along each dimension in turn, in the logarithmic domain: no sum can vanish."""
    for dim in dims:
        logits = logits - logits.logsumexp(dim, keepdim=True)
    return logits.exp()


def sinkhorn_kernel(logits: Tensor, *, dims: Sequence[int], eps: float) -> Tensor:
    """Normalise as DeepSeek-V4's kernel: a softmax plus eps first, then division by sums plus eps."""
    matrix = logits.softmax(dims[0]) + eps
    for dim in dims[1:]:
        matrix = matrix / (matrix.sum(dim, keepdim=True) + eps)
    return matrix


class Logits(DeclaredModule):
    """Static logits: one learned vector, `bias`, in groups."""

    bias: Tensor

    def __init__(self, biases: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.sizes = [len(group) for group in biases]
        self.declare("bias", (sum(self.sizes),), initial=list(chain(*biases)))

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """Return the groups of b in the dtype of the streams."""
        return torch.split(self.bias.to(streams.dtype), self.sizes)


class DynamicLogits(Logits):
    """Logits a m + b for each group, m = W RMS(vec H): `weight` W starts at 0 and is decayed, `gates` a are not."""

    weight: Tensor
    gates: Tensor

    def __init__(
        self, spec: ResidualSpec, biases: Sequence[Sequence[float]], *, width: int, gate: float, eps: float
    ) -> None:
        super().__init__(biases)
        self.norm = RMSNorm(width, affine=False, eps=eps).select_kernels(spec.kernels)
        self.declare("weight", (sum(self.sizes), width), initial=0.0, decay=True)
        self.declare("gates", (len(self.sizes),), initial=gate)

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """Return the groups of a m + b, each [..., size]."""
        maps = F.linear(self.norm(streams.flatten(-2)), self.weight.to(streams.dtype))
        groups = torch.split(maps, self.sizes, dim=-1)
        gates = self.gates.to(streams.dtype).unbind()
        return tuple(gate * m + bias for gate, m, bias in zip(gates, groups, super().forward(streams), strict=True))


class ManifoldHyperConnection(MixingConnection):
    """pre and post by sigma gates, comb by Sinkhorn's projection."""

    def __init__(
        self, spec: ResidualSpec, place: Place, topology: ManifoldHyperConnections, pre: Sequence[float]
    ) -> None:
        super().__init__(spec, place)
        self.count = n = topology.streams
        self.eps = topology.eps
        self.multiple = topology.sum_of_gates(pre)
        self.project = topology.build_projection()
        comb = [0.0 if row == column else OFF_DIAGONAL_LOGIT for row in range(n) for column in range(n)]
        self.logits = topology.build_logits(spec, (pre, [0.0] * n, comb))

    def mixing_weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre [..., n], comb transposed [..., n, n] (from, to) and post [..., n]."""
        pre, post, comb = self.logits(streams)
        comb = self.project(comb.unflatten(-1, (self.count, self.count)))
        return pre.sigmoid() + self.eps, comb.mT, 2 * post.sigmoid()


class CollapseClosing(Closing):
    """The final norm of the streams' sum, weighted by sigma gates."""

    def __init__(self, spec: ResidualSpec, topology: ManifoldHyperConnections) -> None:
        super().__init__(spec)
        self.eps = topology.eps
        self.multiple = topology.sum_of_gates([0.0] * topology.streams)
        self.logits = topology.build_logits(spec, ([0.0] * topology.streams,))
        self.norm = spec.build_final_norm()

    def forward(self, streams: Streams) -> Tensor:
        """Return N_f(sum_i (sigma(logit_i) + eps) H_i)."""
        (packed,) = streams
        wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
        with without_autocast(packed.device):
            (logits,) = self.logits(wide)
            collapsed = mix_streams(logits.sigmoid() + self.eps, wide)
        return self.to_compute(self.norm(collapsed).to(packed.dtype))

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Give the final norm the gain of `norm`."""
        return copy_function(norm, None, self.norm, multiple=self.multiple)
