"""How a block of another library uses the residual path, and the classes of a rewired block and its backbone.

A rewired block is the host's own block of another class, with another forward: attention, MLP, names, hooks and
checkpointing stay. It returns one packed tensor [..., streams, dim], and the host's loop over its blocks is unchanged.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

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


class RewiredBlock(nn.Module):
    """Mixed in before a host's block class; a family's subclass writes the forward around its connections.

    Connections are called with the sublayer as a function: accelerate moves offloaded parameters, a connection's own
    too, by hooks on calls, and it would move a module among the arguments as a whole.
    """

    topology: Topology
    opening: Opening | None
    """The first block opens the streams; the others receive them packed."""

    def enter(self, hidden: Tensor) -> Streams:
        """Return the streams of what the host's loop passes: the embedding, or packed streams."""
        return self.topology.unpack(hidden) if self.opening is None else self.opening(hidden)

    def leave(self, streams: Streams) -> Tensor:
        """Return the streams packed for the host's loop."""
        return self.topology.pack(streams)


class SequentialBlock(RewiredBlock):
    """Attention, then MLP, each behind a connection; a subclass names the modules that compute each sublayer."""

    attention_modules: ClassVar[tuple[str, ...]]
    mlp_modules: ClassVar[tuple[str, ...]]
    attention_connection: Connection
    mlp_connection: Connection

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the packed streams after both sublayers."""
        streams = self.attention_connection(self.enter(hidden_states), lambda h: self._attend(h, *args, **kwargs))
        return self.leave(self.mlp_connection(streams, self._transform))

    def _attend(self, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._chain(self.attention_modules, h, *args, **kwargs)

    def _transform(self, h: Tensor) -> Tensor:
        return self._chain(self.mlp_modules, h)

    def _chain(self, names: Sequence[str], h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of modules one after the other; an attention returns its output first of a tuple."""
        result = getattr(self, names[0])(h, *args, **kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        for name in names[1:]:
            output = getattr(self, name)(output)
        return output


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
    """How a block of one class uses the residual path.

    `final_norm` is the attribute of the module that holds the blocks (the backbone); `keeps_final_norm` leaves it in
    place after the closing. `projections` names the linear maps by the roles of this library's own ("query", "key",
    "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output"), as far as they are separate maps; `head_norms`
    are the roles whose output the host normalises itself; `head_dim` returns the width of a head of the attention.
    `output_norms` normalise what a sublayer returns, on a block without input norms: starting from scratch drops them.
    `pre_norm_refusal` is the reason why the block is no Pre-Norm block. `backbones` are the full names of the classes
    of backbones whose loop over the blocks is known, `check_backbone` raises UserError for other differences, and
    `backbone_mixin` comes before the class of the backbone, to close its other outputs (hidden states) into one stream.
    """

    rewired: type[RewiredBlock]
    sublayers: tuple[SublayerSpec, ...]
    final_norm: str = "norm"
    keeps_final_norm: bool = False
    domain: Literal["language", "vision"] = "language"
    attention: str = "self_attn"
    projections: Mapping[str, str] = field(default_factory=dict)
    head_norms: tuple[str, ...] = ()
    head_dim: Callable[[Any], int] = attrgetter("head_dim")
    output_norms: tuple[str, ...] = ()
    pre_norm_refusal: str | None = None
    backbones: tuple[str, ...] = ()
    check_backbone: Callable[[nn.Module], None] = lambda backbone: None
    backbone_mixin: type[nn.Module] | None = None


SpecReader = Callable[[nn.Module], BlockSpec]
"""Return the specification of a block; raises UserError for an unknown variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStack:
    """The stack of blocks in a model: its name, the module that holds it, the blocks, and their specification."""

    name: str
    backbone: nn.Module
    blocks: nn.ModuleList | nn.Sequential
    spec: BlockSpec

    @property
    def final_norm(self) -> str:
        """The qualified name of the final norm."""
        prefix = self.name.rpartition(".")[0]
        return f"{prefix}.{self.spec.final_norm}" if prefix else self.spec.final_norm


# --- hidden states of a rewired backbone of transformers: the closed state of each block, [batch, tokens, dim]


class ClosedHiddenStates(nn.Module):
    """Mixed in before a backbone's class: `output_hidden_states` returns what the head would see after each block."""

    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the backbone's output with its packed hidden states closed; the first one is the embedding."""
        # The library turns its output into a tuple, which has no names, only after the states were collected.
        wanted = kwargs.pop("return_dict", None)
        output = super().forward(*args, **kwargs, return_dict=True)
        states = getattr(output, "hidden_states", None)
        if states is not None:
            closing = next(module for module in self.modules() if isinstance(module, RewiredClosing))
            output["hidden_states"] = tuple(closing(x) if x is not None and x.dim() == 4 else x for x in states)
        names = getattr(self.config, "return_dict", True) if wanted is None else wanted
        return output.to_tuple() if names is False else output

    def __setstate__(self, state: Any) -> None:
        """Restore a pickled backbone, whose class this process may not have seen."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        keep_recording(self)


def keep_recording(model: nn.Module) -> None:
    """Register a model of a new class with transformers, so that it records the same outputs as before."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None and hasattr(model, "_can_record_outputs"):
        registry = capturing._CAN_RECORD_REGISTRY
        # A dictionary, up to some 5.x, by the text of the class; then a registry that takes the model itself.
        registry[str(type(model)) if type(registry) is dict else model] = model._can_record_outputs
