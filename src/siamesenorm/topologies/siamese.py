"""SiameseNorm (arXiv 2602.08064): two streams share every sublayer.

The bounded stream (the paper's X) is normalised after additions, the identity stream (Y) is left alone. Post-Pre
couples Post-Norm with Pre-Norm; Hybrid-Pre, the paper's main form, couples HybridNorm with Pre-Norm.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from siamesenorm.topologies.depth_scale import DepthScale, depth_scale_at
from siamesenorm.topologies.factors import Gate
from siamesenorm.topologies.siamese_connection import (
    FusedSiameseConnection,
    GatedOpening,
    LeanSiameseClosing,
    LeanSiameseConnection,
    PendingSiameseClosing,
    PendingSiameseConnection,
    SiameseClosing,
    SiameseConnection,
)
from siamesenorm.topologies.topology import (
    AttentionNorm,
    BoundaryCost,
    Closing,
    Connection,
    Opening,
    Place,
    ResidualSpec,
    Topology,
)


@dataclass(frozen=True, kw_only=True)
class Siamese(Topology):
    """What both forms share: the write X <- X + s O, Y <- Y + O, and the readings of the depth scale s.

    `depth_scale`: "code" = 1/sqrt(2(l+1)) with l the 0-based block, as in all released code; "paper_block" =
    1/sqrt(l+1); "paper_sublayer" = 1/sqrt(k+1) with k the 0-based sublayer; "none" = 1.
    `normalized_input` is the norm N^in of the sum before the sublayer.
    """

    paper: ClassVar[str] = "SiameseNorm, arXiv 2602.08064"
    has_fused_kernels: ClassVar[bool] = True
    has_lean_kernels: ClassVar[bool] = True
    pre_norm_refusal: ClassVar[str | None] = None

    depth_scale: DepthScale = "code"
    normalized_input: bool = True

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The bounded stream X and the identity stream Y."""
        return ("bounded", "identity")

    def scale(self, place: Place) -> float:
        """Return s at a place."""
        return depth_scale_at(place, self.depth_scale)

    def build_connection(self, place: Place, spec: ResidualSpec, **parts: Any) -> Connection:
        """Return the plain connection of these parts, or the one whose read completes the previous pending write."""
        scale = self.scale(place)
        if spec.kernels == "plain":
            return SiameseConnection(spec, scale=scale, **parts)
        if place.previous is None:
            return PendingSiameseConnection(spec, scale=scale, **parts)
        kind = LeanSiameseConnection if spec.kernels == "lean" else FusedSiameseConnection
        return kind(spec, arrival=self.scale(place.previous), scale=scale, **parts)

    def build_closing(self, last: Place, spec: ResidualSpec, *, output_norm: nn.Module | None) -> Closing:
        """Return the closing N_out(N^X_f(X) + N^Y_f(Y))."""
        post_norm, identity_norm = spec.build_norm("final"), spec.build_norm("final")
        if spec.kernels == "plain":
            return SiameseClosing(spec, post_norm=post_norm, identity_norm=identity_norm, output_norm=output_norm)
        kind = LeanSiameseClosing if spec.kernels == "lean" else PendingSiameseClosing
        return kind(
            spec,
            arrival=self.scale(last),
            post_norm=post_norm,
            identity_norm=identity_norm,
            output_norm=output_norm,
        )

    def build_identity_norm(self, place: Place, spec: ResidualSpec) -> nn.Module:
        """Return N^Y, which is the last norm before the sublayer where neither read nor sublayer has an N^in."""
        if self.normalized_input or place.normalises_input:
            return spec.build_norm(place.kind)
        return spec.build_input_norm(place)

    def build_sum_norm(self, place: Place, spec: ResidualSpec) -> nn.Module | None:
        """Return N^in, if the input is normalised."""
        return spec.build_input_norm(place) if self.normalized_input else None


