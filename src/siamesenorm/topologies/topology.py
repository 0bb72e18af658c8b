"""The contract of a residual topology: it opens the streams, connects each sublayer to them, and closes the streams.

    streams = opening(embedding)
    for connection, sublayer in ...:
        h, streams = connection.read(streams)             # the input of the sublayer
        streams = connection.write(streams, sublayer(h))  # adds its output
    hidden = closing(streams)                             # with every final norm

The streams are a tuple of tensors; their number may change along the depth. A norm after an addition belongs to the
next connection, as its `post_norm`, or to the closing: no parameter crosses a block's edge, and a write may stay
pending until the next read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import chain, product
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError, unknown
from siamesenorm.norms import NORMS, DeclaredModule, Inexact, NormFunction, NormSpec, Role, assign
from siamesenorm.options import Scalar, check_option

Streams = tuple[Tensor, ...]
AttentionNorm = Literal["auto", "none", "qk", "qk-head", "qkv-head"]
Kind = Literal["attention", "mlp"]
DepthScale = Literal["code", "paper_block", "paper_sublayer", "none"]
Kernels = Literal["plain", "fused", "lean", "auto"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The position of a sublayer: its `index` k of `sublayers` K, its `block` l of `depth` L, and its `slot` in it."""

    index: int
    block: int
    slot: int
    kind: Kind
    depth: int
    sublayers: int
    previous: Place | None = field(default=None, repr=False)
    conditioned: bool = False
    """Whether the sublayer is `Modulated`: the read's last norm is then built without gain."""
    normalises_input: bool = False
    """Whether the sublayer has its own input norm (parallel attention and MLP): the read's last one is left out."""


BLOCKS_OF_COST = 8
"""Number of blocks over whose boundaries `Topology.cost` is the mean."""


def transformer_places(
    depth: int,
    *,
    conditioned: bool = False,
    sublayers: Sequence[tuple[Kind, bool]] = (("attention", False), ("mlp", False)),
) -> list[tuple[Place, ...]]:
    """Return the places of `depth` blocks; of each sublayer, its kind and whether it has its own input norm."""
    places, count = list[Place](), len(sublayers)
    for block, (slot, (kind, normalises_input)) in product(range(depth), enumerate(sublayers)):
        places.append(Place(
            index=len(places), block=block, slot=slot, kind=kind, depth=depth, sublayers=depth * count,
            previous=places[-1] if places else None, conditioned=conditioned, normalises_input=normalises_input,
        ))  # fmt: skip
    return [tuple(places[first : first + count]) for first in range(0, len(places), count)]


@dataclass(frozen=True, kw_only=True)
class ResidualSpec:
    """The arguments from which a topology builds its modules.

    `norm` is an operator, or its name. `residual_dtype` is the dtype of the streams, `compute_dtype` that of the input
    of sublayers; None leaves it as it is. `final_norm=False` leaves the last norm to the model (a DiT head has its
    own).

    `kernels` applies to boundaries and norms. "plain": no custom operator. "fused": a write stays pending, and one
    operator completes it together with the next read. "auto": the same where it is faster (a GPU with Triton, norms
    that the operator supports), else the plain formulas. "lean": "fused" with one of two fp32 streams kept for the
    backward pass and the other recomputed. With all but "plain", norms outside of boundaries are fused where faster.
    """

    dim: int
    norm: NormSpec | str = NormSpec()
    domain: Literal["language", "vision"] = "language"
    axis: int = -1
    residual_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    final_norm: bool = True
    kernels: Kernels = "plain"

    def __post_init__(self) -> None:
        if self.kernels not in get_args(Kernels):
            raise unknown("kernels", self.kernels, get_args(Kernels))
        if isinstance(self.norm, str):
            object.__setattr__(self, "norm", NormSpec.parse(self.norm))

    @property
    def norm_spec(self) -> NormSpec:
        """The operator of the norms."""
        assert isinstance(self.norm, NormSpec)
        return self.norm

    @property
    def mean_square_eps(self) -> float | None:
        """The eps of the norms, None where the operator does not divide by sqrt(mean square + eps)."""
        spec = self.norm_spec
        return spec.to_json()["eps"] if NORMS[spec.name].eps_in_mean_square else None  # type: ignore[return-value]

    def with_norm_options(self, **options: Scalar) -> ResidualSpec:
        """Return the same with options of the operator overridden."""
        return replace(self, norm=self.norm_spec.with_options(**options))

    def build_norm(self, kind: str, *, affine: bool = True) -> nn.Module:
        """Return a norm for the stream, in the role of its operator's recipe."""
        norm = self.norm_spec.build(self.dim, role=Role(kind, self.domain), affine=affine, axis=self.axis)
        return norm.select_kernels(self.kernels)

    def build_input_norm(self, place: Place) -> nn.Module:
        """Return the last norm before a sublayer: without gain if it is conditioned, none if it has its own."""
        return nn.Identity() if place.normalises_input else self.build_norm(place.kind, affine=not place.conditioned)

    def build_post_norm(self, place: Place) -> nn.Module | None:
        """Return the norm after the predecessor's addition, in the role of its reader; None where nothing was added."""
        return self.build_norm(place.kind) if place.previous else None

    def build_final_norm(self) -> nn.Module:
        """Return the norm before the head, or the identity where the model has its own."""
        return self.build_norm("final") if self.final_norm else nn.Identity()


