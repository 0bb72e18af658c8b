"""Learned scalars a block on the stream and on the embedding, as public speed-run language models have them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from siamesenorm.norms import Inexact, NormFunction, assign
from siamesenorm.topologies.start_as_pre_norm import NormClosing, NormConnection
from siamesenorm.topologies.topology import BoundaryCost, Place, ResidualSpec, Streams, Topology


@dataclass(frozen=True, kw_only=True)
class Lambdas(Topology):
    """Pre-Norm with x <- r_l x + z_l e before block l, e the embedding and r_l, z_l learned scalars.

    `start`: "neutral" is r = 1, z = 0, which is Pre-Norm; "public" is that of the published code,
    r_l = 1.15 - 0.10 l / (L - 1) and z_l = 0.20 - 0.15 l / (L - 1).
    """

    title: ClassVar[str] = "Residual lambdas"
    paper: ClassVar[str] = "public code of speed-run language models, https://github.com/KellerJordan/modded-nanogpt"
    formula: ClassVar[str] = """\
        open    x = e
        read    x <- r_l x + z_l e     before the first sublayer of block l
                h = N_k(x)
        write   x <- x + O
        close   N_f(x)"""
    diagram: ClassVar[str] = """\
        x ──▶ r ── + ──┬──────────────── + ──▶ x
        e ──▶ z ───┘   └─▶ N ─▶ F ─▶ O ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("r = 1, z = 0 is Pre-Norm, exactly",)
    pre_norm_refusal: ClassVar[str | None] = None

    start: Literal["neutral", "public"] = "public"

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The residual stream and the embedding."""
        return ("residual", "embedding")

    def boundary_cost(self, place: Place) -> BoundaryCost:
        """Return the cost of the plain operations; the embedding passes through every boundary."""
        return BoundaryCost(6, 8, 3) if place.slot == 0 else BoundaryCost(5, 5, 1)

    def connection(self, place: Place, spec: ResidualSpec) -> LambdaConnection:
        """Return a Pre-Norm connection; the first of a block has the block's scalars."""
        return BlockStart(self, place, spec) if place.slot == 0 else LambdaConnection(place, spec)

    def closing(self, last: Place, spec: ResidualSpec) -> LambdaClosing:
        """Return the final norm of the stream."""
        return LambdaClosing(spec)

    def preserving(self) -> Topology:
        """Return the topology with the neutral start."""
        return dataclasses.replace(self, start="neutral")

    def initial_scalars(self, place: Place) -> tuple[float, float]:
        """Return the initial r and z of a block."""
        if self.start == "neutral":
            return 1.0, 0.0
        depth = place.block / max(place.depth - 1, 1)
        return 1.15 - 0.10 * depth, 0.20 - 0.15 * depth


class LambdaConnection(NormConnection):
    """h = norm(x); x <- x + O."""

    def __init__(self, place: Place, spec: ResidualSpec) -> None:
        super().__init__(spec)
        self.norm = spec.build_input_norm(place)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return N(x), and x with the embedding."""
        return self.to_compute(self.norm(streams[0])), streams

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return x + O and the embedding."""
        x, embedding = streams
        return x + output.to(x.dtype), embedding


class BlockStart(LambdaConnection):
    """The same after x <- r x + z e. `residual_scale` r and `embedding_scale` z [1] are not decayed."""

    residual_scale: Tensor
    embedding_scale: Tensor

    def __init__(self, topology: Lambdas, place: Place, spec: ResidualSpec) -> None:
        super().__init__(place, spec)
        residual, embedding = topology.initial_scalars(place)
        self.declare("residual_scale", (1,), initial=residual)
        self.declare("embedding_scale", (1,), initial=embedding)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return N(x), and x with the embedding."""
        x, embedding = streams
        x = self.residual_scale.to(x.dtype) * x + self.embedding_scale.to(x.dtype) * embedding
        return super().read((x, embedding))

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Set r = 1 and z = 0, and give the norm the function of `norm`."""
        assign(self.residual_scale, self.residual_scale.new_ones(()))
        assign(self.embedding_scale, self.embedding_scale.new_zeros(()))
        return super().init_as_pre_norm(norm)


class LambdaClosing(NormClosing):
    """The final norm of the stream."""

    def __init__(self, spec: ResidualSpec) -> None:
        super().__init__(spec)
        self.norm = spec.build_final_norm()

    def forward(self, streams: Streams) -> Tensor:
        """Return N_f(x)."""
        return self.to_compute(self.norm(streams[0]))
