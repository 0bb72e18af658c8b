"""SiameseNorm (arXiv 2602.08064): two streams share every sublayer.

The bounded stream (the paper's X) is normalised after additions, the identity stream (Y) is left alone. Post-Pre
couples Post-Norm with Pre-Norm; Hybrid-Pre, the paper's main form, couples HybridNorm with Pre-Norm.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from siamesenorm.topologies.boundary_family import BoundaryClosing, BoundaryConnection, BoundaryTopology, WriteFactors
from siamesenorm.topologies.start_as_pre_norm import double_norm_eps
from siamesenorm.topologies.topology import AttentionNorm, DepthScale, Gate, Opening, Place, ResidualSpec, Topology


@dataclass(frozen=True, kw_only=True)
class Siamese(BoundaryTopology):
    """What both forms share: the write X <- X + s O, Y <- Y + O, and the readings of the depth scale s.

    `depth_scale`: "code" = 1/sqrt(2(l+1)) with l the 0-based block, as in all released code; "paper_block" =
    1/sqrt(l+1); "paper_sublayer" = 1/sqrt(k+1) with k the 0-based sublayer; "none" = 1.
    `normalized_input` is the norm N^in of the sum before the sublayer.
    `exact_eps` makes a norm of a norm equal one norm: with e^2 / (1 + e) = eps, both (and the bounded stream's norm of
    that read) have eps e, and the outer one is multiplied by sqrt(1 + e). A model that starts as a given Pre-Norm has
    it; RMSNorm and LayerNorm (and SeeDNorm at beta = 0) are then exact, where the outer norm is the sublayer's own too.
    """

    paper: ClassVar[str] = "SiameseNorm, arXiv 2602.08064"
    has_lean_kernels: ClassVar[bool] = True
    pre_norm_refusal: ClassVar[str | None] = None

    depth_scale: DepthScale = "code"
    normalized_input: bool = True
    exact_eps: bool = False

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The bounded stream X and the identity stream Y."""
        return ("bounded", "identity")

    def write_factors(self, place: Place) -> WriteFactors:
        """Return s on what the bounded stream adds."""
        return WriteFactors.shrinking(place, self.depth_scale)

    def build_sum_read(self, place: Place, spec: ResidualSpec, *, post_norm: bool) -> BoundaryConnection:
        """Return the connection that reads N^in(X + N^Y(Y)), or the sum itself without `normalized_input`.

        N^Y is the last norm before the sublayer where neither the read nor the sublayer has an N^in.
        """
        doubled = self.normalized_input or place.normalises_input
        spec, factor = self.exact_double_norm(spec) if doubled else (spec, None)
        identity_is_last = not (self.normalized_input or place.normalises_input)
        return BoundaryConnection(
            self,
            place,
            spec,
            post_norm=spec.build_norm(place.kind) if post_norm else None,
            identity_norm=spec.build_input_norm(place) if identity_is_last else spec.build_norm(place.kind),
            input_norm=spec.build_input_norm(place) if self.normalized_input else None,
            input_scale=None if place.normalises_input else factor,
        )

    def build_closing(self, last: Place, spec: ResidualSpec, *, output_norm: bool) -> BoundaryClosing:
        """Return the closing N_out(N^X_f(X) + N^Y_f(Y))."""
        doubled = output_norm or not spec.final_norm
        spec, factor = self.exact_double_norm(spec) if doubled else (spec, None)
        return BoundaryClosing(
            self,
            last,
            spec,
            post_norm=spec.build_norm("final"),
            identity_norm=spec.build_norm("final"),
            output_norm=spec.build_final_norm() if output_norm else None,
            output_scale=factor if spec.final_norm else None,
        )

    def exact_double_norm(self, spec: ResidualSpec) -> tuple[ResidualSpec, float | None]:
        """Return the norms' specification and the outer one's factor for a norm of a norm: see `exact_eps`."""
        eps = spec.mean_square_eps
        if not self.exact_eps or eps is None:
            return spec, None
        inner = double_norm_eps(eps)
        return spec.with_norm_options(eps=inner), math.sqrt(1 + inner)


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
        scale   s = 1/sqrt(2(l+1))     (depth_scale=none: s = 1)
        exact_eps: N_out(N(x)) and N^in(N(x)) equal one N(x), eps included"""
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
        """Return the topology with X_0 = 0 (a gated opening, or the first post-norm where it is lazy) and exact eps."""
        gated = self.gated_opening or self.post_norm == "eager"
        return dataclasses.replace(self, gated_opening=gated, exact_eps=True)

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return two copies of the embedding, the first one gated if configured."""
        return Opening(spec, count=2, gate=Gate(spec) if self.gated_opening else None)

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the connection; without the eager form's post-norm where nothing was added yet."""
        return self.build_sum_read(place, spec, post_norm=place.previous is not None or self.post_norm == "lazy")

    def closing(self, last: Place, spec: ResidualSpec) -> BoundaryClosing:
        """Return the last norms and the sum."""
        return self.build_closing(last, spec, output_norm=self.readout == "code")


@dataclass(frozen=True, kw_only=True)
class SiameseHybridPre(Siamese):
    """SiameseNorm Hybrid-Pre, the paper's main form: HybridNorm and Pre-Norm share every sublayer.

    Attention reads gamma X + N^Y(Y) and normalises its own queries, keys and values; the MLP normalises X first and
    reads through N^in. Three final norms. `normalized_input=False` drops the MLP's N^in and keeps QKV-norm (what the
    paper's ablation row removed is not published).
    """

    title: ClassVar[str] = "SiameseNorm Hybrid-Pre"
    formula: ClassVar[str] = """\
        open    X = Y = e
        attention   read   h = gamma_l X + N^Y_k(Y)              (QKV-norm inside the attention)
        MLP         read   X <- N^X_l(X),  h = N^in_l(X + N^Y_k(Y))
        write   X <- X + s O,  Y <- Y + O
        close   N_out(N^X_f(X) + N^Y_f(Y))
        scale   s = 1/sqrt(2(l+1))     (depth_scale=none: s = 1)
        exact_eps: N_out(N(x)) and N^in(N(x)) equal one N(x), eps included"""
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

    def preserving(self) -> Topology:
        """Return the topology with exact eps."""
        return dataclasses.replace(self, exact_eps=True)

    @property
    def attention_norm(self) -> AttentionNorm:
        """QKV-norm stands in for the attention's input norm."""
        return "qkv-head"

    def connection(self, place: Place, spec: ResidualSpec) -> BoundaryConnection:
        """Return the attention's or the MLP's connection."""
        if place.kind == "attention":
            own = place.normalises_input
            inner = self.exact_double_norm(spec)[0] if own else spec
            identity_norm = inner.build_norm(place.kind) if own else spec.build_input_norm(place)
            return BoundaryConnection(self, place, spec, gate=Gate(spec), identity_norm=identity_norm)
        return self.build_sum_read(place, spec, post_norm=True)

    def closing(self, last: Place, spec: ResidualSpec) -> BoundaryClosing:
        """Return the three final norms."""
        return self.build_closing(last, spec, output_norm=True)
