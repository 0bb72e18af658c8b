"""Topologies that normalise the stream after additions: Post-Norm, DeepNorm, KEEL, Mix-LN, HybridNorm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.topologies.boundary_family import (
    BoundaryClosing,
    BoundaryConnection,
    BoundaryTopology,
    DepthScale,
    WriteFactors,
    depth_scale_at,
)
from siamesenorm.topologies.topology import AttentionNorm, Closing, Connection, Place, ResidualSpec


@dataclass(frozen=True, kw_only=True)
class PostNorm(BoundaryTopology):
    """Post-Norm: x <- N(x + F(x)) (Vaswani et al. 2017, arXiv 1706.03762). The first sublayer sees the raw embedding.

    `final_norm` adds a norm before the head, as some code bases keep for every variant; the papers' equation has none,
    and whether the SiameseNorm paper's baseline has one is not published.
    """

    title: ClassVar[str] = "Post-Norm"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv 1706.03762"
    formula: ClassVar[str] = """\
        open    x = e
        read    h = x
        write   x <- N_k(x + O)
        close   x                      (final_norm: N_f(x))"""
    diagram: ClassVar[str] = """\
        x ──┬─────────── + ─▶ N ──▶ x
            └─▶ F ─▶ O ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("a zero-gated sublayer gives N(x), not the identity",)

    final_norm: bool = False

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection whose post-norm is that of the previous addition, if there is one."""
        return BoundaryConnection(self, place, spec, post_norm=spec.build_post_norm(place))

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the norm of the last addition, and the final norm if asked for."""
        final = spec.build_final_norm() if self.final_norm else None
        post_norm = spec.build_norm("final")
        return BoundaryClosing(self, last, spec, post_norm=post_norm, output_norm=final)


