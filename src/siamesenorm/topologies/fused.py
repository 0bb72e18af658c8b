"""Connections that leave a write pending and complete it together with the next read, in one fused operator.

A pending state is the streams and the output that is not yet added to them, (x, O) or (X, D, O), also across a block's
edge. The plain connections are the readable reference; parameters are the same, so a state dict fits both. Those of
SiameseNorm stand beside its plain ones, in `siamese_connection`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.kernels.boundary import boundary, has_kernels_for
from siamesenorm.kernels.launch import refuse_transformations, suits_operator
from siamesenorm.norms.layer_norm import LayerNorm
from siamesenorm.norms.rms_norm import RMSNorm
from siamesenorm.topologies.single_stream import SingleStreamClosing, SingleStreamConnection, WeightedSkipConnection
from siamesenorm.topologies.topology import Closing, Connection, Place, ResidualSpec, Streams


@dataclass(frozen=True, slots=True)
class FusedNorms:
    """What the operator needs to know of all norms of a read: their eps, and whether they subtract the mean."""

    eps: float
    centred: bool

    @classmethod
    def of(cls, norms: Iterable[nn.Module]) -> FusedNorms:
        """Return it for norms that the operator can stand in for; raises UserError for others."""
        found = set()
        for norm in norms:
            if not (
                isinstance(norm, (RMSNorm, LayerNorm))
                and norm.affine
                and norm.axis == -1
                and getattr(norm, "offset", 0) == 0
            ):
                raise UserError(
                    f"the fused boundary knows RMSNorm and LayerNorm with gain (channels last), not {norm}: use "
                    "plain kernels"
                )
            found.add(cls(norm.eps, isinstance(norm, LayerNorm)))
        if len(found) != 1:
            eps = sorted(each.eps for each in found)
            raise UserError(f"the fused boundary needs norms of one kind and one eps, not {eps}: use plain kernels")
        return found.pop()


class FusedConnection(Connection):
    """A connection whose read completes a pending write, in one operator where that may be.

    With `kernels="fused"` and "lean" the operator does it everywhere, and norms that it does not know are refused; with
    "auto" it does it on devices for which there are kernels, if it knows the norms, for streams that are large enough
    for it to pay, and the plain formulas do it elsewhere.
    """

    fused_norms: FusedNorms | None

    def decide_on_operator(self, spec: ResidualSpec, *norms: nn.Module | None) -> None:
        """Decide, given the norms of the read, whether the operator can do it; raises UserError if it must and cannot.

        A read without norms has nothing to fuse.
        """
        present = [norm for norm in norms if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity)]
        self.everywhere = spec.kernels in ("fused", "lean")
        try:
            self.fused_norms = FusedNorms.of(present) if present else None
        except UserError:
            if self.everywhere:
                raise
            self.fused_norms = None

    def operator_for(self, x: Tensor) -> FusedNorms | None:
        """Return what the operator needs to know, or None if the plain formulas read streams like x.

        Raises UserError under transformations that do not see through the operator, if the operator must do it.
        """
        if self.everywhere:
            refuse_transformations("boundary")
            return self.fused_norms
        return self.fused_norms if has_kernels_for(x) and suits_operator(x) else None


def gain_of(part: nn.Module) -> Tensor | None:
    """Return the gain of a norm or gate; None for the identity."""
    return getattr(part, "gain", None)


def bias_of(part: nn.Module) -> Tensor | None:
    """Return the bias of a norm; None if there is none."""
    return getattr(part, "bias", None)


# --- one stream


class PendingSingleStreamConnection(SingleStreamConnection):
    """The first connection of a fused model: a plain read, a pending write."""

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Leave the addition to the next read; what acts on the output alone is done here."""
        (x,) = streams
        return x, output if isinstance(self.output, nn.Identity) else self.output(output.to(x.dtype))


class FusedSingleStreamConnection(PendingSingleStreamConnection, FusedConnection):
    """Addition, post_norm and read in one operator; `arrival` is the factor on the stream in the pending write."""

    arrival: Tensor | None

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        arrival: float | None = None,
        post_norm: nn.Module | None = None,
        norm: nn.Module | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__(spec, post_norm=post_norm, norm=norm, output=output)
        if arrival is None:
            self.arrival = None
        else:
            self.constant("arrival", arrival)
        self.decide_on_operator(spec, post_norm, norm)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Complete the pending write and read."""
        x, output = streams
        norms = self.operator_for(x)
        if norms is None:
            return super().read(complete(x, output, self.arrival))
        x, _, h, _, _ = boundary(
            x, output, None, self.arrival, None, None,
            gain_of(self.post_norm), None, None, gain_of(self.norm),
            bias_of(self.post_norm), None, bias_of(self.norm),
            norms.eps, norms.centred,
        )  # fmt: skip
        return self.to_compute(h), (x,)


class PendingSingleStreamClosing(SingleStreamClosing):
    """A closing that completes the last pending write."""

    arrival: Tensor | None

    def __init__(
        self,
        spec: ResidualSpec,
        *,
        arrival: float | None = None,
        post_norm: nn.Module | None = None,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__(spec, post_norm=post_norm, norm=norm)
        if arrival is None:
            self.arrival = None
        else:
            self.constant("arrival", arrival)

    def forward(self, streams: Streams) -> Tensor:
        """Add the pending output, then post_norm and normalise."""
        x, output = streams
        return super().forward(complete(x, output, self.arrival))


def complete(x: Tensor, output: Tensor, skip: Tensor | None) -> Streams:
    """Return the stream after the addition that was pending: skip x + O."""
    return (x + output.to(x.dtype),) if skip is None else (x * skip + output.to(x.dtype),)


def single_stream_connection(
    place: Place,
    spec: ResidualSpec,
    *,
    skip: float | None = None,
    post_norm: nn.Module | None = None,
    norm: nn.Module | None = None,
    output: nn.Module | None = None,
) -> Connection:
    """Return the plain connection of these parts, or the one whose read completes the previous pending write.

    `skip` is the factor on the stream in every write of the topology; None is 1.
    """
    parts = {"post_norm": post_norm, "norm": norm, "output": output}
    if spec.kernels != "plain" and place.previous is None:
        return PendingSingleStreamConnection(spec, **parts)
    if spec.kernels != "plain":
        return FusedSingleStreamConnection(spec, arrival=skip, **parts)
    if skip is not None:
        return WeightedSkipConnection(spec, skip=skip, **parts)
    return SingleStreamConnection(spec, **parts)


def single_stream_closing(
    spec: ResidualSpec,
    *,
    skip: float | None = None,
    post_norm: nn.Module | None = None,
    norm: nn.Module | None = None,
) -> Closing:
    """Return the plain closing, or the one that completes the last pending write."""
    if spec.kernels == "plain":
        return SingleStreamClosing(spec, post_norm=post_norm, norm=norm)
    return PendingSingleStreamClosing(spec, arrival=skip, post_norm=post_norm, norm=norm)
