"""How a block of another library uses the residual path, and the classes of a rewired block and its backbone.

A rewired block is the host's own block of another class, with another forward: attention, MLP, names, hooks and
checkpointing stay. It returns one packed tensor [..., streams, dim], and the host's loop over its blocks is unchanged.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from siamesenorm.errors import UserError
from siamesenorm.norms import NormFunction
from siamesenorm.topologies import Closing, Connection, Opening, Streams, Topology

# --- classes made at run time: a host's own class with another behaviour mixed in before it


class DerivedClass(type):
    """The metaclass of derived classes, which are pickled as `recipe`, the call that makes them again."""

    mixin: type
    host: type
    recipe: tuple[Callable[..., Any], tuple[type, ...]]


copyreg.pickle(DerivedClass, lambda kind: kind.recipe)
_MADE: dict[tuple[type, type], DerivedClass] = {}


def derive(
    mixin: type, host: type, name: str = "", make: Callable[[type], type] | None = None, **members: Any
) -> type[Any]:
    """Return the one subclass of a host in which `mixin` comes first; `make(host)` returns it if it has a name."""
    if (mixin, host) not in _MADE:
        # The usual name keeps the host's: libraries look for it (no-split modules, LoRA's targets, device maps).
        name = name or f"Rewired{original_class(host).__name__}"
        members = {"__doc__": mixin.__doc__, "__module__": mixin.__module__, **members}
        kind = DerivedClass(name, (mixin, host), members)
        kind.mixin, kind.host = mixin, host
        kind.recipe = (make, (host,)) if make else (derive, (mixin, host))
        _MADE[mixin, host] = kind
    return _MADE[mixin, host]


def original_class(kind: type) -> type:
    """Return the host's own class, from which a class was derived."""
    return original_class(kind.host) if isinstance(kind, DerivedClass) else kind


def without(mixin: type, kind: type) -> type:
    """Return a class with one mixin removed, the others in their order."""
    if not isinstance(kind, DerivedClass):
        return kind
    host = without(mixin, kind.host)
    return host if kind.mixin is mixin else derive(kind.mixin, host)


def qualified_name(module: nn.Module) -> str:
    """Return the full name of a module's class, or of the host's if it was derived from that."""
    kind = original_class(type(module))
    return f"{kind.__module__}.{kind.__qualname__}"


# --- rewired blocks and closings

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The parts at `paths` of a block, applied one after the other to the input of a sublayer.

    A module is called; a tensor is a factor; a number is a dropout's probability if its name says so, else a factor.
    `core` is the module that takes the arguments of the block: those in `accepted`, None for any. `renamed` holds pairs
    of the block's name of one and the module's. The modules at `adding` add a residual to their output: they get zero.
    """

    paths: tuple[str, ...]
    core: str = ""
    adding: tuple[str, ...] = ()
    accepted: frozenset[str] | None = None
    renamed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerSpec:
    """One sublayer of a block: the attribute that will hold its connection, the norms of its input, and what it does.

    `norm` names the input norm, which the connection replaces; None where the sublayer reads the raw stream. `kept`
    names input norms that stay inside the sublayer instead: those of parallel attention and MLP, or conditioned ones.
    The outputs of several `branches` (attention and MLP in parallel) are added, and the parts at `joint` follow.
    """

    kind: Literal["attention", "cross_attention", "mlp"]
    connection: str
    norm: str | None = None
    kept: tuple[str, ...] = ()
    branches: tuple[Branch, ...] = ()
    joint: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the formula of the sublayer."""
        chains = [" > ".join(branch.paths) for branch in self.branches] or [self.kind]
        if len(chains) > 1:
            joint = "".join(f" > {path}" for path in self.joint)
            return f"x + ({' + '.join(chains)}){joint}" + (f" of {self.norm}(x)" if self.norm else "")
        return f"x + {chains[0]}({self.norm or ''}(x))"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """The sublayers of a block, and how the host calls it.

    `arguments` are the names of positional ones after the first; `returns` is the number of outputs after the state,
    each the second one of an attention, 0 for a block that returns a tensor.
    """

    sublayers: tuple[SublayerSpec, ...]
    arguments: tuple[str, ...] = ()
    returns: int = 0