@dataclass(frozen=True, kw_only=True)
class DeepNorm(PostNorm):
    """DeepNorm (arXiv 2203.00555): x <- N(alpha x + F(x)), alpha = (2L)^(1/4), initial weights times (8L)^(-1/4).

    L counts blocks (decoder-only and encoder-only). The factor applies to the value and output projections of attention
    and to the MLP's up and down matrices; a gate matrix, which the paper's MLP has not, is left unscaled. How the
    factor combines with an initialisation that itself depends on depth is not published: `initial_scaling=False` leaves
    it out.
    """

    title: ClassVar[str] = "DeepNorm"
    paper: ClassVar[str] = "Wang et al. 2022, arXiv 2203.00555"
    formula: ClassVar[str] = """\
        open    x = e
        read    h = x
        write   x <- N_k(alpha x + O), alpha = (2L)^(1/4)
        close   x                      (final_norm: N_f(x))
        init    value, attention output, MLP up and down times beta = (8L)^(-1/4)   (initial_scaling)"""
    diagram: ClassVar[str] = """\
        x ──┬─▶ α ─────── + ─▶ N ──▶ x
            └─▶ F ─▶ O ───┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("a zero-gated sublayer gives N(alpha x), not the identity",)

    initial_scaling: bool = True

    def write_factors(self, place: Place) -> WriteFactors:
        """Return alpha = (2L)^(1/4) on the stream."""
        return WriteFactors(skip=(2 * place.depth) ** 0.25)

    def initial_factor(self, role: str, depth: int) -> float:
        """Return beta = (8L)^(-1/4) for the projections whose scale it tames."""
        tamed = ("value", "attention_output", "mlp_up", "mlp_output")
        return (8 * depth) ** -0.25 if self.initial_scaling and role in tamed else 1.0


@dataclass(frozen=True, kw_only=True)
class Keel(BoundaryTopology):
    """KEEL (arXiv 2601.19895): x <- N(alpha x + F(N'(x))), alpha = K, the number of sublayers, 2L."""

    title: ClassVar[str] = "KEEL"
    paper: ClassVar[str] = "arXiv 2601.19895"
    formula: ClassVar[str] = """\
        open    x = e
        read    h = N'_k(x)
        write   x <- N_k(alpha x + O), alpha = 2L
        close   x"""
    diagram: ClassVar[str] = """\
        x ──┬─▶ α ────────────── + ─▶ N ──▶ x
            └─▶ N' ─▶ F ─▶ O ────┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("with N' the identity: DeepNorm with another alpha",)

    def write_factors(self, place: Place) -> WriteFactors:
        """Return alpha = 2L on the stream."""
        return WriteFactors(skip=2.0 * place.depth)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with the norm of the previous addition and an input norm."""
        post_norm, input_norm = spec.build_post_norm(place), spec.build_input_norm(place)
        return BoundaryConnection(self, place, spec, post_norm=post_norm, input_norm=input_norm)

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the norm of the last addition."""
        return BoundaryClosing(self, last, spec, post_norm=spec.build_norm("final"))


@dataclass(frozen=True, kw_only=True)
class MixLN(BoundaryTopology):
    """Mix-LN (arXiv 2412.13795): blocks l < m are Post-Norm, blocks l >= m Pre-Norm, always with a final norm.

    m = floor(`post_fraction` * L), or `post_blocks` where that is given. Its granularity is the block.
    """

    title: ClassVar[str] = "Mix-LN"
    paper: ClassVar[str] = "Li et al. 2024, arXiv 2412.13795"
    formula: ClassVar[str] = """\
        open    x = e
        blocks l < m:   read h = x,       write x <- N_k(x + O)
        blocks l >= m:  read h = N_k(x),  write x <- x + O
        close   N_f(x);  m = floor(post_fraction L), or post_blocks"""
    diagram: ClassVar[str] = """\
        l < m:  x ──┬─────────── + ─▶ N ──▶ x      l ≥ m:  x ──┬──────────────── + ──▶ x
                    └─▶ F ─▶ O ──┘                             └─▶ N ─▶ F ─▶ O ──┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("m = 0 is Pre-Norm", "m = L is Post-Norm with a final norm")

    post_fraction: float = 0.25
    post_blocks: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Refuse a fraction outside [0, 1]."""
        super().__post_init__()
        if not 0 <= self.post_fraction <= 1:
            raise UserError(f"post_fraction of {self.title} is {self.post_fraction}: choose a number from 0 to 1")
        if self.post_blocks != "auto" and self.post_blocks < 0:
            raise UserError(f"post_blocks of {self.title} is {self.post_blocks}: choose 0 or more, or auto (fraction)")

    def is_post(self, place: Place) -> bool:
        """Return whether the place is in a Post-Norm block."""
        if self.post_blocks != "auto":
            return place.block < self.post_blocks
        # 0.29 * 100 is 28.999999999999996: the floor is meant of the decimal fraction.
        return place.block < math.floor(self.post_fraction * place.depth + 1e-9)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection with the previous sublayer's Post-Norm and its own Pre-Norm, where they are."""
        after_post = place.previous is not None and self.is_post(place.previous)
        return BoundaryConnection(
            self,
            place,
            spec,
            post_norm=spec.build_post_norm(place) if after_post else None,
            input_norm=None if self.is_post(place) else spec.build_input_norm(place),
        )

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the final norm, after the last Post-Norm if every block is one."""
        post_norm = spec.build_norm("final") if self.is_post(last) else None
        return BoundaryClosing(self, last, spec, post_norm=post_norm, output_norm=spec.build_final_norm())


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

    def write_factors(self, place: Place) -> WriteFactors:
        """Return the depth scale on the output."""
        return WriteFactors(scale=None if self.depth_scale == "none" else depth_scale_at(place, self.depth_scale))

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection of a Pre-Norm first block, of attention, or of the MLP with the attention's norm."""
        if self.first_block == "pre" and place.block == 0:
            return BoundaryConnection(self, place, spec, input_norm=spec.build_input_norm(place))
        return BoundaryConnection(self, place, spec, post_norm=hybrid_post_norm(place, spec))


def hybrid_post_norm(place: Place, spec: ResidualSpec) -> nn.Module | None:
    """Return the norm of the attention's addition at the MLP's place, None at the attention's."""
    return spec.build_post_norm(place) if place.kind == "mlp" else None
