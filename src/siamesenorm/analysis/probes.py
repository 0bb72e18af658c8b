"""See the streams of a model from outside: in its connections, or else at the edges of its blocks.

A connection's streams are seen in `write`, which gets them settled together with the sublayer's output. `write` is
wrapped only while its block runs, and hooks stand on the blocks only while a step is measured, so that a copy of the
model never carries a probe. What a backward pass computes again is not counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.analysis.measurements import Key, Measurements, largest, mean_rms
from siamesenorm.errors import UserError
from siamesenorm.topologies import Closing, Connection, Streams


class Hook:
    """A hook for one module alone: copies and pickles of that module have a hook that does nothing."""

    def __init__(self, module: nn.Module | None = None, action: Callable[..., None] | None = None) -> None:
        self.module, self.action = module, action

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        """Act if the module is ours."""
        if self.action is not None and module is self.module:
            self.action(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Probe:
    """Stands at the two ends of a module's forward pass while a step is measured."""

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
        """See what goes in."""

    def leave(self, into: Measurements, arguments: tuple[Any, ...], result: Any) -> None:
        """See what comes out: None where the forward pass failed."""

    @property
    def counts(self) -> bool:
        """Whether the pass is one of training: no evaluation, and no recomputation inside a backward pass."""
        return (self.module.training or torch.is_grad_enabled()) and torch._C._current_graph_task_id() == -1


class ConnectionProbe(Probe):
    """The streams in the connections of one block, as every sublayer meets them."""

    def __init__(self, block: nn.Module, connections: Mapping[str, Connection], names: tuple[str, ...]) -> None:
        super().__init__(block)
        self.connections, self.names = connections, names

    def enter(self, into: Measurements, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Wrap the writes; raises UserError where another monitor did."""
        if not self.counts:
            return
        for name, connection in self.connections.items():
            if "write" in vars(connection):
                raise UserError(f"the streams of {name} are monitored already: close the other monitor first")
            vars(connection)["write"] = partial(self._write, into, name, connection.write)

    def leave(self, into: Measurements, arguments: tuple[Any, ...], result: Any) -> None:
        """Give the writes back."""
        for connection in self.connections.values():
            vars(connection).pop("write", None)

    def _write(
        self,
        into: Measurements,
        name: str,
        write: Callable[[Streams, Tensor], Streams],
        streams: Streams,
        output: Tensor,
    ) -> Streams:
        written = write(streams, output)
        with torch.no_grad():
            into.add(("sublayer", name, "output"), mean_rms(output))
            settled = name_streams(streams, self.names, output)
            # A pending write has changed nothing yet: it hands the output on to the next read.
            changed = name_streams(written, self.names, output) if len(written) <= len(streams) else {}
            for stream, x in settled.items():
                measure_stream(into, ("stream", name, stream), x)
                if stream in changed:
                    into.add(("stream", name, stream, "change"), mean_rms(changed[stream] - x))
        return written


class ClosingProbe(Probe):
    """The streams as they leave the last block, where no write is pending there."""

    def __init__(self, closing: Closing, names: tuple[str, ...]) -> None:
        super().__init__(closing)
        self.names = names

    def leave(self, into: Measurements, arguments: tuple[Any, ...], result: Any) -> None:
        """Measure the streams that were closed."""
        if result is None or len(arguments[0]) != len(self.names) or not self.counts:
            return
        with torch.no_grad():
            for stream, x in name_streams(arguments[0], self.names, result).items():
                measure_stream(into, ("end", stream), x)


class BlockProbe(Probe):
    """The residual stream of a block of any model: the first tensor that goes in, and the first that comes out.

    The output is what the block adds, O = out - in; it is not measured where the block changes its input in place.
    """

    def __init__(self, name: str, block: nn.Module, *, last: bool) -> None:
        super().__init__(block)
        self.name, self.last = name, last
        self._entered: list[tuple[Tensor, int] | None] = []

    def enter(self, into: Measurements, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Measure what goes in."""
        stream = first_tensor((*arguments, *named.values())) if self.counts else None
        self._entered.append(None if stream is None else (stream, stream._version))
        if stream is not None:
            with torch.no_grad():
                measure_stream(into, ("stream", self.name, "residual"), stream)

    def leave(self, into: Measurements, arguments: tuple[Any, ...], result: Any) -> None:
        """Measure what was added, and after the last block what comes out."""
        entered = self._entered.pop() if self._entered else None
        after = first_tensor(result)
        if entered is None or after is None:
            return
        before, version = entered
        with torch.no_grad():
            if before._version == version and before.shape == after.shape:
                added = mean_rms(after - before)
                into.add(("sublayer", self.name, "output"), added)
                into.add(("stream", self.name, "residual", "change"), added)
            if self.last:
                measure_stream(into, ("end", "residual"), after)


def measure_stream(into: Measurements, key: Key, x: Tensor) -> None:
    """Measure the magnitude of a stream [..., dim]: its RMS, averaged over tokens, and its largest entry."""
    into.add((*key, "rms"), mean_rms(x))
    into.add((*key, "max"), largest(x))


def name_streams(state: Streams, names: tuple[str, ...], like: Tensor) -> dict[str, Tensor]:
    """Return the streams of a state by name: its tensors as wide as `like` [..., dim], stacked ones one by one.

    Between read and write a state may hold other tensors after its streams, such as weights. Without names, streams
    are numbered.
    """
    streams = [x for x in state if x.shape[-1:] == like.shape[-1:] and x.dim() in (like.dim(), like.dim() + 1)]
    names = names or tuple(f"stream{number}" for number in range(len(streams)))
    named: dict[str, Tensor] = {}
    for name, x in zip(names, streams, strict=False):
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