class RewiredBlock(nn.Module):
    """Mixed in before a host's block class; a subclass writes the forward around its connections.

    Connections are called with the sublayer as a function: accelerate moves offloaded parameters, a connection's own
    too, by hooks on calls, and it would move a module among the arguments as a whole.
    """

    form: BlockForm
    topology: Topology
    opening: Opening | None
    """The first block opens the streams; the others receive them packed."""
    closing: RewiredClosing | None
    """The last block closes the streams where no norm of every token follows."""

    def enter(self, hidden: Tensor) -> Streams:
        """Return the streams of what the host's loop passes: the embedding, or packed streams."""
        return self.topology.unpack(hidden) if self.opening is None else self.opening(hidden)

    def leave(self, streams: Streams) -> Tensor:
        """Return the streams packed for the host's loop."""
        packed = self.topology.pack(streams)
        closed: Tensor = packed if self.closing is None else self.closing(packed)
        return closed


OF_SELF_ATTENTION = ("attention_mask", "position_bias")
"""Arguments of a block that its cross-attention does not take."""


class SublayerBlock(RewiredBlock):
    """A block whose sublayers are chains of the host's modules, each sublayer behind a connection."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the packed streams after all sublayers, in a tuple before the other outputs if the host does."""
        others: list[Any] = []
        options = self._options(args, kwargs)
        streams = self.enter(hidden_states)
        for sublayer in self.form.sublayers:
            connection: Connection = getattr(self, sublayer.connection)
            streams = connection(streams, lambda h, sublayer=sublayer: self._compute(sublayer, h, options, others))
        packed, count = self.leave(streams), self.form.returns
        return (packed, *(*others, *[None] * count)[:count]) if count else packed

    def _options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; raises UserError for states of an encoder without a use for them."""
        options = {**dict(zip(self.form.arguments, args, strict=False)), **kwargs}
        attends = any(sublayer.kind == "cross_attention" for sublayer in self.form.sublayers)
        if not attends and options.get("encoder_hidden_states") is not None:
            host = original_class(type(self)).__name__
            raise UserError(f"encoder_hidden_states in a rewired {host}: it has no cross-attention, leave them out")
        return options

    def _compute(self, sublayer: SublayerSpec, h: Tensor, options: Mapping[str, Any], others: list[Any]) -> Tensor:
        """Return the output of a sublayer: 0 of a cross-attention without an encoder, which the host leaves out."""
        crosses = sublayer.kind == "cross_attention"
        if crosses and options.get("encoder_hidden_states") is None:
            return torch.zeros_like(h)
        outputs = [self._chain(branch, h, options, others, crosses=crosses) for branch in sublayer.branches]
        if len(outputs) == 1:
            return outputs[0]
        return self._chain(Branch(paths=sublayer.joint), outputs[1] + outputs[0])

    def _chain(
        self,
        branch: Branch,
        x: Tensor,
        options: Mapping[str, Any] = NOTHING,
        others: list[Any] | None = None,
        *,
        crosses: bool = False,
    ) -> Tensor:
        """Return x after the parts of a branch, the core of an attention called with its options."""
        output = x
        for path in branch.paths:
            part = attrgetter(path)(self)
            if isinstance(part, (int, float)) and "dropout" in path:
                output = functional.dropout(output, part, self.training)
                continue
            if isinstance(part, (int, float, Tensor)):
                output = output * part
                continue
            given = self._given(branch, options, crosses) if path == branch.core else {}
            if path in branch.adding:
                given["residual"] = output.new_zeros(())
            output = part(output, **given)
            if isinstance(output, tuple):
                if others is not None and path == branch.core:
                    others.append(output[1])
                output = output[0]
        return output if output.shape == x.shape else output.view(x.shape)

    def _given(self, branch: Branch, options: Mapping[str, Any], crosses: bool) -> dict[str, Any]:
        """Return the arguments of the core of a branch."""
        dropped = (*OF_SELF_ATTENTION, *(old for old, _ in branch.renamed)) if crosses else ()
        given = {k: v for k, v in options.items() if k not in dropped and not k.startswith("encoder_")}
        for old, new in branch.renamed:
            given.pop(old, None)
            given[new] = options.get(old)
        accepted = branch.accepted
        return given if accepted is None else {name: each for name, each in given.items() if name in accepted}


class RewiredClosing(nn.Module):
    """Replaces the host's final norm: closes packed streams; `final_norm` is the host's, if conditioned.

    `embedding_norm` is the host's where it normalises the embedding with it too, which is not packed yet.
    """

    def __init__(
        self,
        topology: Topology,
        closing: Closing,
        final_norm: nn.Module | None = None,
        embedding_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.topology = topology
        self.closing = closing
        self.final_norm = nn.Identity() if final_norm is None else final_norm
        self.embedding_norm = embedding_norm

    def forward(self, packed: Tensor) -> Tensor:
        """Return the input of the host's head."""
        if self.embedding_norm is not None and packed.dim() == 3:
            embedding: Tensor = self.embedding_norm(packed)
            return embedding
        closed: Tensor = self.final_norm(self.closing(self.topology.unpack(packed)))
        return closed


