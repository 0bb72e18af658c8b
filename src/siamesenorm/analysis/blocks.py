"""Find where the residual streams of a model can be measured: connections of a topology, or a list of blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from siamesenorm.analysis.probes import BlockProbe, ClosingProbe, ConnectionProbe, Probe
from siamesenorm.errors import UserError
from siamesenorm.topologies import Closing, Connection, Topology

Blocks = str | Sequence[nn.Module] | None
"""The path of a list of blocks, or blocks; None to find them."""

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


def plan_probes(model: nn.Module, blocks: Blocks = None) -> ProbePlan:
    """Return where to measure the streams of a model.

    In its connections, if it has any and no blocks are given; else at the edges of the blocks given, or of its longest
    list of modules of one class. Raises UserError, with the candidates, where there is not exactly one such list.
    """
    connections = _connections(model)
    if connections and blocks is None:
        return _plan_for_connections(model, connections)
    found = _given_blocks(model, blocks) if blocks is not None else _longest_list(model)
    last = len(found) - 1
    probes = tuple(BlockProbe(name, block, last=i == last) for i, (name, block) in enumerate(found.items()))
    return ProbePlan(blocks=found, streams=("residual",), probes=probes)


def _connections(model: nn.Module) -> dict[str, Connection]:
    """Return the connections that run, by name."""
    return {
        clean(name): module
        for name, module in model.named_modules()
        if isinstance(module, Connection) and not name.endswith(".original_module")
    }


def _plan_for_connections(model: nn.Module, connections: Mapping[str, Connection]) -> ProbePlan:
    modules = {clean(name): module for name, module in model.named_modules()}
    inside: dict[str, dict[str, Connection]] = {}
    for name, connection in connections.items():
        owner = name.rpartition(".")[0]
        while owner and isinstance(modules[owner], CONTAINERS):
            owner = owner.rpartition(".")[0]
        inside.setdefault(owner, {})[name.removesuffix("_connection")] = connection
    blocks = {name: modules[name] for name in inside}
    names = _stream_names(model)
    closings = [ClosingProbe(module, names) for module in model.modules() if isinstance(module, Closing) and names]
    probes = (*(ConnectionProbe(blocks[name], own, names) for name, own in inside.items()), *closings)
    return ProbePlan(blocks=blocks, streams=names, probes=probes)


def _stream_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the streams in the topology of the model; none where the model has no topology."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            topology = getattr(holder, "topology", None)
            if isinstance(topology, Topology):
                return topology.stream_names
    return ()


def _given_blocks(model: nn.Module, blocks: str | Sequence[nn.Module]) -> dict[str, nn.Module]:
    names = {module: clean(name) for name, module in model.named_modules()}
    if isinstance(blocks, str):
        found = [module for module, name in names.items() if name == clean(blocks)]
        chosen: list[nn.Module] = list(found[0].children()) if found else []
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
    (name,) = candidates
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
