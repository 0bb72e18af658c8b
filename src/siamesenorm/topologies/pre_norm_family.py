"""Topologies that never normalise the stream: Pre-Norm, LayerNorm-Scaling, LayerScale, ReZero, OLMo 2 and others."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.norms import RMSNorm
from siamesenorm.topologies.boundary_family import BoundaryClosing, BoundaryConnection, BoundaryTopology, ScalarGate
from siamesenorm.topologies.start_as_pre_norm import NormClosing, NormConnection
from siamesenorm.topologies.topology import BoundaryCost, Gate, Opening, Place, ResidualSpec, Streams, Topology


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

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
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

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection with a scaled input norm; raises UserError if the sublayer has an input norm itself."""
        if place.normalises_input:
            raise UserError(f"{self.title} before a sublayer that normalises its own input: the scale would be lost")
        norm = spec.build_input_norm(place)
        return BoundaryConnection(self, place, spec, input_norm=norm, input_scale=1 / math.sqrt(place.block + 1))


@dataclass(frozen=True, kw_only=True)
class LayerScale(BoundaryTopology):
    """LayerScale (CaiT, arXiv 2103.17239): Pre-Norm whose outputs are multiplied by a learned vector lambda.

    `initial` is lambda's initial value; "auto" takes the paper's by depth: 0.1 up to 18 blocks, 1e-5 to 24, else 1e-6.
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

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
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

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection with a scaled output and no norm; raises UserError if the sublayer is conditioned."""
        self.refuse_conditioned(place)
        return BoundaryConnection(self, place, spec, output=ScalarGate(initial=0.0))

    def closing(self, last: Place, spec: ResidualSpec) -> BoundaryClosing:
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
    has_input_norm: ClassVar[bool] = False
    has_fused_kernels: ClassVar[bool] = False
    """No read has a norm, so there is nothing to fuse an addition with."""
    pre_norm_refusal: ClassVar[str | None] = "it normalises what a sublayer returns"
    modulation_refusal: ClassVar[str | None] = (
        "it normalises the sublayer's output, which cancels the size of the gate: a gate of zero could not silence it"
    )

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection with an output norm; raises UserError if the sublayer is conditioned."""
        self.refuse_conditioned(place)
        norm = spec.build_input_norm(place) if self.has_input_norm else None
        return BoundaryConnection(self, place, spec, input_norm=norm, output=spec.build_norm("output"))


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

    has_input_norm: ClassVar[bool] = True
    has_fused_kernels: ClassVar[bool] = True

    embedding_norm: bool = False

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the copy, or the embedding's norm."""
        return Opening(spec, norm=spec.build_norm("embedding") if self.embedding_norm else None)


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


class LambdaClosing(NormClosing):
    """The final norm of the stream."""

    def __init__(self, spec: ResidualSpec) -> None:
        super().__init__(spec)
        self.norm = spec.build_final_norm()

    def forward(self, streams: Streams) -> Tensor:
        """Return N_f(x)."""
        return self.to_compute(self.norm(streams[0]))