class ScaledNorm(nn.Module):
    """Mixed in before the class of an input norm that stays in a sublayer: f N(x), so that it equals the host's.

    With another eps and a factor f, a norm after a norm, or of a multiple, is the host's norm of the stream.
    """

    factor: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm with its gain multiplied by the factor, and its bias as it is."""
        bias: Tensor | None = getattr(self, "bias", None)
        normed: Tensor = super().forward(x) * self.factor
        return normed if bias is None else normed + (1 - self.factor) * bias

    def function(self) -> NormFunction:
        """Return the function of one of this library's norms."""
        unscaled: NormFunction = super().function()  # type: ignore[misc]
        return unscaled.divided(1 / self.factor, 1.0)


# --- the specification of a family


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """How a block uses the residual path.

    `keeps_final_norm` leaves the norm after the blocks in place behind the closing. `projections` names linear maps by
    the roles of this library's own ("query", "key", "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output"),
    as far as they are separate maps, those of a cross-attention too; `head_norms` are the roles whose output the host
    normalises itself. `attention` names the attention. `output_norms` normalise what a sublayer returns, on a block
    without input norms: starting from scratch drops them. `pre_norm_refusal` is the reason why the block is no Pre-Norm
    block.
    """

    rewired: type[RewiredBlock]
    form: BlockForm
    keeps_final_norm: bool = False
    attention: str = "self_attn"
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_norms: tuple[str, ...] = ()
    output_norms: tuple[str, ...] = ()
    pre_norm_refusal: str | None = None

    @property
    def sublayers(self) -> tuple[SublayerSpec, ...]:
        """The sublayers in order."""
        return self.form.sublayers

    @property
    def crosses(self) -> bool:
        """Whether the block attends to the states of an encoder."""
        return any(sublayer.kind == "cross_attention" for sublayer in self.sublayers)

    def __str__(self) -> str:
        """Return the formula of the block."""
        return ", ".join(map(str, self.sublayers))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStack:
    """The stack of blocks in a model: its name, the blocks, their specification, and what follows it.

    `final_norm` is the qualified name of the norm after the blocks, "" where none follows on every token; it is an
    Identity in a model of timm that normalises the mean over tokens. `backbone` returns the hidden states of the
    blocks. `domain` is that of the topology's options.
    """

    name: str
    blocks: nn.ModuleList | nn.Sequential
    spec: BlockSpec
    backbone: nn.Module
    final_norm: str
    domain: Literal["language", "vision"] = "language"
