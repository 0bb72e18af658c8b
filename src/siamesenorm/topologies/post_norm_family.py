"""Topologies that normalise the stream after additions: Post-Norm, DeepNorm, KEEL, Mix-LN, HybridNorm and others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.norms import norm_options
from siamesenorm.topologies.boundary_family import BoundaryClosing, BoundaryConnection, BoundaryTopology, WriteFactors
from siamesenorm.topologies.topology import (
    AttentionNorm,
    BoundaryCost,
    DepthScale,
    Opening,
    Place,
    ResidualSpec,
    Streams,
)


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

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection whose post-norm is that of the previous addition, if there is one."""
        return BoundaryConnection(self, place, spec, post_norm=spec.build_post_norm(place))

    def closing(self, last: Place, spec: ResidualSpec) -> BoundaryClosing:
        """Return the norm of the last addition, and the final norm if configured."""
        final = spec.build_final_norm() if self.final_norm else None
        post_norm = spec.build_norm("final")
        return BoundaryClosing(self, last, spec, post_norm=post_norm, output_norm=final)


@dataclass(frozen=True, kw_only=True)
class DeepNorm(PostNorm):
    """DeepNorm (arXiv 2203.00555): x <- N(alpha x + F(x)), alpha = (2L)^(1/4), initial weights times (8L)^(-1/4).

    L counts blocks (decoder-only and encoder-only). The factor applies to the value and output projections of attention
    and to the MLP's up and down matrices; a gate matrix, absent from the paper's MLP, is left unscaled. How it
    combines with an initialisation that depends on depth is not published: `initial_scaling=False` leaves it out.
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
        write   x <- N_k(alpha x + O), alpha = K, the number of sublayers
        close   x"""
    diagram: ClassVar[str] = """\
        x ──┬─▶ α ────────────── + ─▶ N ──▶ x
            └─▶ N' ─▶ F ─▶ O ────┘"""
    special_cases: ClassVar[tuple[str, ...]] = ("with N' the identity: DeepNorm with another alpha",)

    def write_factors(self, place: Place) -> WriteFactors:
        """Return alpha, the number of sublayers, on the stream."""
        return WriteFactors(skip=float(place.sublayers))

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection with the norm of the previous addition and an input norm."""
        post_norm, input_norm = spec.build_post_norm(place), spec.build_input_norm(place)
        return BoundaryConnection(self, place, spec, post_norm=post_norm, input_norm=input_norm)

    def closing(self, last: Place, spec: ResidualSpec) -> BoundaryClosing:
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
        super().__post_init__()
        if not 0 <= self.post_fraction <= 1:
            raise UserError(f"post_fraction of {self.title} is {self.post_fraction}: choose a number from 0 to 1")
        if self.post_blocks != "auto" and self.post_blocks < 0:
            raise UserError(f"post_blocks of {self.title} is {self.post_blocks}: choose 0 or more, or auto (fraction)")

    def is_post(self, place: Place) -> bool:
        """Return whether the place is in a Post-Norm block."""
        if self.post_blocks != "auto":
            return place.block < self.post_blocks
        # The floor of the decimal fraction, not of its binary rounding: 0.29 * 100 is 28.999999999999996.
        return place.block < math.floor(self.post_fraction * place.depth + 1e-9)

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection with the previous sublayer's Post-Norm and its own Pre-Norm, where they are."""
        after_post = place.previous is not None and self.is_post(place.previous)
        return BoundaryConnection(
            self,
            place,
            spec,
            post_norm=spec.build_post_norm(place) if after_post else None,
            input_norm=None if self.is_post(place) else spec.build_input_norm(place),
        )

    def closing(self, last: Place, spec: ResidualSpec) -> BoundaryClosing:
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
        return WriteFactors() if self.depth_scale == "none" else WriteFactors.shrinking(place, self.depth_scale)

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection of a Pre-Norm first block, of attention, or of the MLP with the attention's norm."""
        if self.first_block == "pre" and place.block == 0:
            return BoundaryConnection(self, place, spec, input_norm=spec.build_input_norm(place))
        return BoundaryConnection(self, place, spec, post_norm=hybrid_post_norm(place, spec))


def hybrid_post_norm(place: Place, spec: ResidualSpec) -> nn.Module | None:
    """Return the norm of the attention's addition at the MLP's place, None at the attention's."""
    return spec.build_post_norm(place) if place.kind == "mlp" else None


