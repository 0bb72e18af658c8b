"""What an analysis measures: a model on held-out samples, the parts of its residual path, and changes that are undone.

An analysis of a trained run is an `Evaluation`; of another model it is its `measure`, applied to a `HeldOut`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from siamesenorm.analysis.probes import ClosingProbe, ConnectionProbe, plan_probes, topology_of
from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation import Subject
from siamesenorm.models.block import Block
from siamesenorm.tasks.task import Task
from siamesenorm.topologies import Closing, Connection, ResidualSpec, Streams, Topology
from siamesenorm.topologies.boundary_family import BoundaryClosing, BoundaryConnection
from siamesenorm.topologies.topology import transformer_places
from siamesenorm.world import World

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A model in evaluation mode with plain kernels, and its evaluation: every call runs it on the same samples."""

    model: nn.Module
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    """Returns the metrics of the model, "loss" among them."""
    unit: str = "nats/token"
    """The unit of the loss."""

    @classmethod
    def of(cls, subject: Subject, samples: int) -> HeldOut:
        """Return the subject's model on at most so many held-out samples.

        With fused kernels the model is built again: writes that stay pending are those of one depth.
        """
        model = subject.model
        if getattr(model, "kernels", "plain") != "plain":
            model = subject.task.build_model(subject.device, "plain").eval()
            model.load_state_dict(subject.model.state_dict())
        task, at_once = subject.task.on_part(samples), min(samples, subject.config.samples_at_once)
        return cls(model, lambda changed: task.evaluate(changed, at_once, World(device=subject.device)), task.unit)

    def run(self) -> None:
        """Run the model on all samples."""
        self.evaluate(self.model)

    def loss(self) -> float:
        """Return the mean loss."""
        return float(self.evaluate(self.model)["loss"])


