"""The boundary family: Pre-Norm, Post-Norm, ResiDual, SiameseNorm and others as one formula.

    write   O' = output(O);  X <- a X + s O',  Y <- Y + c O'
    read    X <- post_norm(X),  h = r input_norm(gate X + identity_norm(Y))
    close   r output_norm(b post_norm(X) + identity_norm(Y))

A part that a topology does not set is the identity; without an identity norm Y is not read. The factors are 0-d
buffers. With fused kernels a write stays pending: the state is (X, Y, O'), and the next read completes it in one
operator, also across a block's edge. Parameters are the same with all kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.kernels.launch import refuse_transformations, suits_operator
from siamesenorm.kernels.operators import boundary, has_boundary_kernels, start_recomputation
from siamesenorm.norms import DeclaredModule, Inexact, LayerNorm, Norm, NormFunction, RMSNorm
from siamesenorm.topologies.start_as_pre_norm import copy_function, eps_behind, zero_gain
from siamesenorm.topologies.topology import BoundaryCost, Closing, Connection, Place, ResidualSpec, Streams, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFactors:
    """The constants of a write X <- a X + s O, Y <- Y + c O: `skip` a, `scale` s, `identity_scale` c; None is 1."""

    skip: float | None = None
    scale: float | None = None
    identity_scale: float | None = None

    @classmethod
    def shrinking(cls, place: Place, reading: str) -> WriteFactors:
        """Return a scale that shrinks with depth, in one of its readings: see `Siamese`."""
        divisor = {"code": 2 * (place.block + 1), "paper_block": place.block + 1, "paper_sublayer": place.index + 1}
        return cls(scale=1 / math.sqrt(divisor.get(reading, 1)))


@dataclass(frozen=True, kw_only=True)
class BoundaryTopology(Topology):
    """A topology of the boundary family: norms and factors of the module's formula."""

    has_fused_kernels: ClassVar[bool] = True

    def write_factors(self, place: Place) -> WriteFactors:
        """Return the constants of the write at a place."""
        return WriteFactors()

    def leaves_writes_pending(self, spec: ResidualSpec) -> bool:
        """Return whether a write is completed by the next read; raises UserError for kernels that do not exist."""
        exists = {"fused": self.has_fused_kernels, "lean": self.has_lean_kernels}
        if not exists.get(spec.kernels, True):
            raise UserError(f"{self.title} has no {spec.kernels} kernels: use kernels plain or auto")
        return spec.kernels != "plain" and self.has_fused_kernels

    def refuse_conditioned(self, place: Place) -> None:
        """Raise UserError if the sublayer is conditioned; for topologies with a `modulation_refusal`."""
        if place.conditioned:
            raise UserError(
                f"{self.title} takes no conditioned sublayer: {self.modulation_refusal}; use pre or siamese"
            )

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the final norm."""
        return BoundaryClosing(self, last, spec, output_norm=spec.build_final_norm())

    def boundary_cost(self, place: Place) -> BoundaryCost:
        """Return the cost of the boundary before `place` with the fused kernels, or without where there are none.

        The norm after the addition keeps X (fused: instead of its result), that of the output keeps O.
        """
        assert place.previous is not None
        spec = ResidualSpec(dim=1, kernels="fused" if self.has_fused_kernels else "plain")
        with torch.device("meta"):
            before, after = self.connection(place.previous, spec), self.connection(place, spec)
        assert isinstance(before, BoundaryConnection) and isinstance(after, BoundaryConnection)
        parts = (after.post_norm, after.gate, after.last_norm, before.output)
        post, gate, last, output = (not isinstance(part, nn.Identity) for part in parts)
        identity, fused, streams = (
            after.identity_norm is not None,
            after.fused_norms is not None,
            len(self.stream_names),
        )
        kept = output + identity + (1 if fused else post + gate + last)
        leaving = streams + (fused or gate or last)  # else the sublayer's input is X itself
        shared = streams == 1 and not output and self.write_factors(place.previous) == WriteFactors()
        return BoundaryCost(
            forward=streams + 1 + leaving + post,
            backward=streams + 1 + kept + identity + (1 if shared else 2),
            saved=kept,
        )


class ScalarGate(DeclaredModule):
    """One learned number, alpha x, without weight decay; its shape is [1], because FSDP shards no 0-d parameters."""

    gain: Tensor

    def __init__(self, *, initial: float) -> None:
        super().__init__()
        self.declare("gain", (1,), initial=initial)

    def forward(self, x: Tensor) -> Tensor:
        """Return alpha x."""
        return x * self.gain.to(x.dtype)


class Addition(DeclaredModule):
    """The write X <- a X + s O, Y <- Y + c O, in the dtype of the streams."""

    skip: Tensor | None
    scale: Tensor | None
    identity_scale: Tensor | None

    def __init__(self, factors: WriteFactors) -> None:
        super().__init__()
        self.constant("skip", factors.skip)
        self.constant("scale", factors.scale)
        self.constant("identity_scale", factors.identity_scale)

    def forward(self, streams: Streams, output: Tensor) -> Streams:
        """Return the streams after the write."""
        bounded, *identity = streams
        output = output.to(bounded.dtype)
        updated = times(bounded, self.skip) + times(output, self.scale)
        return (updated, *(stream + times(output, self.identity_scale) for stream in identity))


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return factor x; None is 1."""
    return x if factor is None else x * factor


