"""Post-Norm and DeepNorm: the stream is normalised after each addition, and the sublayer sees it as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from siamesenorm.topologies.fused import single_stream_closing, single_stream_connection
from siamesenorm.topologies.topology import (
    BoundaryCost,
    Closing,
    Connection,
    Place,
    ResidualSpec,
    Topology,
)


@dataclass(frozen=True, kw_only=True)
class PostNorm(Topology):
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
    has_fused_kernels: ClassVar[bool] = True

    final_norm: bool = False

    @property
    def cost(self) -> BoundaryCost:
        """Reads X, O and writes U = X + O, X', H; the backward pass reads dX', dH, U and writes dU (= dO)."""
        return BoundaryCost(forward=5, backward=4, saved=1)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection that settles its predecessor's addition, if there is one."""
        return single_stream_connection(place, spec, skip=self.skip(place), post_norm=spec.build_post_norm(place))

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the norm of the last addition, and the final norm if asked for."""
        final = spec.build_final_norm() if self.final_norm else None
        post_norm = spec.build_norm("final")
        return single_stream_closing(spec, skip=self.skip(last), post_norm=post_norm, norm=final)

    def skip(self, place: Place) -> float | None:
        """Return the factor on the stream in a write; None is 1."""
        return None


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

    @property
    def cost(self) -> BoundaryCost:
        """As Post-Norm; the backward pass writes dX = alpha dU and dO = dU."""
        return BoundaryCost(forward=5, backward=5, saved=1)

    def skip(self, place: Place) -> float | None:
        """Return alpha = (2L)^(1/4)."""
        alpha: float = (2 * place.depth) ** 0.25
        return alpha

    def initial_factor(self, role: str, depth: int) -> float:
        """Return beta = (8L)^(-1/4) for the projections whose scale it tames."""
        tamed = ("value", "attention_output", "mlp_up", "mlp_output")
        return (8 * depth) ** -0.25 if self.initial_scaling and role in tamed else 1.0
