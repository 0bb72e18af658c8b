"""Probes of the streams of a model, in its connections or else at the edges of its blocks, and where to attach them.

The streams of a connection are measured between read and write, together with the output of the sublayer. Writes are
observed only while their block runs, and hooks are registered on the blocks only while a step is measured, so that a
copy of the model never carries a probe. What a backward pass recomputes is not counted again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from siamesenorm.analysis.measurements import Measurements, mean_rms, tokens_of
from siamesenorm.errors import UserError
from siamesenorm.models.block import Block
from siamesenorm.topologies import Closing, Connection, Streams, Topology
from siamesenorm.topologies.hyper_connections import MultiStream

Blocks = str | Sequence[nn.Module] | None
"""The path of a list of blocks, or blocks; None to find them."""
StreamNames = Callable[[int], tuple[str, ...]]
"""Returns the names of so many streams."""


class Hook:
    """A hook of one module: copies and pickles of that module have a hook that does nothing."""

    def __init__(self, module: nn.Module | None = None, action: Callable[..., None] | None = None) -> None:
        self.module, self.action = module, action

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        """Call the action if the module is the one that the hook was made for."""
        if self.action is not None and module is self.module:
            self.action(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Probe:
    """Measures before and after the forward pass of a module, while a step is measured."""

    in_evaluation = False
    """Whether it measures in evaluation mode without gradients, too."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextmanager
    def attached(self, into: Measurements) -> Iterator[None]:
        """Measure inside the context."""
        enter, leave = (Hook(self.module, partial(action, into)) for action in (self.enter, self.leave))
        before = self.module.register_forward_pre_hook(enter, with_kwargs=True)
        after = self.module.register_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def enter(self, into: Measurements, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Measure the arguments."""

    def leave(self, into: Measurements, arguments: tuple[Any, ...], result: Any) -> None:
        """Measure the result: None where the forward pass failed."""

    @property
    def counts(self) -> bool:
        """Whether this is a forward pass to measure: of training, or any one `in_evaluation`; no recomputation."""
        seen = self.in_evaluation or self.module.training or torch.is_grad_enabled()
        return seen and torch._C._current_graph_task_id() == -1


@contextmanager
def observe_streams(model: nn.Module, observer: Callable[[str, Streams, Tensor, Streams], None]) -> Iterator[None]:
    """Call `observer(name, streams, output, written)` after every write of the connections of a model.

    See `Connection.observed`; `name` is the path of the connection. A block that was compiled is compiled again with
    the observer inside: `torch.compiler.set_stance("force_eager")` prevents it. A copy made inside the context has
    observed writes, too. Raises UserError where a connection has an observer already.
    """
    with ExitStack() as contexts:
        for name, module in model.named_modules():
            if isinstance(module, Connection):
                contexts.enter_context(module.observed(partial(observer, name)))
        yield


class ConnectionProbe(Probe):
    """Measures the streams at every connection of one block, before and after the write.

    Of a block that `Module.compile` compiled, it measures the streams before it and their change by it, outside the
    graph, which stays as it is; where the block before left a write pending, they are the streams before that write.
    """

    def __init__(
        self, name: str, block: nn.Module, connections: Mapping[str, Connection], topology: Topology | None
    ) -> None:
        super().__init__(block)
        self.name, self.connections, self.names = name, connections, _names_of(topology)
        self._is_stacked = isinstance(topology, MultiStream)
        self._observed = ExitStack()

    @property
    def is_compiled(self) -> bool:
        """Whether the block is one of this package that was compiled as a graph of its own."""
        return isinstance(self.module, Block) and self.module._compiled_call_impl is not None

    @contextmanager
    def attached(self, into: Measurements) -> Iterator[None]:
        """Measure inside the context; a copy of a compiled block has no compiled call, and so no probe."""
        if not self.is_compiled:
            with super().attached(into):
                yield
            return
        block, compiled = self.module, cast(Callable[..., Any], self.module._compiled_call_impl)

        def measured(streams: Streams, *others: Any, **named: Any) -> Any:
            result = compiled(streams, *others, **named)
            if self.counts:
                self._measure_block(into, streams, result[0])
            return result

        block._compiled_call_impl = measured
        try:
            yield
        finally:
            block._compiled_call_impl = compiled

    def enter(self, into: Measurements, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Observe the writes; raises UserError where another monitor does."""
        if self.counts:
            for name, connection in self.connections.items():
                self._observed.enter_context(connection.observed(partial(self._measure, into, name)))

    def leave(self, into: Measurements, arguments: tuple[Any, ...], result: Any) -> None:
        """End the observation."""
        self._observed.close()

    @torch.no_grad()
    def _measure_block(self, into: Measurements, before: Streams, after: Streams) -> None:
        like = before[0].select(-2, 0) if self._is_stacked else before[0]
        changed = name_streams(after, self.names, like)
        for stream, x in name_streams(before, self.names, like).items():
            into.add_stream(("sublayers", self.name, "streams", stream), x)
            if stream in changed:
                into.add_rms(("sublayers", self.name, "streams", stream, "change"), changed[stream] - x)

    @torch.no_grad()
    def _measure(self, into: Measurements, name: str, streams: Streams, output: Tensor, written: Streams) -> None:
        into.add_rms(("sublayers", name, "output"), output)
        # A pending write has changed nothing yet: the next read adds the output.
        changed = name_streams(written, self.names, output) if len(written) <= len(streams) else {}
        for stream, x in name_streams(streams, self.names, output).items():
            into.add_stream(("sublayers", name, "streams", stream), x)
            if stream in changed:
                into.add_rms(("sublayers", name, "streams", stream, "change"), changed[stream] - x)


class ClosingProbe(Probe):
    """Measures the streams after the last block, where no write is pending."""

    def __init__(self, closing: Closing, names: StreamNames) -> None:
        super().__init__(closing)
        self.names = names

    def leave(self, into: Measurements, arguments: tuple[Any, ...], result: Any) -> None:
        """Measure the streams that the closing was given."""
        if result is None or not self.counts or len(arguments[0]) != len(self.names(len(arguments[0]))):
            return
        with torch.no_grad():
            for stream, x in name_streams(arguments[0], self.names, result).items():
                into.add_stream(("end", stream), x)


class BlockProbe(Probe):
    """Measures the residual stream of a block of any model: its first floating tensor, as argument and as result.

    The output is what the block adds, O = result - argument, unless the block changes its argument in place.
    """

    def __init__(self, name: str, block: nn.Module, *, last: bool) -> None:
        super().__init__(block)
        self.name, self.last = name, last
        self._entered: list[tuple[Tensor, int] | None] = []

    def enter(self, into: Measurements, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Measure the stream before the block."""
        stream = first_tensor((*arguments, *named.values())) if self.counts else None
        self._entered.append(None if stream is None else (stream, stream._version))
        if stream is not None:
            with torch.no_grad():
                into.add_stream(("sublayers", self.name, "streams", "residual"), stream)

    def leave(self, into: Measurements, arguments: tuple[Any, ...], result: Any) -> None:
        """Measure what the block added, and the stream after the last block."""
        entered = self._entered.pop() if self._entered else None
        after = first_tensor(result)
        if entered is None or after is None:
            return
        before, version = entered
        with torch.no_grad():
            if before._version == version and before.shape == after.shape:
                added, tokens = mean_rms(after - before), tokens_of(after)
                into.add(("sublayers", self.name, "output"), added, tokens)
                into.add(("sublayers", self.name, "streams", "residual", "change"), added, tokens)
            if self.last:
                into.add_stream(("end", "residual"), after)


def name_streams(state: Streams, names: StreamNames, like: Tensor) -> dict[str, Tensor]:
    """Return the streams of a state by name: its tensors as wide as `like` [..., dim], stacked ones one by one.

    Between read and write a state may hold other tensors after its streams, such as weights.
    """
    streams = [x for x in state if x.shape[-1:] == like.shape[-1:] and x.dim() in (like.dim(), like.dim() + 1)]
    named: dict[str, Tensor] = {}
    for name, x in zip(names(len(streams)), streams, strict=False):
        if x.dim() == like.dim():
            named[name] = x
        else:
            named.update({f"{name}[{copy}]": one for copy, one in enumerate(x.unbind(-2))})
    return named


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating tensor in what a module takes or returns."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return None
    return next((found for found in map(first_tensor, value) if found is not None), None)


# --- where to attach them

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of a path that come from torch: compilation, activation checkpointing, sharding."""
ADAPTED = re.compile(r"\.modules_to_save\.[^.]+")
"""Where PEFT keeps the trained copy of a module, beside the frozen `original_module`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """The blocks of a model by name, the names of its streams, and the probes that measure them."""

    blocks: Mapping[str, nn.Module]
    streams: tuple[str, ...]
    probes: tuple[Probe, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether the blocks were compiled one by one: they are then measured at their edges."""
        return any(isinstance(each, ConnectionProbe) and each.is_compiled for each in self.probes)


def plan_probes(model: nn.Module, blocks: Blocks = None) -> ProbePlan:
    """Return where to measure the streams of a model.

    In its connections, if it has any and no blocks are given; else at the edges of the blocks given, or of its longest
    list of modules of one class. Raises UserError, with the candidates, where there is not exactly one such list.
    """
    connections = {
        clean(name): module
        for name, module in model.named_modules()
        if isinstance(module, Connection) and not name.endswith(".original_module")
    }
    if connections and blocks is None:
        return _plan_for_connections(model, connections)
    found = _given_blocks(model, blocks) if blocks is not None else _longest_list(model)
    last = len(found) - 1
    probes = tuple(BlockProbe(name, block, last=i == last) for i, (name, block) in enumerate(found.items()))
    return ProbePlan(blocks=found, streams=("residual",), probes=probes)


def _plan_for_connections(model: nn.Module, connections: Mapping[str, Connection]) -> ProbePlan:
    modules = {clean(name): module for name, module in model.named_modules()}
    inside: dict[str, dict[str, Connection]] = {}
    for name, connection in connections.items():
        owner = name.rpartition(".")[0]
        while owner and isinstance(modules[owner], CONTAINERS):
            owner = owner.rpartition(".")[0]
        inside.setdefault(owner, {})[name.removesuffix("_connection")] = connection
    blocks = {name: modules[name] for name in inside}
    topology = topology_of(model)
    names = _names_of(topology)
    closings = [ClosingProbe(module, names) for module in model.modules() if isinstance(module, Closing) and topology]
    probes = (*(ConnectionProbe(name, blocks[name], own, topology) for name, own in inside.items()), *closings)
    return ProbePlan(blocks=blocks, streams=topology.stream_names if topology else (), probes=probes)


def _names_of(topology: Topology | None) -> StreamNames:
    return topology.name_streams if topology else lambda count: tuple(f"stream{number}" for number in range(count))


def topology_of(model: nn.Module) -> Topology | None:
    """Return the topology of a model or of its configuration, None where it has none."""
    holders = (holder for module in model.modules() for holder in (module, getattr(module, "config", None)))
    topologies = (getattr(holder, "topology", None) for holder in holders)
    return next((topology for topology in topologies if isinstance(topology, Topology)), None)


def _given_blocks(model: nn.Module, blocks: str | Sequence[nn.Module]) -> dict[str, nn.Module]:
    names = {module: clean(name) for name, module in model.named_modules()}
    if isinstance(blocks, str):
        found = (module for module, name in names.items() if name == clean(blocks))
        chosen = list(next(found, nn.Identity()).children())
    else:
        chosen = list(blocks)
    if not chosen:
        raise UserError(f"{type(model).__name__} has no blocks at {blocks!r}: give the path of a list of blocks")
    for block in chosen:
        if block not in names:
            raise UserError(f"a {type(block).__name__} is not part of {type(model).__name__}: give blocks of the model")
    return {names[block]: block for block in chosen}


def _longest_list(model: nn.Module) -> dict[str, nn.Module]:
    lists = dict(_outermost_lists(model, ""))
    longest = max(map(len, lists.values()), default=0)
    candidates = [name for name, blocks in lists.items() if len(blocks) == longest]
    if len(candidates) != 1:
        found = f"several lists of blocks, {', '.join(candidates)}" if candidates else "no list of blocks of one class"
        raise UserError(f"{type(model).__name__} has {found}: choose one by blocks='path.of.the.list'")
    name = candidates[0]
    return {clean(f"{name}.{key}"): block for key, block in lists[name].items()}


def _outermost_lists(module: nn.Module, name: str) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the lists of two or more modules of one class, but none inside another: experts are inside layers."""
    children = dict(module.named_children())
    alike = len(children) > 1 and len({type(child) for child in children.values()}) == 1
    if isinstance(module, nn.ModuleList | nn.Sequential) and alike:
        yield name, children
        return
    for key, child in children.items():
        yield from _outermost_lists(child, f"{name}.{key}" if name else key)


def clean(name: str) -> str:
    """Return a module's path without the wrappers in it."""
    return ".".join(part for part in ADAPTED.sub("", name).split(".") if part not in WRAPPERS)
