"""Topologies that start with quiet sublayers: a learned factor on each output, small or zero at the start."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from siamesenorm.errors import UserError
from siamesenorm.topologies.factors import Gate, ScalarGate
from siamesenorm.topologies.single_stream import SingleStreamClosing, SingleStreamConnection
from siamesenorm.topologies.topology import BoundaryCost, Closing, Connection, Place, ResidualSpec, Topology


@dataclass(frozen=True, kw_only=True)
class LayerScale(Topology):
    """LayerScale (CaiT, arXiv 2103.17239): Pre-Norm whose outputs are multiplied by a learned vector lambda.

    `initial` is lambda's initial value; "auto" takes the paper's by depth: 0.1 up to 18 blocks, 1e-5 up to 24, else
    1e-6.
    """

    title: ClassVar[str] = "LayerScale"
    paper: ClassVar[str] = "Touvron et al. 2021, arXiv 2103.17239"
    formula: ClassVar[str] = """\
        open    x = e
        read    h = N_k(x)
        write   x <- x + lambda_k O    (lambda_k = initial at the start, one number a channel)
        close   N_f(x)"""
    diagram: ClassVar[str] = """\
        x ──┬───────────────────── + ──▶ x
            └─▶ N ─▶ F ─▶ O ─▶ λ ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("Pre-Norm: lambda = 1, exactly",)

    pre_norm_refusal: ClassVar[str | None] = None

    initial: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Refuse a negative initial value."""
        super().__post_init__()
        if self.initial != "auto" and self.initial < 0:
            raise UserError(f"initial of {self.title} is {self.initial}: choose 0 or more, or auto (by depth)")

    def preserving(self) -> Topology:
        """Return the topology with lambda = 1 at the start."""
        return dataclasses.replace(self, initial=1.0)

    @property
    def cost(self) -> BoundaryCost:
        """Reads X, O and writes X', H; the backward pass reads dH, dX', X', O and writes dX, dO."""
        return BoundaryCost(forward=4, backward=6, saved=2)

    def initial_at(self, depth: int) -> float:
        """Return the initial value of lambda in a model of `depth` blocks."""
        if self.initial != "auto":
            return self.initial
        return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the Pre-Norm connection with a scaled output."""
        return SingleStreamConnection(
            spec,
            norm=spec.build_input_norm(place),
            output=Gate(spec, initial=self.initial_at(place.depth)),
        )

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the final norm."""
        return SingleStreamClosing(spec, norm=spec.build_final_norm())


@dataclass(frozen=True, kw_only=True)
class ReZero(Topology):
    """ReZero (arXiv 2003.04887): x <- x + alpha F(x), alpha one learned number a sublayer, 0 at the start; no norm."""

    title: ClassVar[str] = "ReZero"
    paper: ClassVar[str] = "Bachlechner et al. 2020, arXiv 2003.04887"
    formula: ClassVar[str] = """\
        open    x = e
        read    h = x
        write   x <- x + alpha_k O     (alpha_k = 0 at the start)
        close   x"""
    diagram: ClassVar[str] = """\
        x ──┬──────────────── + ──▶ x
            └─▶ F ─▶ O ─▶ α ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("the identity at the start, exactly",)
    pre_norm_refusal: ClassVar[str | None] = "it has no norm"

    @property
    def cost(self) -> BoundaryCost:
        """Reads X, O and writes X' (= H); the backward pass reads dH, dX', O and writes dX, dO."""
        return BoundaryCost(forward=3, backward=5, saved=1)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with a scaled output and no norm."""
        return SingleStreamConnection(spec, output=ScalarGate(initial=0.0))

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the stream as it is."""
        return SingleStreamClosing(spec)
