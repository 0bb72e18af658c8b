"""How a block of another library uses the residual path, and what a rewired block and its backbone are made of.

A rewired block is the host's own block, whose class is exchanged for a subclass with another forward: its attention,
its MLP, their names, hooks and checkpointing stay. Blocks return one packed tensor [..., streams, dim], so that the
host's loop over its blocks runs unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.derived_class import derive, original_class
from siamesenorm.topologies import Closing, Connection, Opening, Streams, Topology


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
    """A block of attention, then MLP, each behind a connection; a family's subclass returns their outputs.

    Further arguments are the attention's, by name: their order differs from family to family.
    """

    attention_connection: Connection
    mlp_connection: Connection

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the packed streams after both sublayers."""
        streams = self.attention_connection(self.enter(hidden_states), lambda h: self.attend(h, *args, **kwargs))
        return self.leave(self.mlp_connection(streams, self.transform))

    def attend(self, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the attention sublayer."""
        raise NotImplementedError

    def transform(self, h: Tensor) -> Tensor:
        """Return the output of the MLP sublayer."""
        raise NotImplementedError


class RewiredClosing(nn.Module):
    """Replaces the host's final norm: closes packed streams [..., streams, dim] into [..., dim].

    `final_norm` is the host's own, where it stays: one whose gain depends on a condition.
    """

    def __init__(self, topology: Topology, closing: Closing, final_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.topology = topology
        self.closing = closing
        self.final_norm = nn.Identity() if final_norm is None else final_norm

    def forward(self, packed: Tensor) -> Tensor:
        """Return the input of the host's head."""
        closed: Tensor = self.final_norm(self.closing(self.topology.unpack(packed)))
        return closed


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """How a block of one class uses the residual path.

    `final_norm` is the attribute of the module that holds the blocks (the backbone); `keeps_final_norm` leaves it in
    place after the closing. `projections` names the linear maps by the roles of this library's own ("query", "key",
    "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output"), as far as they are separate maps; `head_norms`
    are the roles whose output the host normalises itself; `head_dim` returns the width of a head of the attention.
    `output_norms` normalise what a sublayer returns, on a block without input norms: starting from scratch drops them.
    `pre_norm_refusal` says why the block is no Pre-Norm block. `check_backbone` raises UserError for a backbone that
    uses the blocks in an unknown way; `adapt_backbone` closes its other outputs (hidden states) into one stream.
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
    check_backbone: Callable[[nn.Module], None] | None = None
    adapt_backbone: Callable[[nn.Module], None] | None = None

    @property
    def parallel(self) -> bool:
        """Whether one connection serves attention and MLP together."""
        return len(self.sublayers) == 1


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

    def input_norms(self) -> list[str]:
        """Return the qualified names of all input norms, replaced or kept."""
        return [
            f"{self.name}.{index}.{norm}"
            for index in range(len(self.blocks))
            for sublayer in self.spec.sublayers
            for norm in (*filter(None, (sublayer.norm,)), *sublayer.kept)
        ]


def two_sublayers(attention_norm: str | None = None, mlp_norm: str | None = None) -> tuple[SublayerSpec, SublayerSpec]:
    """Return attention, then MLP, each with a connection of its own, which replaces its input norm, if any."""
    return (
        SublayerSpec(kind="attention", connection="attention_connection", norm=attention_norm),
        SublayerSpec(kind="mlp", connection="mlp_connection", norm=mlp_norm),
    )


def qualified_name(module: nn.Module) -> str:
    """Return the full name of a module's class, or of the host's if it was derived from that."""
    kind = original_class(type(module))
    return f"{kind.__module__}.{kind.__qualname__}"


def inside(backbone: str, block: str) -> Callable[[nn.Module], None]:
    """Return the check that blocks are in a backbone of the one class whose loop over them is known."""

    def check(module: nn.Module) -> None:
        if qualified_name(module) != backbone:
            raise UserError(
                f"{block}s in a {qualified_name(module)}, which may use them in any way: rewire supports them in a "
                f"{backbone}"
            )

    return check


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
            output["hidden_states"] = tuple(_close(closing, state) for state in states)
        names = getattr(self.config, "return_dict", True) if wanted is None else wanted
        return output.to_tuple() if names is False else output

    def __setstate__(self, state: Any) -> None:
        """Restore a pickled backbone, whose class this process may not have seen."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        keep_recording(self)


def _close(closing: RewiredClosing, state: Tensor | None) -> Tensor | None:
    """Return a packed state [batch, tokens, streams, dim] closed; others unchanged."""
    return closing(state) if state is not None and state.dim() == 4 else state


def close_hidden_states(backbone: nn.Module) -> None:
    """Give a backbone the class whose hidden states are closed."""
    backbone.__class__ = derive(ClosedHiddenStates, type(backbone))
    keep_recording(backbone)


def keep_recording(model: nn.Module) -> None:
    """Register a model of a new class with transformers, so that it records the same outputs as before."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None:
        registry = capturing._CAN_RECORD_REGISTRY
        # A dictionary, up to some 5.x, by the text of the class; then a registry that takes the model itself.
        key = str(type(model)) if type(registry) is dict else model
        registry[key] = getattr(model, "_can_record_outputs", None)
