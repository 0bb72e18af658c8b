"""Pre-Norm and its variants: the stream is left alone, the sublayer sees its norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.norms import Inexact, Norm, NormFunction
from siamesenorm.norms.rms_norm import RMSNorm
from siamesenorm.topologies.factors import Scaled
from siamesenorm.topologies.fused import single_stream_closing, single_stream_connection
from siamesenorm.topologies.single_stream import SingleStreamClosing, SingleStreamConnection
from siamesenorm.topologies.topology import (
    BoundaryCost,
    Closing,
    Connection,
    Opening,
    Place,
    ResidualSpec,
    Streams,
    Topology,
)


@dataclass(frozen=True, kw_only=True)
class PreNorm(Topology):
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

    has_fused_kernels: ClassVar[bool] = True
    pre_norm_refusal: ClassVar[str | None] = None

    embedding_norm: bool = False

    def preserving(self) -> Topology:
        """Return the topology; raises UserError if it normalises the embedding."""
        if self.embedding_norm:
            raise UserError(f"{self.title} with embedding_norm changes the embedding: leave embedding_norm out")
        return super().preserving()

    @property
    def cost(self) -> BoundaryCost:
        """Reads Y, O and writes Y', H; the backward pass reads dH, dY', Y' and writes dY."""
        return BoundaryCost(forward=4, backward=4, saved=1)

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the copy, or the normalising opening."""
        if not self.embedding_norm:
            return Opening(spec)
        # e / sqrt(mean(e^2) + 1e-5), without parameters, whatever the model's norm is.
        return NormalisedOpening(spec, RMSNorm(spec.dim, affine=False, axis=spec.axis))

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with an input norm."""
        return single_stream_connection(place, spec, norm=spec.build_input_norm(place))

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the final norm."""
        return single_stream_closing(spec, norm=spec.build_final_norm())


class NormalisedOpening(Opening):
    """One stream: the norm of the embedding."""

    def __init__(self, spec: ResidualSpec, norm: nn.Module) -> None:
        super().__init__(spec)
        self.norm = norm

    def forward(self, embedding: Tensor) -> Streams:
        """Return the normalised embedding as the stream."""
        return (self.norm(self.to_residual(embedding)),)


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

    has_fused_kernels: ClassVar[bool] = False

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with a scaled input norm; raises UserError if the sublayer has an input norm itself."""
        if place.normalises_input:
            raise UserError(f"{self.title} before a sublayer that normalises its own input: the scale would be lost")
        norm = Scaled(spec.build_input_norm(place), 1 / math.sqrt(place.block + 1))
        return ScaledNormConnection(spec, norm=norm)

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the final norm; no write is ever pending."""
        return SingleStreamClosing(spec, norm=spec.build_final_norm())


class ScaledNormConnection(SingleStreamConnection):
    """Pre-Norm's connection with a constant factor after the norm."""

    norm: Scaled

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Give the norm the gain of `norm` divided by the factor."""
        assert norm is not None and isinstance(self.norm.module, Norm)
        return self.norm.module.copy_from(norm.divided(float(self.norm.factor)))
