"""HybridNorm: the stream is normalised once a block, after attention; attention normalises its own Q, K and V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from siamesenorm.topologies.boundary import (
    BoundaryClosing,
    BoundaryConnection,
    BoundaryTopology,
    DepthScale,
    WriteFactors,
    depth_scale_at,
)
from siamesenorm.topologies.topology import AttentionNorm, BoundaryCost, Closing, Connection, Place, ResidualSpec


@dataclass(frozen=True, kw_only=True)
class HybridNorm(BoundaryTopology):
    """HybridNorm (arXiv 2503.04598): x <- N(x + Attention(x)), then x <- x + MLP(x), attention with QKV-norm.

    `first_block`: "same" as the others, or "pre" (HybridNorm*): both sublayers of block 0 are Pre-Norm, and its
    attention keeps QKV-norm. `depth_scale` multiplies every output by s (row 2 of SiameseNorm's Table 3): "code" =
    1/sqrt(2(l+1)) with l the 0-based block, "paper_block" = 1/sqrt(l+1), "paper_sublayer" = 1/sqrt(k+1), "none" = 1.
    """

    title: ClassVar[str] = "HybridNorm"
    paper: ClassVar[str] = "Zhuo et al. 2025, arXiv 2503.04598"
    formula: ClassVar[str] = """\
        open    x = e
        attention   read h = x (QKV-norm inside the attention),  write x <- N_l(x + s O)
        MLP         read h = x,                                  write x <- x + s O
        close   N_f(x)
        scale   s = 1                  (depth_scale=code: s = 1/sqrt(2(l+1)))
        first_block=pre, block 0:  read h = N_k(x),  write x <- x + s O"""
    diagram: ClassVar[str] = """\
        x ──┬──────────────────────── + ─▶ N ─┬───────────── + ──▶ x
            └─▶ Attn(QKV-norm) ─▶ O ──┘       └─▶ MLP ─▶ O ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "first_block=same: it is ResiDual-HybridNorm with N_f of the dual stream 0: exact",
        "first_block=same, depth_scale=none: Hybrid-Pre with N^Y = 0, gamma = N^X = N^in = N^X_f = 1, up to eps",
    )

    first_block: Literal["same", "pre"] = "same"
    depth_scale: DepthScale = "none"

    @property
    def attention_norm(self) -> AttentionNorm:
        """QKV-norm stands in for the attention's input norm."""
        return "qkv-head"

    @property
    def cost(self) -> BoundaryCost:
        """Mean of the normalised boundary (5 and 4 passes), the plain one (3 and 3) and the V-norm (2 and 3)."""
        return BoundaryCost(forward=5, backward=5, saved=1)

    def write_factors(self, place: Place) -> WriteFactors:
        """Return the depth scale on the output."""
        return WriteFactors(scale=None if self.depth_scale == "none" else depth_scale_at(place, self.depth_scale))

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection of a Pre-Norm first block, of attention, or of the MLP with the attention's norm."""
        if self.first_block == "pre" and place.block == 0:
            return BoundaryConnection(self, place, spec, input_norm=spec.build_input_norm(place))
        return BoundaryConnection(self, place, spec, post_norm=hybrid_post_norm(place, spec))

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the final norm."""
        return BoundaryClosing(self, last, spec, output_norm=spec.build_final_norm())


def hybrid_post_norm(place: Place, spec: ResidualSpec) -> nn.Module | None:
    """Return the norm of the attention's addition at the MLP's place, None at the attention's."""
    return spec.build_post_norm(place) if place.kind == "mlp" else None
