"""ResiDual: a Post-Norm (or HybridNorm) stream, and a dual stream that only sums the outputs for the closing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.norms import norm_options
from siamesenorm.topologies.boundary_family import BoundaryClosing, BoundaryConnection, BoundaryTopology, WriteFactors
from siamesenorm.topologies.post_norm_family import hybrid_post_norm
from siamesenorm.topologies.topology import AttentionNorm, Closing, Connection, Opening, Place, ResidualSpec


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
        """Refuse a dual stream that is always zero, and a negative eps."""
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

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection of the body: it reads the bounded stream alone."""
        post_norm = spec.build_post_norm(place) if self.body == "post" else hybrid_post_norm(place, spec)
        return BoundaryConnection(self, place, spec, post_norm=post_norm)

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
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