@dataclass(frozen=True, kw_only=True)
class SiamesePostPre(Siamese):
    """SiameseNorm Post-Pre: Post-Norm and Pre-Norm share every sublayer.

    `post_norm`: "eager" normalises X after each addition (the paper's algorithm, X_0 = e); "lazy" before each sublayer,
    so that the embedding is normalised too (the released vision code). The two differ by one norm at the first reader.
    `readout`: "paper" closes with X + N_f(Y); "code" with N_out(N^X_f(X) + N^Y_f(Y)).
    `gated_opening` starts X at gamma e with a learned gamma (for conversion: gamma = 0 starts it at zero).
    Its official form in a language model is not published.
    """

    title: ClassVar[str] = "SiameseNorm Post-Pre"
    formula: ClassVar[str] = """\
        open    X = Y = e              (gated_opening: X = gamma e)
        read    h = N^in_k(X + N^Y_k(Y))                  (normalized_input=False: no N^in)
        write   X <- N^X_k(X + s O),  Y <- Y + O
        close   X + N_f(Y)             (readout=code: N_out(X + N_f(Y)))
        scale   s = 1/sqrt(2(l+1))     (depth_scale=none: s = 1)"""
    diagram: ClassVar[str] = """\
        X ──┬───────────────────────── + s·O ─▶ N^X ──▶ X
            + ─▶ N^in ─▶ F ─▶ O ───────┤
            N^Y                        │
        Y ──┴───────────────────────── + O ───────────▶ Y"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "Pre-Norm: N^X = 0, normalized_input off, and X_0 = 0 (gated_opening with gamma 0, or lazy): exact",
        "Post-Norm: N^Y = 0 and N_f = 0, normalized_input off, depth_scale none: exact",
        "DeepNorm-like: N(X + s O) = N(X/s + O) at eps 0, so depth scaling is a per-block alpha of sqrt(2(l+1))",
        "Mix-LN: no setting reproduces it",
    )

    post_norm: Literal["eager", "lazy"] = "eager"
    readout: Literal["paper", "code"] = "paper"
    gated_opening: bool = False

    def preserving(self) -> Topology:
        """Return the topology with X_0 = 0: by a gated opening, or by the first post_norm where it is lazy."""
        return dataclasses.replace(self, gated_opening=True) if self.post_norm == "eager" else self

    @property
    def cost(self) -> BoundaryCost:
        """Reads X, Y, O and writes U, X', Y', H; the backward pass reads five and writes three."""
        return BoundaryCost(forward=7, backward=8, saved=2)

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return two copies of the embedding, the first one gated if asked for."""
        return GatedOpening(spec) if self.gated_opening else super().opening(spec)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection; the eager first reader alone has nothing to post_norm."""
        settles = place.previous is not None or self.post_norm == "lazy"
        return self.build_connection(
            place,
            spec,
            post_norm=spec.build_norm(place.kind) if settles else None,
            identity_norm=self.build_identity_norm(place, spec),
            input_norm=self.build_sum_norm(place, spec),
        )

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the last norms and the sum."""
        output_norm = spec.build_final_norm() if self.readout == "code" else None
        return self.build_closing(last, spec, output_norm=output_norm)


@dataclass(frozen=True, kw_only=True)
class SiameseHybridPre(Siamese):
    """SiameseNorm Hybrid-Pre, the paper's main form: HybridNorm and Pre-Norm share every sublayer.

    Attention reads gamma X + N^Y(Y) and normalises its own queries, keys and values; the MLP settles X first and reads
    through N^in. Three final norms. `normalized_input=False` drops the MLP's N^in and keeps QKV-norm (what the paper's
    ablation row removed is not published).
    """

    title: ClassVar[str] = "SiameseNorm Hybrid-Pre"
    formula: ClassVar[str] = """\
        open    X = Y = e
        attention   read   h = gamma_l X + N^Y_k(Y)              (QKV-norm inside the attention)
        MLP         read   X <- N^X_l(X),  h = N^in_l(X + N^Y_k(Y))
        write   X <- X + s O,  Y <- Y + O
        close   N_out(N^X_f(X) + N^Y_f(Y))
        scale   s = 1/sqrt(2(l+1))     (depth_scale=none: s = 1)"""
    diagram: ClassVar[str] = """\
        X ──┬──────────────────────── + s·O ─▶ N^X ─┬─────────────────────── + s·O ──▶ X
            γ                         │             │                        │
            + ─▶ Attn(QKV-norm) ─▶ O ─┤             + ─▶ N^in ─▶ MLP ─▶ O ───┤
            N^Y                       │             N^Y                      │
        Y ──┴──────────────────────── + O ──────────┴─────────────────────── + O ────▶ Y"""
    special_cases: ClassVar[tuple[str, ...]] = (
        "Pre-Norm: gamma, N^X, N^X_f = 0 and N^Y = 1 at the MLP and the closing: exact up to the double norm's eps",
        "HybridNorm: N^Y = 0, gamma = N^X_f = 1, N^X = N^in constant, depth_scale none: exact up to eps",
    )

    @property
    def attention_norm(self) -> AttentionNorm:
        """QKV-norm stands in for the attention's input norm."""
        return "qkv-head"

    @property
    def cost(self) -> BoundaryCost:
        """Mean of the attention boundary (6 and 8 passes) and the MLP boundary (7 and 8)."""
        return BoundaryCost(forward=6.5, backward=8, saved=2)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the attention's or the MLP's connection."""
        if place.kind == "attention":
            own = place.normalises_input
            identity_norm = spec.build_norm(place.kind) if own else spec.build_input_norm(place)
            return self.build_connection(place, spec, gate=Gate(spec), identity_norm=identity_norm)
        return self.build_connection(
            place,
            spec,
            post_norm=spec.build_norm(place.kind),
            identity_norm=self.build_identity_norm(place, spec),
            input_norm=self.build_sum_norm(place, spec),
        )

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the three final norms."""
        return self.build_closing(last, spec, output_norm=spec.build_final_norm())