class Gate(DeclaredModule):
    """A learned factor per channel, gamma x, without weight decay."""

    gain: Tensor

    def __init__(self, spec: ResidualSpec, *, initial: float = 1.0) -> None:
        super().__init__()
        self.axis = spec.axis
        self.declare("gain", (spec.dim,), initial=initial)

    def forward(self, x: Tensor) -> Tensor:
        """Return gamma x."""
        return (x.movedim(self.axis, -1) * self.gain.to(x.dtype)).movedim(-1, self.axis)

    def zero_(self) -> None:
        """Set gamma to 0."""
        assign(self.gain, torch.zeros_like(self.gain))


class Reader(DeclaredModule):
    """A module that reads streams and returns the compute dtype."""

    has_kernels: ClassVar[bool] = False
    """Whether it has a form for `kernels="fused"` or "lean"."""

    def __init__(self, spec: ResidualSpec) -> None:
        super().__init__()
        if spec.kernels in ("fused", "lean") and not self.has_kernels:
            raise UserError(f"{type(self).__name__} has no {spec.kernels} kernels: use kernels plain or auto")
        self.compute_dtype = spec.compute_dtype

    def eps_behind(self, norm: NormFunction) -> tuple[float, float] | None:
        """Return (e, f): f `norm` with eps e behind this is `norm` of Pre-Norm's stream at the start, None if none."""
        return None

    def to_compute(self, h: Tensor) -> Tensor:
        """Return h in the compute dtype."""
        return h if self.compute_dtype is None else h.to(self.compute_dtype)


