"""ResiDual: a Post-Norm (or HybridNorm) stream, and a dual stream that only sums the outputs for the closing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.kernels.boundary import boundary
from siamesenorm.norms import Role, norm_options
from siamesenorm.topologies.fused import FusedConnection, bias_of, gain_of
from siamesenorm.topologies.hybridnorm import hybrid_post_norm
from siamesenorm.topologies.topology import (
    AttentionNorm,
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
class ResiDual(Topology):
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

    has_fused_kernels: ClassVar[bool] = True

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

    @property
    def cost(self) -> BoundaryCost:
        """Reads X, D, O and writes U, D', X', H; the backward pass reads four and writes two."""
        return BoundaryCost(7, 6, 1) if self.body == "post" else BoundaryCost(7, 7, 1)

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the embedding, and the embedding times c."""
        return DualOpening(spec, self.dual_scale)

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection that settles the body's last addition."""
        post_norm = spec.build_post_norm(place) if self.body == "post" else hybrid_post_norm(place, spec)
        if spec.kernels == "plain":
            return DualConnection(spec, post_norm=post_norm, dual_scale=self.dual_scale)
        if place.previous is None:
            return PendingDualConnection(spec, post_norm=post_norm, dual_scale=self.dual_scale)
        return FusedDualConnection(spec, post_norm=post_norm, dual_scale=self.dual_scale)

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the sum of the settled bounded stream and the dual stream's norm."""
        parts = {"post_norm": spec.build_norm("final"), "dual_norm": self.build_dual_norm(spec)}
        if spec.kernels == "plain":
            return DualClosing(spec, **parts, bounded_scale=self.bounded_scale)
        return PendingDualClosing(spec, **parts, bounded_scale=self.bounded_scale, dual_scale=self.dual_scale)

    def build_dual_norm(self, spec: ResidualSpec) -> nn.Module:
        """Return N_f; raises UserError if `dual_eps` is set and the norm has no eps."""
        if self.dual_eps == "auto":
            return spec.build_norm("final")
        if "eps" not in norm_options(spec.norm.name):
            raise UserError(
                f"dual_eps of {self.title} is {self.dual_eps}, but norm {spec.norm.name} has no eps: leave "
                "dual_eps at auto, or choose a norm with an eps, such as rmsnorm"
            )
        norm = spec.norm.with_options(eps=self.dual_eps)
        return norm.build(spec.dim, role=Role("final", spec.domain), axis=spec.axis)


class DualOpening(Opening):
    """X = e, D = c e."""

    dual_scale: Tensor

    def __init__(self, spec: ResidualSpec, dual_scale: float) -> None:
        super().__init__(spec)
        self.constant("dual_scale", dual_scale)

    def forward(self, embedding: Tensor) -> Streams:
        """Return the bounded and the dual stream."""
        bounded = self.to_residual(embedding)
        return bounded, bounded * self.dual_scale


class DualConnection(Connection):
    """Around one sublayer: X <- post_norm(X), h = X; X <- X + O, D <- D + c O."""

    dual_scale: Tensor

    def __init__(self, spec: ResidualSpec, *, post_norm: nn.Module | None, dual_scale: float) -> None:
        super().__init__(spec)
        self.post_norm = post_norm or nn.Identity()
        self.constant("dual_scale", dual_scale)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return the settled bounded stream."""
        bounded, dual = streams
        bounded = self.post_norm(bounded)
        return self.to_compute(bounded), (bounded, dual)

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Add the output to the bounded stream, and c times the output to the dual one."""
        return add_to_both(streams, output, self.dual_scale)


def add_to_both(streams: Streams, output: Tensor, dual_scale: Tensor) -> Streams:
    """Return X + O, D + c O."""
    bounded, dual = streams
    output = output.to(dual.dtype)
    return bounded + output, dual + output * dual_scale


class PendingDualConnection(DualConnection):
    """The first connection of a fused model: a plain read, a pending write."""

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Leave the additions to the next read."""
        return (*streams, output)


class FusedDualConnection(PendingDualConnection, FusedConnection):
    """Both additions and the post_norm in one operator."""

    def __init__(self, spec: ResidualSpec, *, post_norm: nn.Module | None, dual_scale: float) -> None:
        super().__init__(spec, post_norm=post_norm, dual_scale=dual_scale)
        self.decide_on_operator(spec, post_norm)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Complete the pending write and return the settled bounded stream."""
        bounded, dual, output = streams
        norms = self.operator_for(bounded)
        if norms is None:
            return super().read(add_to_both((bounded, dual), output, self.dual_scale))
        bounded, dual, h, _, _ = boundary(
            bounded, output, dual, None, None, self.dual_scale,
            gain_of(self.post_norm), None, None, None, bias_of(self.post_norm), None, None, norms.eps, norms.centred,
        )  # fmt: skip
        return self.to_compute(h), (bounded, dual)


class DualClosing(Closing):
    """Fuse the streams: a post_norm(X) + N_f(D)."""

    bounded_scale: Tensor

    def __init__(self, spec: ResidualSpec, *, post_norm: nn.Module, dual_norm: nn.Module, bounded_scale: float) -> None:
        super().__init__(spec)
        self.post_norm = post_norm
        self.dual_norm = dual_norm
        self.constant("bounded_scale", bounded_scale)

    def forward(self, streams: Streams) -> Tensor:
        """Return a post_norm(X) + N_f(D)."""
        bounded, dual = streams
        return self.to_compute(self.post_norm(bounded) * self.bounded_scale + self.dual_norm(dual))


class PendingDualClosing(DualClosing):
    """A closing that completes the last pending write."""

    dual_scale: Tensor

    def __init__(
        self, spec: ResidualSpec, *, post_norm: nn.Module, dual_norm: nn.Module, bounded_scale: float, dual_scale: float
    ) -> None:
        super().__init__(spec, post_norm=post_norm, dual_norm=dual_norm, bounded_scale=bounded_scale)
        self.constant("dual_scale", dual_scale)

    def forward(self, streams: Streams) -> Tensor:
        """Add the pending output, then fuse the two streams."""
        bounded, dual, output = streams
        return super().forward(add_to_both((bounded, dual), output, self.dual_scale))
