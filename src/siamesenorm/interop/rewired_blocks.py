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

from torch import Tensor, nn
from torch.nn import functional

from siamesenorm.errors import UserError
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
class BlockForm:
    """Which attributes of a block compute the outputs of its sublayers, and how the host calls it.

    `attention`, `mlp` and `joint` are paths, applied one after the other: a module is called; a number is a dropout's
    probability if its name says so, else a factor. `joint` acts on the sum of parallel sublayers. `core` is the module
    that takes the arguments of the block: `arguments` are the names of positional ones after the first, `accepted`
    those that it takes, None for any, and `renamed` is the block's name of one and the module's. The modules at
    `adding` add a residual to their output: they get zero.
    """

    attention: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    joint: tuple[str, ...] = ()
    core: str = ""
    adding: tuple[str, ...] = ()
    returns_tuple: bool = False
    arguments: tuple[str, ...] = ()
    accepted: frozenset[str] | None = None
    renamed: tuple[str, ...] = ()


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


class SequentialBlock(RewiredBlock):
    """Attention, then MLP, each behind a connection."""

    attention_connection: Connection
    mlp_connection: Connection

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the packed streams after both sublayers, in a tuple before the other outputs if the host does."""
        others: list[Any] = []
        options = self._options(args, kwargs)
        streams = self.attention_connection(self.enter(hidden_states), lambda h: self._attend(h, options, others))
        packed = self.leave(self.mlp_connection(streams, lambda h: self._chain(self.form.mlp, h)))
        return (packed, *others) if self.form.returns_tuple else packed

    def _options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the attention by name; raises UserError for the states of an encoder."""
        options = {**dict(zip(self.form.arguments, args, strict=False)), **kwargs}
        if options.pop("encoder_hidden_states", None) is not None:
            host = original_class(type(self)).__name__
            raise UserError(f"encoder_hidden_states in a rewired {host}: it has no cross-attention, leave them out")
        options.pop("encoder_attention_mask", None)
        if self.form.renamed:
            old, new = self.form.renamed
            options[new] = options.pop(old, None)
        accepted = self.form.accepted
        return options if accepted is None else {name: each for name, each in options.items() if name in accepted}

    def _attend(self, h: Tensor, options: Mapping[str, Any], others: list[Any]) -> Tensor:
        return self._chain(self.form.attention, h, options, others)

    def _chain(
        self, paths: Sequence[str], x: Tensor, options: Mapping[str, Any] = NOTHING, others: list[Any] | None = None
    ) -> Tensor:
        """Return x after the parts at `paths`, the core of the attention called with the options."""
        output = x
        for path in paths:
            part = attrgetter(path)(self)
            if isinstance(part, (int, float)):
                drops = "dropout" in path
                output = functional.dropout(output, part, self.training) if drops else output * part
                continue
            given = dict(options) if path == self.form.core else {}
            if path in self.form.adding:
                given["residual"] = output.new_zeros(())
            result = part(output, **given)
            if isinstance(result, tuple):
                output = result[0]
                if others is not None:
                    others.extend(result[1:])
            else:
                output = result
        return output if output.shape == x.shape else output.view(x.shape)


class ParallelBlock(SequentialBlock):
    """Attention and MLP read the same state, through one norm or each through its own: one connection, one sublayer."""

    connection: Connection

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the packed streams after the sublayer MLP(N(h)) + Attention(N(h))."""
        others: list[Any] = []
        options = self._options(args, kwargs)

        def both(h: Tensor) -> Tensor:
            attention = self._attend(h, options, others)
            return self._chain(self.form.joint, self._chain(self.form.mlp, h) + attention)

        packed = self.leave(self.connection(self.enter(hidden_states), both))
        return (packed, *others) if self.form.returns_tuple else packed


class RewiredClosing(nn.Module):
    """Replaces the host's final norm: closes packed streams; `final_norm` is the host's, if conditioned."""

    def __init__(self, topology: Topology, closing: Closing, final_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.topology = topology
        self.closing = closing
        self.final_norm = nn.Identity() if final_norm is None else final_norm

    def forward(self, packed: Tensor) -> Tensor:
        """Return the input of the host's head."""
        closed: Tensor = self.final_norm(self.closing(self.topology.unpack(packed)))
        return closed


# --- the specification of a family


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerSpec:
    """One sublayer of a block: the attribute that will hold its connection, and the norms of its input.

    `norm` names the input norm, which the connection replaces; None where the sublayer reads the raw stream. `kept`
    names input norms that stay inside the sublayer instead: those of parallel attention and MLP, or conditioned ones.
    """

    kind: Literal["attention", "mlp"]
    connection: str
    norm: str | None = None
    kept: tuple[str, ...] = ()


def two_sublayers(attention_norm: str | None = None, mlp_norm: str | None = None) -> tuple[SublayerSpec, SublayerSpec]:
    """Return attention, then MLP, each with a connection of its own, which replaces its input norm, if any."""
    return (
        SublayerSpec(kind="attention", connection="attention_connection", norm=attention_norm),
        SublayerSpec(kind="mlp", connection="mlp_connection", norm=mlp_norm),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """How a block uses the residual path.

    `keeps_final_norm` leaves the norm after the blocks in place behind the closing. `projections` names linear maps by
    the roles of this library's own ("query", "key", "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output"),
    as far as they are separate maps; `head_norms` are the roles whose output the host normalises itself; `head_dim`
    returns the width of a head of the attention. `output_norms` normalise what a sublayer returns, on a block without
    input norms: starting from scratch drops them. `pre_norm_refusal` is the reason why the block is no Pre-Norm block.
    """

    rewired: type[RewiredBlock]
    form: BlockForm = BlockForm()
    sublayers: tuple[SublayerSpec, ...]
    keeps_final_norm: bool = False
    attention: str = "self_attn"
    projections: Mapping[str, str] = field(default_factory=dict)
    head_norms: tuple[str, ...] = ()
    head_dim: Callable[[Any], int] = attrgetter("head_dim")
    output_norms: tuple[str, ...] = ()
    pre_norm_refusal: str | None = None

    def __str__(self) -> str:
        """Return the formula of the block."""
        names = {"attention": self.form.attention, "mlp": self.form.mlp}
        chains = {kind: " > ".join(paths) for kind, paths in names.items()}
        if len(self.sublayers) == 1 and self.form.mlp:
            norm = self.sublayers[0].norm
            joint = "".join(f" > {path}" for path in self.form.joint)
            return f"x + ({chains['attention']} + {chains['mlp']}){joint}" + (f" of {norm}(x)" if norm else "")
        return ", ".join(f"x + {chains[each.kind] or each.kind}({each.norm or ''}(x))" for each in self.sublayers)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStack:
    """The stack of blocks in a model: its name, the blocks, their specification, and what follows it.

    `final_norm` is the qualified name of the norm after the blocks, "" where none follows on every token. `backbone`
    returns the hidden states of the blocks. `domain` is that of the topology's options.
    """

    name: str
    blocks: nn.ModuleList | nn.Sequential
    spec: BlockSpec
    backbone: nn.Module
    final_norm: str
    domain: Literal["language", "vision"] = "language"