@dataclass(frozen=True, slots=True)
class FusedNorms:
    """The properties that all norms of a fused read have in common: eps, and whether they subtract the mean."""

    eps: float
    centred: bool

    @classmethod
    def of(cls, norms: Iterable[nn.Module]) -> FusedNorms:
        """Return the properties of norms; raises UserError for norms that the operator does not support."""
        found = set()
        for norm in norms:
            if not isinstance(norm, (RMSNorm, LayerNorm)) or not norm.fusible:  # or a formula of a subclass
                raise _unsupported(norm)
            if norm.axis != -1 or getattr(norm, "offset", 0) != 0:
                raise _unsupported(norm)
            found.add(cls(norm.eps, isinstance(norm, LayerNorm)))
        if len(found) != 1:
            kinds = ", ".join(sorted(f"{'LayerNorm' if n.centred else 'RMSNorm'} with eps {n.eps:g}" for n in found))
            raise UserError(f"the fused boundary needs norms of one kind and one eps, not {kinds}: use plain kernels")
        return found.pop()


def _unsupported(norm: nn.Module) -> UserError:
    return UserError(f"the fused boundary supports RMSNorm and LayerNorm, channels last, not {norm}: use plain kernels")


class BoundaryConnection(Connection):
    """A read and a write of the boundary family around one sublayer; see the module's formulas.

    `previous` is the addition that is pending when the connection reads, None if there is none. The input norm is the
    attribute `norm` for one stream, `input_norm` for two.

    With `kernels="fused"` and "lean" the operator completes a pending write, and norms that it does not support are
    refused; with "auto" it does so for supported norms, on devices with kernels, for large streams. Elsewhere, and for
    a read without norms, the plain formulas do.
    """

    has_kernels = True
    input_scale: Tensor | None
    unit_gain: Tensor

    def __init__(
        self,
        topology: BoundaryTopology,
        place: Place,
        spec: ResidualSpec,
        *,
        post_norm: nn.Module | None = None,
        gate: nn.Module | None = None,
        identity_norm: nn.Module | None = None,
        input_norm: nn.Module | None = None,
        input_scale: float | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__(spec)
        self.pends = topology.leaves_writes_pending(spec)
        self.lean = spec.kernels == "lean"
        self.everywhere = spec.kernels in ("fused", "lean")
        self.post_norm = post_norm or nn.Identity()
        self.gate = gate or nn.Identity()
        self.identity_norm = identity_norm
        self._input_norm = "norm" if len(topology.stream_names) == 1 else "input_norm"
        self.add_module(self._input_norm, input_norm or nn.Identity())
        self.output = output or nn.Identity()
        self.constant("input_scale", input_scale)
        self.addition = Addition(topology.write_factors(place))
        self.previous: Addition | None = None
        if self.pends and place.previous is not None:
            self.previous = Addition(topology.write_factors(place.previous))
        self.constant("unit_gain", None if self.previous is None else 1.0)
        self.fused_norms = self._find_fused_norms() if self.previous is not None else None

    @property
    def last_norm(self) -> nn.Module:
        """The norm of the sum before the sublayer, the identity if there is none."""
        return self.get_submodule(self._input_norm)

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Complete the pending write, if there is one, and return h and the streams."""
        if self.previous is None:
            return self._read(streams)
        *completed, output = streams
        norms = self._operator_norms(streams[0])
        if norms is not None:
            return self._fused_read(completed, output, norms)
        return self._read(self.previous(tuple(completed), output))

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return the streams after the addition, or the streams and the output where it stays pending."""
        if not isinstance(self.output, nn.Identity):
            output = self.output(output.to(streams[0].dtype))
        return (*streams, output) if self.pends else self.addition(streams, output)

    def _read(self, streams: Streams) -> tuple[Tensor, Streams]:
        bounded, *identity = streams
        bounded = self.post_norm(bounded)
        h = self.gate(bounded)
        if self.identity_norm is not None:
            h = h + self.identity_norm(identity[0])
        return self.to_compute(times(self.last_norm(h), self.input_scale)), (bounded, *identity)

    def _fused_read(self, streams: list[Tensor], output: Tensor, norms: FusedNorms) -> tuple[Tensor, Streams]:
        assert self.previous is not None
        bounded, identity, handle = (*streams, None, None)[:3]
        gain, bias = self._gain_of(self.last_norm), getattr(self.last_norm, "bias", None)
        if self.input_scale is not None and gain is not None:
            gain, bias = gain * self.input_scale, None if bias is None else bias * self.input_scale
        bounded, next_identity, h, _, _, handle = boundary(
            bounded, output, identity, self.previous.skip, self.previous.scale, self.previous.identity_scale,
            self._gain_of(self.post_norm), self._gain_of(self.gate), self._gain_of(self.identity_norm), gain,
            getattr(self.post_norm, "bias", None), getattr(self.identity_norm, "bias", None), bias,
            norms.eps, norms.centred, self.addition.scale if self.lean else None, handle,
        )  # fmt: skip
        written = (bounded,) if identity is None else (bounded, next_identity)
        return self.to_compute(h), (*written, handle) if self.lean else written

    def _gain_of(self, part: nn.Module | None) -> Tensor | None:
        """Return the gain of a gate or norm, 1 for a norm without gain; None for an absent part."""
        gain: Tensor | None = getattr(part, "gain", None)
        return self.unit_gain.expand(part.dim) if gain is None and isinstance(part, Norm) else gain

    def _find_fused_norms(self) -> FusedNorms | None:
        """Return the properties of the norms, None where the operator does not apply; raises UserError if it must."""
        norms = [norm for norm in (self.post_norm, self.identity_norm, self.last_norm) if isinstance(norm, Norm)]
        try:
            return FusedNorms.of(norms) if norms else None
        except UserError:
            if self.everywhere:
                raise
            return None

    def _operator_norms(self, x: Tensor) -> FusedNorms | None:
        """Return the properties of the norms if the operator reads streams like x, else None."""
        if self.everywhere:
            refuse_transformations("boundary")
            return self.fused_norms
        return self.fused_norms if has_boundary_kernels(x) and suits_operator(x) else None

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Set X's contribution to 0, and copy the gain of `norm` to the last norm before the sublayer."""
        zero_gain(self.post_norm)
        zero_gain(self.gate)
        return copy_function(norm, self.identity_norm, self.last_norm, self.constant_value("input_scale"))

    def eps_behind(self, norm: NormFunction) -> tuple[float, float] | None:
        """Return the eps and the factor of a norm of the identity stream's norm."""
        return eps_behind(norm, self.identity_norm)


class BoundaryClosing(Closing):
    """The closing of the boundary family, r output_norm(b post_norm(X) + identity_norm(Y)).

    The norm of a second stream has the stream's name (`identity_norm`, `dual_norm`), the output norm of a single stream
    is its `norm`. A pending write is completed first.
    """

    has_kernels = True
    bounded_scale: Tensor | None
    output_scale: Tensor | None

    def __init__(
        self,
        topology: BoundaryTopology,
        last: Place,
        spec: ResidualSpec,
        *,
        post_norm: nn.Module | None = None,
        identity_norm: nn.Module | None = None,
        output_norm: nn.Module | None = None,
        bounded_scale: float | None = None,
        output_scale: float | None = None,
    ) -> None:
        super().__init__(spec)
        pends = topology.leaves_writes_pending(spec)
        names = topology.stream_names
        self.previous = Addition(topology.write_factors(last)) if pends else None
        self.lean = spec.kernels == "lean"
        self.post_norm = post_norm or nn.Identity()
        self._second_norm = f"{names[-1]}_norm" if identity_norm is not None else None
        if self._second_norm:
            self.add_module(self._second_norm, identity_norm)
        self._output_norm = "norm" if len(names) == 1 else "output_norm"
        self.add_module(self._output_norm, output_norm or nn.Identity())
        self.constant("bounded_scale", bounded_scale)
        self.constant("output_scale", output_scale)

    @property
    def second_norm(self) -> nn.Module | None:
        """The norm of the second stream, None if there is none."""
        return self.get_submodule(self._second_norm) if self._second_norm else None

    @property
    def last_norm(self) -> nn.Module:
        """The norm of the sum, the identity if there is none."""
        return self.get_submodule(self._output_norm)

    def select(self, streams: Streams, tokens: slice) -> Tensor:
        """Return what `forward` does for some tokens; a stream that is recomputed backwards needs all of them."""
        if self.lean and torch.is_grad_enabled():
            return self(streams)[:, tokens]  # type: ignore[no-any-return]
        return super().select(streams, tokens)

    def forward(self, streams: Streams) -> Tensor:
        """Return the norm of the streams' sum."""
        if self.previous is None:
            return self._close(streams)
        bounded, *others, output = streams
        identity, handle = others[:1], others[1:]
        hidden = self._close(self.previous((bounded, *identity), output))
        if not handle:
            return hidden
        assert self.previous.scale is not None
        return start_recomputation(hidden, handle[0], bounded, identity[0], self.previous.scale)

    def _close(self, streams: Streams) -> Tensor:
        bounded, *identity = streams
        total = times(self.post_norm(bounded), self.bounded_scale)
        if self.second_norm is not None:
            total = total + self.second_norm(identity[0])
        return self.to_compute(times(self.last_norm(total), self.output_scale))

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Set X's contribution to 0, and copy the gain of `norm` to the last norm."""
        zero_gain(self.post_norm)
        return copy_function(norm, self.second_norm, self.last_norm, self.constant_value("output_scale"))

    def eps_behind(self, norm: NormFunction) -> tuple[float, float] | None:
        """Return the eps and the factor of a norm of the second stream's norm."""
        return eps_behind(norm, self.second_norm)
