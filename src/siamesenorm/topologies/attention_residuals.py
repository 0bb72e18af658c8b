"""Attention Residuals (arXiv 2603.15031): every sublayer attends to the outputs of the blocks before it.

The streams are sources of a softmax over depth: the embedding, the sums of earlier groups of blocks, and the sum of the
current one, the prefix. Their number grows along the depth.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from siamesenorm.errors import UserError
from siamesenorm.norms import DeclaredModule
from siamesenorm.topologies.start_as_pre_norm import NormClosing, NormConnection
from siamesenorm.topologies.topology import BoundaryCost, Opening, Place, ResidualSpec, Streams, Topology

DEFAULT_GROUPS = 8
"""Groups of blocks that `block_size="auto"` makes."""


@dataclass(frozen=True, kw_only=True)
class AttentionResiduals(Topology):
    """Attention Residuals (arXiv 2603.15031): reads are softmax-weighted sums of sources, by a learned query each.

    A source is the sum of `block_size` blocks of attention and MLP ("auto": an eighth of the depth, rounded up), or
    with `sources="outputs"`, the full form, a sublayer's output. Queries start at 0: a read is then x / n, x being
    Pre-Norm's stream and n the number of sources. `rescale` multiplies reads by n, which equals dividing the eps of
    the norm by n^2, and makes the start a Pre-Norm with any norm.
    """

    title: ClassVar[str] = "Attention Residuals"
    paper: ClassVar[str] = "Moonshot AI 2026, arXiv 2603.15031"
    formula: ClassVar[str] = """\
        mix     w = softmax_i(q . (g v_i / sqrt(mean v_i^2 + eps))),  mix(V) = sum_i w_i v_i
        open    V = (e)
        read    h = N_k(mix_k(V))              (rescale: N_k(n mix_k(V)), n sources)
        write   V <- V, O                      at the attention of every B-th block, and everywhere with sources=outputs
                v_n <- v_n + O                 elsewhere: the last source, the prefix
        close   N_f(mix_f(V))"""
    diagram: ClassVar[str] = """\
        v_1 ─────┬──────────────────────▶ v_1
         ⋮       │                         ⋮
        v_n ─────┼─────────────── + ────▶ v_n   (or v_n+1 = O)
                 └─▶ mix ─▶ N ─▶ F ─▶ O"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "q = 0: Pre-Norm, up to the eps of the norms; exactly with rescale",
        "the sum of all sources is Pre-Norm's stream of the same outputs",
    )
    pre_norm_refusal: ClassVar[str | None] = None

    block_size: int | Literal["auto"] = "auto"
    sources: Literal["blocks", "outputs"] = "blocks"
    eps: float = 1e-6
    rescale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size != "auto" and self.block_size < 1:
            raise UserError(f"block_size of {self.title} is {self.block_size}: choose at least 1, or auto")
        if self.eps < 0:
            raise UserError(f"eps of {self.title} is {self.eps}: choose 0 or more")

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The finished sources and the one that grows."""
        return ("sources", "prefix")

    def name_streams(self, count: int) -> tuple[str, ...]:
        """Return source_0 (the embedding), source_1, ..., and prefix."""
        return (*(f"source_{index}" for index in range(count - 1)), "prefix")

    def starts_source(self, place: Place) -> bool:
        """Return whether the output of the sublayer at `place` is a source of its own, not added to the last one."""
        size = math.ceil(place.depth / DEFAULT_GROUPS) if self.block_size == "auto" else self.block_size
        return self.sources == "outputs" or (place.slot == 0 and place.block % size == 0)

    def count_sources(self, last: Place | None) -> int:
        """Return the number of sources after the write at `last`; one, the embedding, before the first."""
        count = 1
        while last is not None:
            count += self.starts_source(last)
            last = last.previous
        return count

    def boundary_cost(self, place: Place) -> BoundaryCost:
        """Return the cost of the plain operations; the tensors kept are N's input and the streams themselves."""
        assert place.previous is not None
        count = self.count_sources(place.previous)
        addition = 0 if self.starts_source(place.previous) else 2
        return BoundaryCost(forward=count + 2 + addition, backward=3 * count + 2, saved=count + 1)

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the embedding as the only source."""
        return Opening(spec)

    def connection(self, place: Place, spec: ResidualSpec) -> NormConnection:
        """Return the connection with a query of its own."""
        return (SourceStart if self.starts_source(place) else AttentionResidual)(self, place, spec)

    def closing(self, last: Place, spec: ResidualSpec) -> NormClosing:
        """Return the mix of all sources and the final norm."""
        return AttentionResidualClosing(self, last, spec)

    def preserving(self) -> Topology:
        """Return the topology with rescaled reads."""
        return dataclasses.replace(self, rescale=True)


class SourceMix(DeclaredModule):
    """The softmax-weighted sum of the sources: `query` q [dim] starts at 0, `gain` g [dim] at 1 and is not decayed.

    `count` n is the number of sources, `factor` multiplies the sum.
    """

    query: Tensor
    gain: Tensor

    def __init__(self, topology: AttentionResiduals, spec: ResidualSpec, count: int) -> None:
        super().__init__()
        self.axis = spec.axis
        self.eps = topology.eps
        self.factor = float(count) if topology.rescale else 1.0
        self.multiple = self.factor / count
        """The sum's multiple of Pre-Norm's stream at the start, where q is 0."""
        self.declare("query", (spec.dim,), initial=0.0, decay=True)
        self.declare("gain", (spec.dim,), initial=1.0)

    def forward(self, sources: Streams) -> Tensor:
        """Return the sum, of the shape of a source, in at least fp32."""
        sources = tuple(source.movedim(self.axis, -1) for source in sources)
        dtype = torch.promote_types(sources[0].dtype, torch.float32)
        direction = self.query.to(dtype) * self.gain.to(dtype)
        if sources[0].dtype == dtype or torch.compiler.is_compiling():
            mixed = mix_sources(direction, self.eps, self.factor, *sources)
        else:  # The wide copies of narrow sources are computed again in the backward pass rather than kept.
            mixed = checkpoint(
                mix_sources, direction, self.eps, self.factor, *sources, use_reentrant=False, preserve_rng_state=False
            )
        return mixed.movedim(-1, self.axis)


def mix_sources(direction: Tensor, eps: float, factor: float, *sources: Tensor) -> Tensor:
    """Return factor sum_i softmax_i(direction . v_i / sqrt(mean v_i^2 + eps)) v_i in the dtype of `direction`.

    Kept for the backward pass: the sources, and two numbers per token for each.
    """
    wide = [source.to(direction.dtype) for source in sources]
    weights = source_weights(direction, eps, *wide) * factor
    total = torch.zeros_like(wide[0])
    for weight, v in zip(weights.unbind(-1), wide, strict=True):
        total = total + weight.unsqueeze(-1) * v
    return total


def source_weights(direction: Tensor, eps: float, *sources: Tensor) -> Tensor:
    """Return softmax_i(direction . v_i / sqrt(mean v_i^2 + eps)), [..., sources], for sources of its dtype."""
    scores = [(v * direction).sum(-1) * ((v * v).mean(-1) + eps).rsqrt() for v in sources]
    return torch.stack(scores, dim=-1).softmax(-1)


class AttentionResidual(NormConnection):
    """Around one sublayer: h = norm(mix(V)); the last source <- the last source + O."""

    def __init__(self, topology: AttentionResiduals, place: Place, spec: ResidualSpec) -> None:
        super().__init__(spec)
        count = topology.count_sources(place.previous)
        # At the first sublayer, over one source, a query would have no effect and no gradient.
        self.mix = None if place.previous is None else SourceMix(topology, spec, count)
        self.multiple = 1.0 if self.mix is None else self.mix.multiple
        self.norm = spec.build_input_norm(place)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return the norm of the mixed sources."""
        mixed = streams[0] if self.mix is None else self.mix(streams)
        return self.to_compute(self.norm(mixed).to(streams[0].dtype)), streams

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return the sources with the output added to the last."""
        return (*streams[:-1], streams[-1] + output.to(streams[-1].dtype))


class SourceStart(AttentionResidual):
    """The same with a write that starts a source: V <- V, O."""

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return the sources with the output as one more."""
        return (*streams, output.to(streams[-1].dtype))


class AttentionResidualClosing(NormClosing):
    """The final norm of the mixed sources."""

    def __init__(self, topology: AttentionResiduals, last: Place, spec: ResidualSpec) -> None:
        super().__init__(spec)
        self.mix = SourceMix(topology, spec, topology.count_sources(last))
        self.multiple = self.mix.multiple
        self.norm = spec.build_final_norm()

    def forward(self, streams: Streams) -> Tensor:
        """Return N_f(mix(V))."""
        return self.to_compute(self.norm(self.mix(streams)).to(streams[0].dtype))
