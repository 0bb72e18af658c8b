"""The modules of SiameseNorm: two streams, the bounded X and the identity Y, around every sublayer.

The plain ones are the readable reference. The fused ones leave a write pending, as the state (X, Y, O), and do
addition, post_norm and read in one operator, also across a block's edge. Parameters are the same, so
that a state dict fits both.
"""

from __future__ import annotations

from torch import Tensor, nn

from siamesenorm.kernels.boundary import boundary
from siamesenorm.kernels.lean_boundary import hand_out_rest, lean_boundary
from siamesenorm.norms import Inexact, Norm, NormFunction
from siamesenorm.topologies.factors import Gate
from siamesenorm.topologies.fused import FusedConnection, bias_of, gain_of
from siamesenorm.topologies.topology import Closing, Connection, Opening, ResidualSpec, Streams
from siamesenorm.topologies.upcycling import copy_gain, zero_gain


class SiameseConnection(Connection):
    """Around one sublayer: X <- post_norm(X), h = input_norm(gate X + identity_norm(Y)); X <- X + s O, Y <- Y + O.

    What is absent is the identity. The gate, a vector gamma of initial value 1, is that of Hybrid-Pre's attention.
    """

    scale: Tensor

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        scale: float,
        identity_norm: nn.Module,
        post_norm: nn.Module | None = None,
        input_norm: nn.Module | None = None,
        gate: nn.Module | None = None,
    ) -> None:
        super().__init__(spec)
        self.post_norm = post_norm or nn.Identity()
        self.gate = gate or nn.Identity()
        self.identity_norm = identity_norm
        self.input_norm = input_norm or nn.Identity()
        self.constant("scale", scale)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Settle the bounded stream and return the norm of the two streams' sum."""
        bounded, identity = streams
        bounded = self.post_norm(bounded)
        h = self.input_norm(self.gate(bounded) + self.identity_norm(identity))
        return self.to_compute(h), (bounded, identity)

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Add the scaled output to the bounded stream and the full one to the identity stream."""
        return add_to_both(streams, output, self.scale)

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Silence the bounded stream and give the last norm before the sublayer the gain of `norm`."""
        zero_gain(self.post_norm)
        zero_gain(self.gate)
        if norm is None or isinstance(self.input_norm, Norm):
            return copy_gain(norm, self.input_norm, inner=self.identity_norm)
        return copy_gain(norm, self.identity_norm)


def add_to_both(streams: Streams, output: Tensor, scale: Tensor) -> Streams:
    """Return X + s O, Y + O."""
    bounded, identity = streams
    output = output.to(identity.dtype)
    return bounded + output * scale, identity + output


class SiameseClosing(Closing):
    """N_out( post_norm(X) + identity_norm(Y) ); what is absent is the identity."""

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        post_norm: nn.Module,
        identity_norm: nn.Module,
        output_norm: nn.Module | None,
    ) -> None:
        super().__init__(spec)
        self.post_norm = post_norm
        self.identity_norm = identity_norm
        self.output_norm = output_norm or nn.Identity()

    def forward(self, streams: Streams) -> Tensor:
        """Fuse the two streams."""
        bounded, identity = streams
        return self.to_compute(self.output_norm(self.post_norm(bounded) + self.identity_norm(identity)))

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Silence the bounded stream and give the last norm the gain of `norm`."""
        zero_gain(self.post_norm)
        if norm is None or isinstance(self.output_norm, Norm):
            return copy_gain(norm, self.output_norm, inner=self.identity_norm)
        return copy_gain(norm, self.identity_norm)


class GatedOpening(Opening):
    """X_0 = gamma e, Y_0 = e: with gamma = 0 the paper's claim that zero N^X gives Pre-Norm becomes true."""

    def __init__(self, spec: ResidualSpec) -> None:
        super().__init__(spec, count=2)
        self.gate = Gate(spec)

    def forward(self, embedding: Tensor) -> Streams:
        """Return the gated and the plain embedding."""
        identity = self.to_residual(embedding)
        return self.gate(identity), identity

    def init_as_pre_norm(self) -> None:
        """Start the bounded stream at zero."""
        self.gate.zero_()


class PendingSiameseConnection(SiameseConnection):
    """The first connection of a fused model: a plain read, a pending write."""

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Leave the addition to the next read."""
        return (*streams, output)


class FusedSiameseConnection(PendingSiameseConnection, FusedConnection):
    """Addition, post_norm and read in one operator; `arrival` is the depth scale of the pending write."""

    arrival: Tensor

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        arrival: float,
        scale: float,
        identity_norm: nn.Module,
        post_norm: nn.Module | None = None,
        input_norm: nn.Module | None = None,
        gate: nn.Module | None = None,
    ) -> None:
        super().__init__(
            spec, scale=scale, identity_norm=identity_norm, post_norm=post_norm, input_norm=input_norm, gate=gate
        )
        self.constant("arrival", arrival)
        self.decide_on_operator(spec, identity_norm, post_norm, input_norm)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Complete the pending write and read."""
        bounded, identity, output = streams
        norms = self.operator_for(bounded)
        if norms is None:
            return super().read(add_to_both((bounded, identity), output, self.arrival))
        bounded, identity, h, _, _ = boundary(
            bounded, output, identity, None, self.arrival, None,
            gain_of(self.post_norm), gain_of(self.gate), gain_of(self.identity_norm), gain_of(self.input_norm),
            bias_of(self.post_norm), bias_of(self.identity_norm), bias_of(self.input_norm), norms.eps, norms.centred,
        )  # fmt: skip
        return self.to_compute(h), (bounded, identity)


class LeanSiameseConnection(FusedSiameseConnection):
    """A fused connection that keeps one stream for the backward pass: the state is (X, Y, carrier, O)."""

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Complete the pending write and read; the first connection's state has no carrier yet."""
        bounded, identity, *carriers, output = streams
        norms = self.operator_for(bounded)
        assert norms is not None
        bounded, identity, h, _, _, carrier = lean_boundary(
            bounded, output, identity, carriers[0] if carriers else None, self.arrival, self.scale,
            gain_of(self.post_norm), gain_of(self.gate), self.identity_norm.gain, gain_of(self.input_norm),
            bias_of(self.post_norm), bias_of(self.identity_norm), bias_of(self.input_norm),
            norms.eps, norms.centred,
        )  # fmt: skip
        return self.to_compute(h), (bounded, identity, carrier)


class PendingSiameseClosing(SiameseClosing):
    """A closing that completes the last pending write."""

    arrival: Tensor

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        arrival: float,
        post_norm: nn.Module,
        identity_norm: nn.Module,
        output_norm: nn.Module | None,
    ) -> None:
        super().__init__(spec, post_norm=post_norm, identity_norm=identity_norm, output_norm=output_norm)
        self.constant("arrival", arrival)

    def forward(self, streams: Streams) -> Tensor:
        """Add the pending output, then fuse the two streams."""
        bounded, identity, output = streams
        return super().forward(add_to_both((bounded, identity), output, self.arrival))


class LeanSiameseClosing(PendingSiameseClosing):
    """A closing from which the connections before it begin to rebuild their streams in the backward pass."""

    def forward(self, streams: Streams) -> Tensor:
        """Close as usual, and keep what the last boundary needs."""
        bounded, identity, *carriers, output = streams
        hidden = super().forward((bounded, identity, output))
        return hand_out_rest(hidden, carriers[0], bounded, identity, self.arrival) if carriers else hidden
