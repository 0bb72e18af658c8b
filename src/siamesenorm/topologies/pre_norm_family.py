"""Topologies that never normalise the stream: Pre-Norm, LayerNorm-Scaling, LayerScale, ReZero, OLMo 2, Peri-LN."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from siamesenorm.errors import UserError
from siamesenorm.norms import RMSNorm
from siamesenorm.topologies.boundary_family import BoundaryClosing, BoundaryConnection, BoundaryTopology, ScalarGate
from siamesenorm.topologies.topology import Closing, Connection, Gate, Opening, Place, ResidualSpec, Topology


@dataclass(frozen=True, kw_only=True)
class PreNorm(BoundaryTopology):
    """Pre-Norm (GPT-2, Llama): x <- x + F(N(x)), a final norm before the head; x_K = x_0 + sum of all outputs.

    `embedding_norm` opens with the parameter-free e / RMS(e) (SiameseNorm, arXiv 2602.08064, section 2.2).
    """

    title: ClassVar[str] = "Pre-Norm"
    paper: ClassVar[str] = "Xiong et al. 2020, arXiv 2002.04745"
    formula: ClassVar[str] = """\
        open    x = e                  (embedding_norm: x = e / RMS(e), no parameter)
        read    h = N_k(x)
        write   x <- x + O
        close   N_f(x)"""
    diagram: ClassVar[str] = """\
        x ──┬──────────────── + ──▶ x
            └─▶ N ─▶ F ─▶ O ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("x_K = x_0 + sum of all outputs, exactly",)

    pre_norm_refusal: ClassVar[str | None] = None

    embedding_norm: bool = False

    def preserving(self) -> Topology:
        """Return the topology; raises UserError if it normalises the embedding."""
        if self.embedding_norm:
            raise UserError(f"{self.title} with embedding_norm changes the embedding: leave embedding_norm out")
        return super().preserving()

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the copy, or the normalising opening."""
        if not self.embedding_norm:
            return Opening(spec)
        # e / sqrt(mean(e^2) + 1e-5), without parameters, whatever the model's norm is.
        return Opening(spec, norm=RMSNorm(spec.dim, affine=False, axis=spec.axis).select_kernels(spec.kernels))

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with an input norm."""
        return BoundaryConnection(self, place, spec, input_norm=spec.build_input_norm(place))


@dataclass(frozen=True, kw_only=True)
class LayerNormScaling(PreNorm):
    """LayerNorm-Scaling: Pre-Norm whose input norm is divided by sqrt(l + 1), l the 0-based block."""

    title: ClassVar[str] = "LayerNorm-Scaling"
    paper: ClassVar[str] = "Sun et al. 2025, arXiv 2502.05795"
    formula: ClassVar[str] = """\
        open    x = e                  (embedding_norm: x = e / RMS(e), no parameter)
        read    h = N_k(x) / sqrt(l + 1)
        write   x <- x + O
        close   N_f(x)"""
    diagram: ClassVar[str] = """\
        x ──┬──────────────────────────── + ──▶ x
            └─▶ N ─▶ 1/√(l+1) ─▶ F ─▶ O ──┘"""

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with a scaled input norm; raises UserError if the sublayer has an input norm itself."""
        if place.normalises_input:
            raise UserError(f"{self.title} before a sublayer that normalises its own input: the scale would be lost")
        norm = spec.build_input_norm(place)
        return BoundaryConnection(self, place, spec, input_norm=norm, input_scale=1 / math.sqrt(place.block + 1))


@dataclass(frozen=True, kw_only=True)
class LayerScale(BoundaryTopology):
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

    def initial_at(self, depth: int) -> float:
        """Return the initial value of lambda in a model of `depth` blocks."""
        if self.initial != "auto":
            return self.initial
        return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the Pre-Norm connection with a scaled output."""
        gate = Gate(spec, initial=self.initial_at(place.depth))
        return BoundaryConnection(self, place, spec, input_norm=spec.build_input_norm(place), output=gate)


@dataclass(frozen=True, kw_only=True)
class ReZero(BoundaryTopology):
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
    modulation_refusal: ClassVar[str | None] = (
        "its factor and the condition's gate multiply each other and are both zero at the start: neither ever learns"
    )
    has_fused_kernels: ClassVar[bool] = False
    """No read has a norm, so there is nothing to fuse an addition with."""

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with a scaled output and no norm; raises UserError if the sublayer is conditioned."""
        self.refuse_conditioned(place)
        return BoundaryConnection(self, place, spec, output=ScalarGate(initial=0.0))

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the stream as it is."""
        return BoundaryClosing(self, last, spec)


@dataclass(frozen=True, kw_only=True)
class OutputNorm(BoundaryTopology):
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
    has_fused_kernels: ClassVar[bool] = False
    """No read has a norm, so there is nothing to fuse an addition with."""
    pre_norm_refusal: ClassVar[str | None] = "it normalises what a sublayer returns"
    modulation_refusal: ClassVar[str | None] = (
        "it normalises the sublayer's output, which cancels the size of the gate: a gate of zero could not silence it"
    )

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with an output norm; raises UserError if the sublayer is conditioned."""
        self.refuse_conditioned(place)
        return BoundaryConnection(self, place, spec, output=spec.build_norm("output"))


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

    has_fused_kernels: ClassVar[bool] = True

    embedding_norm: bool = False

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the copy, or the embedding's norm."""
        return Opening(spec, norm=spec.build_norm("embedding") if self.embedding_norm else None)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with two norms; raises UserError if the sublayer is conditioned."""
        self.refuse_conditioned(place)
        norm, output = spec.build_input_norm(place), spec.build_norm("output")
        return BoundaryConnection(self, place, spec, input_norm=norm, output=output)
