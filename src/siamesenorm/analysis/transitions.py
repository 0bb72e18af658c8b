"""Transitions of the streams: what each sublayer does with their state, in fp64, at the state of one sample."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from siamesenorm.analysis.held_out import HeldOut, PathParts, replaced, stack_of
from siamesenorm.errors import UserError
from siamesenorm.models.block import Block, split_losses
from siamesenorm.sublayers.sublayer import NO_CONTEXT
from siamesenorm.topologies import Connection, Opening, Streams
from siamesenorm.topologies.boundary_family import BoundaryConnection, times
from siamesenorm.topologies.post_norm_family import SpanNorm
from siamesenorm.topologies.topology import Reader

Map = Callable[..., Any]

# --- the model in fp64, and one sample of its inputs


def in_double(model: nn.Module) -> Any:
    """Return a copy of a model that computes in fp64 throughout, its streams and the inputs of sublayers, too."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if isinstance(module, Opening):
            module.residual_dtype = None
        if isinstance(module, Reader):
            module.compute_dtype = None
    return exact


class _FoundInputs(Exception):  # noqa: N818 - no error: it ends a forward pass that has been seen
    def __init__(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.arguments, self.named = arguments, named


def first_inputs(held_out: HeldOut, tokens: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model for one held-out sample, in fp64; token ids, [1, tokens], are the first ones.

    In a causal model the first tokens do not depend on the others.
    """

    def stop(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _FoundInputs(arguments, named)

    def first(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value[:1].double() if value.is_floating_point() else value[:1]
        reads_text = hasattr(getattr(held_out.model, "config", None), "vocab_size") or hasattr(
            held_out.model, "generate"
        )
        return value[:, :tokens] if reads_text and value.dim() == 2 else value

    handle = held_out.model.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        held_out.run()
    except _FoundInputs as found:
        return tuple(map(first, found.arguments)), {name: first(value) for name, value in found.named.items()}
    finally:
        handle.remove()
    raise UserError("the evaluation does not run the model: there is nothing to analyse")


# --- transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One sublayer's map of the streams, and the state at which it is differentiated.

    In the boundary family the first stream of a state is post-normalised, and `next_post_norm` is the norm with which
    the next read begins; elsewhere it is None.
    """

    name: str
    connection: Connection
    sublayer: Map
    state: Streams
    next_post_norm: nn.Module | None

    def step(self, *streams: Tensor) -> Streams:
        """Return the state after the sublayer."""
        if self.next_post_norm is None:
            return self.connection(streams, self.sublayer)  # type: ignore[no-any-return]
        first, *others = self.connection.write(streams, self.sublayer(self.read(*streams)))
        return (self.next_post_norm(first), *others)

    def read(self, *streams: Tensor) -> Tensor:
        """Return the sublayer's input of streams whose first one is post-normalised."""
        connection: Any = self.connection
        total = connection.gate(streams[0])
        if connection.identity_norm is not None:
            total = total + connection.identity_norm(streams[1])
        return self.normalised(total)

    def normalised(self, total: Tensor) -> Tensor:
        """Return the norm of the sum."""
        connection: Any = self.connection
        return connection.to_compute(times(connection.last_norm(total), connection.input_scale))  # type: ignore[no-any-return]


def find_transitions(
    model: nn.Module, path: PathParts, arguments: tuple[Any, ...], named: dict[str, Any]
) -> list[Transition]:
    """Run the model once and return the transition of every sublayer at the state it had."""
    states: dict[Connection, Streams] = {}
    sublayers: dict[Connection, Map] = {}

    def enter_block(block: Any, given: tuple[Any, ...]) -> None:
        context = given[1] if len(given) > 1 else NO_CONTEXT
        for name, connection in zip(block.names, block.connections, strict=True):
            sublayers[connection] = partial(_output, getattr(block, name), context)

    def enter_connection(connection: Any, given: tuple[Any, ...]) -> None:
        sublayers[connection] = given[1]

    def recording(connection: Connection) -> Map:
        read = connection.read

        def recorded(streams: Streams) -> tuple[Tensor, Streams]:
            states[connection] = streams
            return read(streams)

        return recorded

    with ExitStack() as contexts:
        for block in path.blocks.values():
            if isinstance(block, Block):
                contexts.callback(block.register_forward_pre_hook(enter_block).remove)
        for connection in path.connections.values():
            contexts.callback(connection.register_forward_pre_hook(enter_connection).remove)
            contexts.enter_context(replaced(connection, "read", recording(connection)))
        model(*arguments, **named)
    found = []
    connections = list(path.connections.items())
    for index, (name, connection) in enumerate(connections):
        state, next_post_norm = states[connection], None
        if isinstance(connection, BoundaryConnection) and not isinstance(path.topology, SpanNorm):
            following = next((c for n, c in connections[index + 1 :] if stack_of(n) == stack_of(name)), None)
            next_post_norm = (
                following.post_norm
                if isinstance(following, BoundaryConnection)
                else path.last_post_norm(stack_of(name))
            )
            state = (connection.post_norm(state[0]), *state[1:])
        found.append(
            Transition(
                name=name,
                connection=connection,
                sublayer=sublayers[connection],
                state=state,
                next_post_norm=next_post_norm,
            )
        )
    return found


def _output(sublayer: nn.Module, context: Any, h: Tensor) -> Tensor:
    return split_losses(sublayer(h, context))[0]