@dataclass(frozen=True, kw_only=True)
class ResiDual(BoundaryTopology):
    """ResiDual (arXiv 2304.14802): X <- N(X + O) feeds the sublayers, D <- D + c O only the closing a X + N_f(D).

    `bounded_scale` is a, `dual_scale` c: c < 1 (0.05 in the official fp16 configuration) keeps D in range, and N_f
    cancels it, but for its eps. The official N_f therefore has eps 1e-7 whatever the other norms have; `dual_eps` sets
    it, and "auto" keeps the norm's own. `body="hybridnorm"` makes X a HybridNorm stream, which has a final norm of its
    own: N^X_f(X) + N_f(D) (row 3 of SiameseNorm's Table 3).
    """

    title: ClassVar[str] = "ResiDual"
    paper: ClassVar[str] = "Xie et al. 2023, arXiv 2304.14802"
    formula: ClassVar[str] = """\
        open    X = e,  D = c e
        read    h = X
        write   X <- N_k(X + O),  D <- D + c O
        close   a X + N_f(D)           (a = c = 1)
        body=hybridnorm:  X as in HybridNorm, close a N^X_f(X) + N_f(D)"""
    diagram: ClassVar[str] = """\
        X ──┬─────────── + ─▶ N ──▶ X
            └─▶ F ─▶ O ──┤
        D ────────────── + ───────▶ D"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "D_K = e + sum of all outputs, exactly (c = 1)",
        "its body alone (Post-Norm, HybridNorm): N_f = 0 and a = 1, exactly",
        "N_f cancels c up to its eps",
    )

    body: Literal["post", "hybridnorm"] = "post"
    bounded_scale: float = 1.0
    dual_scale: float = 1.0
    dual_eps: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_scale <= 0:
            raise UserError(f"dual_scale of {self.title} is {self.dual_scale}: choose a positive number")
        if self.dual_eps != "auto" and self.dual_eps < 0:
            raise UserError(f"dual_eps of {self.title} is {self.dual_eps}: choose 0 or more, or auto (the norm's own)")

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The bounded stream X and the dual stream D."""
        return ("bounded", "dual")

    @property
    def attention_norm(self) -> AttentionNorm:
        """What the body needs."""
        return "qkv-head" if self.body == "hybridnorm" else "auto"

    def write_factors(self, place: Place) -> WriteFactors:
        """Return c on what the dual stream adds."""
        return WriteFactors(identity_scale=self.dual_scale)

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the embedding, and the embedding times c."""
        return Opening(spec, count=2, scale=self.dual_scale)

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection of the body: it reads the bounded stream alone."""
        post_norm = spec.build_post_norm(place) if self.body == "post" else hybrid_post_norm(place, spec)
        return BoundaryConnection(self, place, spec, post_norm=post_norm)

    def closing(self, last: Place, spec: ResidualSpec) -> BoundaryClosing:
        """Return the sum of the normalised bounded stream, times a, and the dual stream's norm."""
        return BoundaryClosing(
            self,
            last,
            spec,
            post_norm=spec.build_norm("final"),
            identity_norm=self.build_dual_norm(spec),
            bounded_scale=self.bounded_scale,
        )

    def build_dual_norm(self, spec: ResidualSpec) -> nn.Module:
        """Return N_f; raises UserError if `dual_eps` is set and the norm has no eps."""
        if self.dual_eps == "auto":
            return spec.build_norm("final")
        if "eps" not in norm_options(spec.norm_spec.name):
            raise UserError(
                f"dual_eps of {self.title} is {self.dual_eps}, but norm {spec.norm_spec.name} has no eps: leave "
                "dual_eps at auto, or choose a norm with an eps, such as rmsnorm"
            )
        return spec.with_norm_options(eps=self.dual_eps).build_norm("final")


@dataclass(frozen=True, kw_only=True)
class SpanNorm(BoundaryTopology):
    """SpanNorm (arXiv 2601.22580), experimental: one residual spans a whole block, whose output is normalised.

    The structure is that of a public port that cites the paper's equations (reading A with the initial norm). The
    paper's scaling strategy was not found and is not applied: numbers obtained with it are not SpanNorm's.
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
    def distinguishes_sublayers(self) -> bool:
        """A block has one norm after attention and another at its end."""
        return True

    def boundary_cost(self, place: Place) -> BoundaryCost:
        """Return the cost; in reading A the block's input passes through the boundary before the MLP."""
        if self.reading == "B":
            return super().boundary_cost(place)
        return BoundaryCost(forward=4, backward=5 if place.kind == "mlp" else 4, saved=1)

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return a half of the block: the first has the previous block's norm, in A the second the attention's."""
        post_norm = spec.build_post_norm(place) if place.kind == "attention" else None
        if self.reading == "B":
            return BoundaryConnection(self, place, spec, post_norm=post_norm, input_norm=spec.build_input_norm(place))
        if place.kind == "attention":
            first = self.initial_norm and place.previous is None
            input_norm = spec.build_input_norm(place) if first else None
            return SpanStart(self, place, spec, post_norm=post_norm, input_norm=input_norm)
        return SpanEnd(self, place, spec, post_norm=spec.build_input_norm(place))

    def closing(self, last: Place, spec: ResidualSpec) -> BoundaryClosing:
        """Return the norm of the last block's output."""
        return BoundaryClosing(self, last, spec, post_norm=spec.build_norm("final"))


class SpanStart(BoundaryConnection):
    """The attention's connection: its write keeps the block's input beside the sum, (x, x + O)."""

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Add the output to a second stream that ends with the block."""
        (x,) = streams
        return x, x + output.to(x.dtype)


class SpanEnd(BoundaryConnection):
    """The MLP's connection: it reads the normalised sum, and writes to the block's input."""

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return the normalised sum, and the block's input as the only stream."""
        x, total = streams
        return self.to_compute(self.post_norm(total)), (x,)
