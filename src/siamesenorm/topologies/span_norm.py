"""SpanNorm, experimental: one residual spans a whole block, whose output is normalised as in Post-Norm.

Reading A with the initial norm is the structure of a public port that cites the paper's equations; its scaling strategy
was not found. Numbers obtained with it are not SpanNorm's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from siamesenorm.topologies.boundary_family import BoundaryClosing, BoundaryConnection, BoundaryTopology
from siamesenorm.topologies.topology import BoundaryCost, Closing, Connection, Place, ResidualSpec, Streams


@dataclass(frozen=True, kw_only=True)
class SpanNorm(BoundaryTopology):
    """SpanNorm (arXiv 2601.22580), experimental: the structure is that of a port, and no scaling is applied.

    `reading` "A": the residual goes from the block's input to its output, past both sublayers; "B", ours: Pre-Norm
    inside the block, and one norm on the main path at its end. `initial_norm` normalises what the first attention sees,
    but not its skip connection; in B every attention has such a norm.
    """

    title: ClassVar[str] = "SpanNorm (experimental)"
    paper: ClassVar[str] = "arXiv 2601.22580 (the structure is that of a port)"
    formula: ClassVar[str] = """\
        open    x = e
        block   z = N1(x + Attention(x)),     x <- N2(x + MLP(z))
        close   x;  the first block with initial_norm: z = N1(x + Attention(N0(x)))
        reading=B:  z = x + Attention(N(x)),  x <- N2(z + MLP(N(z)))"""
    diagram: ClassVar[str] = """\
        x ──┬──────────────────────────────────── + ─▶ N2 ──▶ x
            ├─────────── + ─▶ N1 ─▶ MLP ─▶ O ─────┘
            └─▶ Attn ────┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("the block's output is always normalised: no final norm",)

    has_fused_kernels: ClassVar[bool] = False

    reading: Literal["A", "B"] = "A"
    initial_norm: bool = False

    @property
    def tells_sublayers_apart(self) -> bool:
        """A block has one norm after attention and another at its end."""
        return True

    def boundary_cost(self, place: Place) -> BoundaryCost:
        """Return the cost; in reading A the block's input passes through the boundary before the MLP."""
        if self.reading == "B":
            return super().boundary_cost(place)
        return BoundaryCost(forward=4, backward=5 if place.kind == "mlp" else 4, saved=1)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return a half of the block: the first has the previous block's norm, in A the second the attention's."""
        post_norm = spec.build_post_norm(place) if place.kind == "attention" else None
        if self.reading == "B":
            return BoundaryConnection(self, place, spec, post_norm=post_norm, input_norm=spec.build_input_norm(place))
        if place.kind == "attention":
            first = self.initial_norm and place.previous is None
            input_norm = spec.build_input_norm(place) if first else None
            return SpanStart(self, place, spec, post_norm=post_norm, input_norm=input_norm)
        return SpanEnd(self, place, spec, post_norm=spec.build_input_norm(place))

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the norm of the last block's output."""
        return BoundaryClosing(self, last, spec, post_norm=spec.build_norm("final"))


class SpanStart(BoundaryConnection):
    """The attention's connection: its write keeps the block's input beside the sum, (x, x + O)."""

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Add the output to a second stream that lives until the block's end."""
        (x,) = streams
        return x, x + output.to(x.dtype)


class SpanEnd(BoundaryConnection):
    """The MLP's connection: it reads the normalised sum, and writes to the block's input."""

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return the normalised sum, and the block's input as the only stream."""
        x, total = streams
        return self.to_compute(self.post_norm(total)), (x,)
