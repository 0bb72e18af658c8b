"""The contract of a residual topology.

A topology is not a block class. It opens the streams, puts a connection around each sublayer, and closes the streams:

    streams = opening(embedding)
    for connection, sublayer in ...:
        h, streams = connection.read(streams)             # what the sublayer sees
        streams = connection.write(streams, sublayer(h))  # what its output does
    hidden = closing(streams)                             # owns every final norm

A norm that follows an addition belongs to the next reader, as its `post_norm`, or to the closing: parameters never
cross a block's edge, and a write may stay pending until the next read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args, get_type_hints

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError, unknown
from siamesenorm.norms import Declared, Inexact, NormFunction, NormSpec, Role
from siamesenorm.options import check_option

Streams = tuple[Tensor, ...]
AttentionNorm = Literal["auto", "none", "qk", "qk-head", "qkv-head"]
Kernels = Literal["plain", "fused", "lean", "auto"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a sublayer stands: its `index` k, its `block` l and its `slot` therein, of `depth` L blocks."""

    index: int
    block: int
    slot: int
    kind: Literal["attention", "mlp"]
    depth: int
    previous: Place | None = field(default=None, repr=False)
    conditioned: bool = False
    """Whether the sublayer is `Modulated`: the read's last norm is then built without gain."""
    normalises_input: bool = False
    """Whether the sublayer holds its own input norm (parallel attention and MLP): the read's last one is left out."""


def transformer_places(depth: int, *, conditioned: bool = False) -> list[tuple[Place, Place]]:
    """Return the (attention, mlp) places of `depth` blocks."""
    blocks: list[tuple[Place, Place]] = []
    previous: Place | None = None
    for block in range(depth):
        attention = Place(
            index=2 * block, block=block, slot=0, kind="attention", depth=depth, previous=previous,
            conditioned=conditioned,
        )  # fmt: skip
        previous = mlp = Place(
            index=2 * block + 1, block=block, slot=1, kind="mlp", depth=depth, previous=attention,
            conditioned=conditioned,
        )  # fmt: skip
        blocks.append((attention, mlp))
    return blocks


@dataclass(frozen=True, kw_only=True)
class ResidualSpec:
    """What a topology's modules are built from.

    `residual_dtype` is the dtype of the streams, `compute_dtype` that of what sublayers see; None keeps it as it is.
    `final_norm=False` leaves the last norm of the closing to the model (a DiT head has a conditioned one of its own).
    `kernels="fused"` leaves writes pending and completes them in one operator with the next read; "auto" does so where
    that is faster (a GPU with Triton, norms that the operator knows) and takes the plain formulas elsewhere. "lean" is
    "fused" that keeps one fp32 stream of two for the backward pass, and rebuilds the other.
    """

    dim: int
    norm: NormSpec = NormSpec()
    domain: Literal["language", "vision"] = "language"
    axis: int = -1
    residual_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    final_norm: bool = True
    kernels: Kernels = "plain"

    def __post_init__(self) -> None:
        """Refuse kernels that do not exist."""
        if self.kernels not in get_args(Kernels):
            raise unknown("kernels", self.kernels, get_args(Kernels))

    def build_norm(self, kind: str, *, affine: bool = True) -> nn.Module:
        """Return a norm for the stream, in the role of its operator's recipe."""
        return self.norm.build(self.dim, role=Role(kind, self.domain), affine=affine, axis=self.axis)

    def build_input_norm(self, place: Place) -> nn.Module:
        """Return the last norm before a sublayer: without gain if it is conditioned, none if it has its own."""
        if place.normalises_input:
            return nn.Identity()
        return self.build_norm(place.kind, affine=not place.conditioned)

    def build_post_norm(self, place: Place) -> nn.Module | None:
        """Return the norm after the predecessor's addition, in the role of its reader; None where nothing was added."""
        return self.build_norm(place.kind) if place.previous else None

    def build_final_norm(self) -> nn.Module:
        """Return the norm before the head, or the identity where the model has its own."""
        return self.build_norm("final") if self.final_norm else nn.Identity()


class Reader(Declared):
    """A module that reads streams and hands on the compute dtype."""

    def __init__(self, spec: ResidualSpec) -> None:
        super().__init__()
        self.compute_dtype = spec.compute_dtype

    def to_compute(self, h: Tensor) -> Tensor:
        """Return h in the compute dtype."""
        return h if self.compute_dtype is None else h.to(self.compute_dtype)


class Opening(Declared):
    """Turn the embedding [..., dim] into the streams: here `count` copies of it in the residual dtype."""

    def __init__(self, spec: ResidualSpec, count: int = 1) -> None:
        super().__init__()
        self.count = count
        self.residual_dtype = spec.residual_dtype

    def to_residual(self, embedding: Tensor) -> Tensor:
        """Return the embedding in the residual dtype."""
        return embedding if self.residual_dtype is None else embedding.to(self.residual_dtype)

    def forward(self, embedding: Tensor) -> Streams:
        """Return the streams, tensors of their own: one under two names would cost a compiled block a second graph."""
        first = self.to_residual(embedding)
        return (first, *(first.view_as(first) for _ in range(self.count - 1)))

    def init_as_pre_norm(self) -> None:
        """Set the parameters to where the model is a Pre-Norm; most openings have none."""