class Opening(DeclaredModule):
    """Turn the embedding e [..., dim] into `count` streams in the residual dtype: X = gate norm(e), Y = scale norm(e).

    Without norm, gate and scale every stream is a copy of the embedding.
    """

    scale: Tensor | None

    def __init__(
        self,
        spec: ResidualSpec,
        count: int = 1,
        *,
        norm: nn.Module | None = None,
        gate: Gate | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.count = count
        self.residual_dtype = spec.residual_dtype
        self.norm = norm
        self.gate = gate
        self.constant("scale", scale)

    def to_residual(self, embedding: Tensor) -> Tensor:
        """Return the embedding in the residual dtype."""
        return embedding if self.residual_dtype is None else embedding.to(self.residual_dtype)

    def forward(self, embedding: Tensor) -> Streams:
        """Return the streams, each a tensor object of its own: else a compiled block would have a second graph."""
        first = self.to_residual(embedding)
        if self.norm is not None:
            first = self.norm(first)
        others = (first.view_as(first) if self.scale is None else first * self.scale for _ in range(self.count - 1))
        return (first if self.gate is None else self.gate(first), *others)

    def init_as_pre_norm(self) -> None:
        """Set the parameters for a model that equals Pre-Norm: the first stream is 0 if it has a gate."""
        if self.gate is not None:
            self.gate.zero_()


class Connection(Reader):
    """The modules around one sublayer: a read before it, a write after it."""

    def read(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return the sublayer's input, of a stream's shape in the compute dtype, and the streams, post-normalised."""
        raise NotImplementedError

    def write(self, streams: Streams, output: Tensor) -> Streams:
        """Return the streams after the sublayer's output, added in the residual dtype."""
        raise NotImplementedError

    def forward(self, streams: Streams, sublayer: Callable[[Tensor], Tensor]) -> Streams:
        """Read, apply the sublayer, write."""
        h, streams = self.read(streams)
        return self.write(streams, sublayer(h))

    @contextmanager
    def observed(self, observer: Callable[[Streams, Tensor, Streams], None]) -> Iterator[None]:
        """Call `observer(streams, output, written)` after every write inside the context.

        `streams` are those that `read` returned, `output` is that of the sublayer and `written` the result of the
        write: where it stays pending, the streams and the output. Raises UserError where there is an observer already.
        """
        if "write" in vars(self):
            raise UserError(f"this {type(self).__name__} has an observer already: end its context first")
        write = self.write

        def observed_write(streams: Streams, output: Tensor) -> Streams:
            written = write(streams, output)
            observer(streams, output, written)
            return written

        vars(self)["write"] = observed_write
        try:
            yield
        finally:
            del vars(self)["write"]

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Set norms and gates of a new connection so that it equals a Pre-Norm's with the input norm `norm`.

        `norm` is None for a sublayer that normalises its own input. Returns the differences: none where the function
        is the same up to rounding. Called only for topologies that `Topology.preserving` returns.
        """
        raise NotImplementedError


class Closing(Reader):
    """Turn the streams into the input of the head."""

    def forward(self, streams: Streams) -> Tensor:
        """Return [..., dim] in the compute dtype."""
        raise NotImplementedError

    def select(self, streams: Streams, tokens: slice) -> Tensor:
        """Return what `forward` does for some tokens, [batch, selected, dim], of streams [batch, tokens, ...]."""
        return self(tuple(stream[:, tokens] for stream in streams))  # type: ignore[no-any-return]

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Set initial parameters so that the closing equals the final norm `norm` alone; see `Connection`."""
        raise NotImplementedError


@dataclass(frozen=True)
class BoundaryCost:
    """The memory traffic of a boundary in stream-sized tensors [tokens, dim], and those kept for the backward pass.

    `forward` counts each tensor that enters the boundary, leaves it or is kept (`saved`) once, as one kernel would read
    and write it; `backward` counts what is kept, and the gradients of what leaves and of what enters.
    """

    forward: float
    backward: float
    saved: float


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The wiring of the residual path: a frozen set of options that makes openings, connections and closings.

    Fields are scalars: a topology is JSON-serialisable, comparable and hashable. `explain` prints the class variables.
    """

    revision: ClassVar[int] = 0
    """Part of a run's identity, raised when a mended defect changes numbers."""
    title: ClassVar[str] = ""
    """The name in tables and messages; the class's name where it is empty."""
    paper: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    """Opening, read, write and closing, one a line; `O` is the sublayer's output, `N` a norm."""
    diagram: ClassVar[str] = ""
    special_cases: ClassVar[tuple[str, ...]] = ()
    has_fused_kernels: ClassVar[bool] = False
    """Whether `kernels="fused"` gives connections that leave writes pending."""
    has_lean_kernels: ClassVar[bool] = False
    """Whether `kernels="lean"` gives connections that keep one stream for the backward pass, not two."""
    modulation_refusal: ClassVar[str | None] = None
    """Why the topology does not compose with conditioned (AdaLN) sublayers; None if it does."""
    pre_norm_refusal: ClassVar[str | None] = "its sublayers read a stream that was normalised"
    """Why no values of the parameters give a Pre-Norm model; None if some do."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Give a class without a title its name as title."""
        super().__init_subclass__(**keywords)
        if not cls.title:
            cls.title = cls.__name__

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for option in fields(self):
            value = check_option(f"{option.name} of {self.title}", getattr(self, option.name), hints[option.name])
            object.__setattr__(self, option.name, value)

    @property
    def heading(self) -> str:
        """The title, with the options in which a variant differs from its family's defaults."""
        given = {option.name: getattr(self, option.name) for option in fields(self)}
        differing = [f"{o.name}={given[o.name]}" for o in fields(self) if given[o.name] != o.default]
        return f"{self.title} ({', '.join(differing)})" if differing else self.title

    @property
    def stream_names(self) -> tuple[str, ...]:
        """Names of the opening's streams, by position."""
        return ("residual",)

    def name_streams(self, count: int) -> tuple[str, ...]:
        """Return the names of `count` streams: those of `stream_names` unless their number grows along the depth."""
        return self.stream_names

    @property
    def attention_norm(self) -> AttentionNorm:
        """The attention norm that the topology needs; "auto" if any will do."""
        return "auto"

    def boundary_cost(self, place: Place) -> BoundaryCost | None:
        """Return the cost of the boundary between the sublayers at `place.previous` and `place`; None: not declared."""
        return None

    @property
    def cost(self) -> BoundaryCost | None:
        """The mean cost of the boundaries of a model."""
        places = [*chain(*transformer_places(BLOCKS_OF_COST + 1))][1:-1]
        costs = [cost for cost in map(self.boundary_cost, places) if cost is not None]
        totals = [sum(column) / len(costs) for column in zip(*map(astuple, costs), strict=True)]
        return BoundaryCost(*totals) if totals else None

    def opening(self, spec: ResidualSpec) -> Opening:
        """Return the module that turns the embedding into the streams."""
        return Opening(spec, len(self.stream_names))

    def connection(self, place: Place, spec: ResidualSpec) -> Connection:
        """Return the connection of the sublayer at `place`."""
        raise NotImplementedError

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:
        """Return the module that turns the streams, last written at `last`, into the input of the head."""
        raise NotImplementedError

    @property
    def distinguishes_sublayers(self) -> bool:
        """Whether attention and MLP have different connections, so that one connection for both is refused."""
        return self.attention_norm != "auto"

    def preserving(self) -> Topology:
        """Return the topology with the options to start as a Pre-Norm model; raises UserError where it cannot."""
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
        """Return the streams as one tensor [..., streams, dim], for loops that pass one tensor from block to block."""
        return streams[0].unsqueeze(-2) if len(streams) == 1 else torch.stack(streams, dim=-2)

    def unpack(self, packed: Tensor) -> Streams:
        """Return the streams of a packed tensor."""
        return packed.unbind(dim=-2)
