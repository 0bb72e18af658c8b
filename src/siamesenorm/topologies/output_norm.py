"""Topologies that normalise what a sublayer returns: OLMo 2's output norm, and the double norm of Peri-LN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from siamesenorm.errors import UserError
from siamesenorm.topologies.pre_norm import NormalisedOpening
from siamesenorm.topologies.single_stream import SingleStreamClosing, SingleStreamConnection
from siamesenorm.topologies.topology import (
    BoundaryCost,
    Closing,
    Connection,
    Opening,
    Place,
    ResidualSpec,
    Topology,
)


@dataclass(frozen=True, kw_only=True)
class OutputNorm(Topology):
    """OLMo 2's reordered norm: x <- x + N(F(x)), a final norm before the head (arXiv 2501.00656).

    The sublayer sees the raw stream, the first one the raw embedding. OLMo 2 trains it with QK-norm.
    """

    title: ClassVar[str] = "Output norm (OLMo 2)"
    paper: ClassVar[str] = "OLMo et al. 2025, arXiv 2501.00656"
    formula: ClassVar[str] = """\
        open    x = e
        read    h = x
        write   x <- x + N_k(O)
        close   N_f(x)"""
    diagram: ClassVar[str] = """\
        x ──┬──────────────── + ──▶ x
            └─▶ F ─▶ O ─▶ N ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("x_K = x_0 + sum of the normalised outputs, exactly",)
    pre_norm_refusal: ClassVar[str | None] = "it normalises what a sublayer returns"
    modulation_refusal: ClassVar[str | None] = (
        "it normalises the sublayer's output, which cancels the size of the gate: a gate of zero could not silence it"
    )

    @property
    def cost(self) -> BoundaryCost:
        """Reads X, O and writes X' (= H); the backward pass reads dH, dX', O and writes dX, dO."""
        return BoundaryCost(forward=3, backward=5, saved=1)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with an output norm; raises UserError if the sublayer is conditioned."""
        self.refuse_conditioned(place)
        return SingleStreamConnection(spec, output=spec.build_norm("output"))

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the final norm."""
        return SingleStreamClosing(spec, norm=spec.build_final_norm())

    def refuse_conditioned(self, place: Place) -> None:
        """Raise UserError if the sublayer is conditioned."""
        if place.conditioned:
            raise UserError(
                f"{self.title} takes no conditioned sublayer: {self.modulation_refusal}; use pre or siamese"
            )


@dataclass(frozen=True, kw_only=True)
class PeriNorm(OutputNorm):
    """The double norm: x <- x + N'(F(N(x))) (Sandwich-LN of CogView, Grok, Gemma 2, Peri-LN arXiv 2502.02732).

    `embedding_norm` opens with a norm of its own, gain included, as Peri-LN offers; others leave the embedding alone.
    """

    title: ClassVar[str] = "Double norm (Sandwich, Peri-LN, Gemma 2)"
    paper: ClassVar[str] = "Kim et al. 2025, arXiv 2502.02732; Ding et al. 2021, arXiv 2105.13290"
    formula: ClassVar[str] = """\
        open    x = e                  (embedding_norm: x = N_e(e))
        read    h = N_k(x)
        write   x <- x + N'_k(O)
        close   N_f(x)"""
    diagram: ClassVar[str] = """\
        x ──┬────────────────────── + ──▶ x
            └─▶ N ─▶ F ─▶ O ─▶ N' ──┘"""

    embedding_norm: bool = False

    @property
    def cost(self) -> BoundaryCost:
        """Reads X, O and writes X', H; the backward pass reads dH, dX', X', O and writes dX, dO."""
        return BoundaryCost(forward=4, backward=6, saved=2)

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the copy, or the embedding's norm."""
        if self.embedding_norm:
            return NormalisedOpening(spec, spec.build_norm("embedding"))
        return Opening(spec)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with two norms; raises UserError if the sublayer is conditioned."""
        self.refuse_conditioned(place)
        return SingleStreamConnection(spec, norm=spec.build_input_norm(place), output=spec.build_norm("output"))