@dataclass(frozen=True, kw_only=True)
class Analysis(ABC):
    """An analysis of a trained model, an `Evaluation`; `samples` is the number of held-out samples it reads."""

    name: ClassVar[str]
    uses_model: ClassVar[bool] = True

    samples: int = 64

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"samples is {self.samples}: choose at least 1")

    def options(self) -> Mapping[str, Any]:
        """Return every option."""
        return dataclasses.asdict(self)

    def require(self, task: Task) -> None:
        """Raise UserError for a task whose models cannot be analysed so, before anything is computed."""
        self.require_model(task.build_model(torch.device("meta")))

    def require_model(self, model: nn.Module) -> None:
        """Raise UserError for a model, which may be on the meta device, that cannot be analysed so."""
        if not any(isinstance(module, Connection) for module in model.modules()):
            raise UserError(f"{self.name}: a {type(model).__name__} has no residual topology: choose a Transformer")

    def run(self, subject: Subject) -> Results:
        """Return the results of a trained run."""
        return self.results(HeldOut.of(subject, self.samples))

    def results(self, held_out: HeldOut) -> Results:
        """Return the results with "samples", the number of samples that one evaluation reads: all, if there are fewer.

        A result of that name replaces it.
        """
        counts = [0]

        def evaluate(model: nn.Module) -> Mapping[str, float]:
            counts.append(0)
            return held_out.evaluate(model)

        def count(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            batch = next(each for each in (*arguments, *named.values()) if isinstance(each, Tensor))
            counts[-1] += len(batch)

        counting = held_out.model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            results = self.measure(dataclasses.replace(held_out, evaluate=evaluate))
        finally:
            counting.remove()
        return {"samples": max(counts), **results}

    @abstractmethod
    def measure(self, held_out: HeldOut) -> Results:
        """Return the results by name; lists are ordered by depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathParts:
    """The parts of a model's residual path by name, in order; of an autoencoder, encoder before decoder."""

    topology: Topology
    blocks: Mapping[str, nn.Module]
    connections: Mapping[str, Connection]
    closings: tuple[Closing, ...]

    @classmethod
    def of(cls, model: nn.Module) -> PathParts:
        """Return the parts of a model with connections; raises UserError for another one."""
        plan, topology = plan_probes(model), topology_of(model)
        if topology is None:
            raise UserError(f"a {type(model).__name__} has no residual topology: train or rewire a model with one")
        connections: dict[str, Connection] = {}
        for probe in plan.probes:
            connections |= probe.connections if isinstance(probe, ConnectionProbe) else {}
        closings = tuple(probe.module for probe in plan.probes if isinstance(probe, ClosingProbe))
        return cls(topology=topology, blocks=plan.blocks, connections=connections, closings=closings)  # type: ignore[arg-type]

    @property
    def stacks(self) -> dict[str, list[str]]:
        """The names of the blocks of each list of blocks, in the order of the closings."""
        found: dict[str, list[str]] = {}
        for block in self.blocks:
            found.setdefault(block.rpartition(".")[0], []).append(block)
        return found

    @property
    def ends(self) -> list[int]:
        """The number of blocks before each closing."""
        return list(accumulate(map(len, self.stacks.values())))

    def last_post_norm(self, stack: str) -> nn.Module:
        """Return the norm in the closing that follows the last addition, the identity where there is none.

        The closing's first norm is one if later blocks begin with one; else it is a final norm.
        """
        stacks = self.stacks
        closing, blocks = self.closings[list(stacks).index(stack)], stacks[stack]
        if not isinstance(closing, BoundaryClosing):
            return nn.Identity()
        later = self.connections_of(blocks[-1])[0] if len(blocks) > 1 else _first_of_second_block(self.topology)
        begins_with_norm = isinstance(later, BoundaryConnection) and not isinstance(later.post_norm, nn.Identity)
        return closing.post_norm if begins_with_norm else nn.Identity()

    def connections_of(self, block: str) -> list[Connection]:
        """Return the connections of one block."""
        return [connection for name, connection in self.connections.items() if name.startswith(f"{block}.")]


def _first_of_second_block(topology: Topology) -> Connection:
    """Return the connection with which a second block begins, for a stack that has none."""
    with torch.device("meta"):
        return topology.connection(transformer_places(2)[1][0], ResidualSpec(dim=1))


def stack_of(connection: str) -> str:
    """Return the name of the list of blocks that a connection is in."""
    return connection.rsplit(".", 2)[0]


# --- changes of a model that end with their context


@contextmanager
def replaced(module: nn.Module, method: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of a module's method inside the context; what was there before returns after it."""
    earlier = vars(module).get(method)
    vars(module)[method] = function
    try:
        yield
    finally:
        del vars(module)[method]
        if earlier is not None:
            vars(module)[method] = earlier


@contextmanager
def observed_reads(
    connections: Mapping[str, Connection], observer: Callable[[str, Streams, Tensor, Streams], None]
) -> Iterator[None]:
    """Call `observer(name, before, h, after)` after every read: the streams given to it, and what it returned."""

    def observing(name: str, connection: Connection) -> Callable[[Streams], tuple[Tensor, Streams]]:
        read = connection.read

        def observed_read(streams: Streams) -> tuple[Tensor, Streams]:
            h, after = read(streams)
            observer(name, streams, h, after)
            return h, after

        return observed_read

    with ExitStack() as contexts:
        for name, connection in connections.items():
            contexts.enter_context(replaced(connection, "read", observing(name, connection)))
        yield


@contextmanager
def without_blocks(path: PathParts, names: Collection[str]) -> Iterator[None]:
    """Remove blocks: the streams skip them unchanged, and their norms do not apply.

    The norm that follows the last addition of a block is in the next block's first connection, or in the closing. So
    the read, or closing, after removed blocks has the norm of the block before them, in place of the last removed
    one's: none after the embedding, where the closing alone keeps its own.
    """
    with ExitStack() as contexts:
        for name in names:
            contexts.enter_context(replaced(path.blocks[name], "forward", _passing(path.blocks[name])))
        for reader, post_norm in list(_readers_after(path, names)):
            contexts.callback(setattr, reader, "post_norm", reader.post_norm)
            reader.post_norm = post_norm
        yield


def _readers_after(path: PathParts, names: Collection[str]) -> Iterator[tuple[Any, nn.Module]]:
    """Yield what reads the streams after each row of removed blocks, with the norm of the block before the row."""
    for blocks, closing in zip(path.stacks.values(), path.closings, strict=True):
        before: nn.Module | None = None
        for block in blocks:
            reader = path.connections_of(block)[0]
            if not isinstance(reader, BoundaryConnection):
                return
            if block in names:
                before = reader.post_norm if before is None else before
            elif before is not None:
                yield reader, before
                before = None
        if before is not None and not isinstance(before, nn.Identity) and isinstance(closing, BoundaryClosing):
            yield closing, before


def _passing(block: nn.Module) -> Callable[..., Any]:
    if isinstance(block, Block):
        return lambda streams, *context: (streams, {})
    rewired: Any = block  # of another library: the first one opens the streams, all pass them packed
    return lambda hidden, *arguments, **named: rewired.leave(rewired.enter(hidden))


@contextmanager
def zeroed(connections: Iterable[Connection]) -> Iterator[None]:
    """Write zero in place of the outputs of sublayers: reads and writes, and their norms, act as before."""

    def zeroing(connection: Connection) -> Callable[[Streams, Tensor], Streams]:
        write = connection.write
        return lambda streams, output: write(streams, torch.zeros_like(output))

    with ExitStack() as contexts:
        for connection in connections:
            contexts.enter_context(replaced(connection, "write", zeroing(connection)))
        yield