class Connection(Reader):
    """What a topology puts around one sublayer: a read before it, a write after it."""

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return what the sublayer sees, [..., dim] in the compute dtype, and the settled streams."""
        raise NotImplementedError

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return the streams after the sublayer's output, added in the residual dtype."""
        raise NotImplementedError

    def forward(self, streams: Streams, sublayer: Callable[[Tensor], Tensor]) -> Streams:
        """Read, apply the sublayer, write."""
        h, streams = self.read(streams)
        return self.write(streams, sublayer(h))

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Set fresh parameters to where the connection is a Pre-Norm's with the input norm `norm`.

        None stands for a sublayer that normalises its own input. Returns the differences: none where the function is
        the same up to rounding. Called only where `Topology.preserving` does not refuse.
        """
        raise NotImplementedError


class Closing(Reader):
    """Turn the streams into what the head sees."""

    def forward(self, streams: Streams) -> Tensor:
        """Return [..., dim] in the compute dtype."""
        raise NotImplementedError

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Set fresh parameters to where the closing is the final norm `norm` alone; see `Connection`."""
        raise NotImplementedError


@dataclass(frozen=True)
class BoundaryCost:
    """Passes of one stream-sized tensor over memory at a fused boundary, and tensors kept for the backward pass."""

    forward: float
    backward: float
    saved: float


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The wiring of the residual path: a frozen set of options that makes openings, connections and closings.

    Fields are scalars, so that a topology is JSON-serialisable, comparable and hashable. The class variables say what
    `explain` prints.
    """

    revision: ClassVar[int] = 0
    """Raised when a mended defect changes numbers: runs of an earlier revision are then other runs."""
    title: ClassVar[str]
    paper: ClassVar[str]
    formula: ClassVar[str]
    """Opening, read, write and closing, one a line; `O` is the sublayer's output, `N` a norm."""
    diagram: ClassVar[str]
    special_cases: ClassVar[tuple[str, ...]] = ()
    has_fused_kernels: ClassVar[bool] = False
    """Whether `kernels="fused"` gives connections that leave writes pending."""
    has_lean_kernels: ClassVar[bool] = False
    """Whether `kernels="lean"` gives connections that keep one stream for the backward pass, not two."""
    modulation_refusal: ClassVar[str | None] = None
    """Why the topology does not compose with conditioned (AdaLN) sublayers; None if it does."""
    pre_norm_refusal: ClassVar[str | None] = "its sublayers read a stream that was normalised"
    """Why no setting of the parameters is a Pre-Norm model; None if one is."""

    def __post_init__(self) -> None:
        """Refuse option values that their annotations do not admit, and spell the others alike."""
        check_options(self)

    @property
    def heading(self) -> str:
        """The title, with the options in which a variant differs from its family's defaults."""
        given = {option.name: getattr(self, option.name) for option in fields(self)}
        differing = [f"{o.name}={given[o.name]}" for o in fields(self) if given[o.name] != o.default]
        return f"{self.title} ({', '.join(differing)})" if differing else self.title

    @property
    def stream_names(self) -> tuple[str, ...]:
        """Names of the streams, in order."""
        return ("residual",)

    @property
    def attention_norm(self) -> AttentionNorm:
        """The attention norm that the topology needs; "auto" when it has no need of its own."""
        return "auto"

    @property
    def cost(self) -> BoundaryCost:
        """Memory traffic of a fused boundary."""
        raise NotImplementedError

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the module that turns the embedding into the streams."""
        return Opening(spec, len(self.stream_names))

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return what stands around the sublayer at `place`."""
        raise NotImplementedError

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the module that turns the streams, last written at `last`, into what the head sees."""
        raise NotImplementedError

    @property
    def tells_sublayers_apart(self) -> bool:
        """Whether attention and MLP have different connections, so that one connection for both is refused."""
        return self.attention_norm != "auto"

    def preserving(self) -> Topology:
        """Return the topology with the options it needs to start as a given Pre-Norm model.

        Raises UserError, with the reason, where no setting of the parameters is a Pre-Norm model.
        """
        if self.pre_norm_refusal:
            raise UserError(
                f"{self.title} cannot keep the function of a Pre-Norm model: {self.pre_norm_refusal}; "
                "start from scratch (preserve=False or --scratch), or choose a topology that can, such as siamese"
            )
        return self

    def initial_factor(self, role: str, depth: int) -> float:
        """Return the factor on the initial weights of a projection of this role ("value", "mlp_output", ...)."""
        return 1.0

    def pack(self, streams: Streams) -> Tensor:
        """Return the streams as one tensor [..., streams, dim], for loops that hand on one tensor."""
        if len(streams) == 1:
            return streams[0].unsqueeze(-2)
        return torch.stack(streams, dim=-2)

    def unpack(self, packed: Tensor) -> Streams:
        """Return the streams of a packed tensor."""
        return packed.unbind(dim=-2)


def check_options(topology: Topology) -> None:
    """Spell every option as its annotation does (1 as 1.0 for a float); see `check_option` for what is refused."""
    hints = get_type_hints(type(topology))
    for option in fields(topology):
        what = f"{option.name} of {topology.title}"
        value = check_option(what, getattr(topology, option.name), hints[option.name])
        object.__setattr__(topology, option.name, value)
