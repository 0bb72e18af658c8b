"""What `rewire` reports of each norm of a model, and of its function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import nn

from siamesenorm.interop.foreign_norms import looks_like_norm
from siamesenorm.interop.hosts.blocks import BlockStack
from siamesenorm.interop.hosts.wiring import HostNorms
from siamesenorm.norms import Inexact, Norm, NormFunction
from siamesenorm.topologies import Topology, topology_name


class NormOutcome(StrEnum):
    """What became of a norm: its parameters moved into a connection, it stayed, it was dropped, or it is new."""

    MOVED = "moved"
    KEPT = "kept"
    DROPPED = "dropped"
    NEW = "new"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFate:
    """What became of one norm; `detail` is for people."""

    name: str
    outcome: NormOutcome
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewireReport:
    """The topology as installed, the norms old and new, and in what the function differs.

    `differences` is empty where the function is kept up to rounding, and None where nothing was to be preserved.
    """

    topology: Topology
    blocks: str
    norms: tuple[NormFate, ...]
    differences: tuple[Inexact, ...] | None

    @property
    def function_kept(self) -> bool:
        """Whether the model computes what it did, up to rounding alone."""
        return self.differences == ()

    @property
    def bound(self) -> float | None:
        """The largest relative difference of a norm's output, over all tokens; None where it has no bound."""
        bounds = None if self.differences is None else [difference.bound for difference in self.differences]
        return None if bounds is None or None in bounds else max(filter(None, bounds), default=0.0)

    def __str__(self) -> str:
        """Return the report as a table, one norm a line."""
        width = max(len(norm.name) for norm in self.norms)
        lines = [f"{norm.name:<{width}}  {norm.outcome:<7}  {norm.detail}" for norm in self.norms]
        return "\n".join([f"{self.blocks} rewired to {topology_name(self.topology)}: {self._function()}", *lines])

    def _function(self) -> str:
        if self.differences is None:
            return "starting from scratch, function not kept"
        if self.function_kept:
            return "function kept"
        return f"function kept but for: {'; '.join(map(str, self.differences))}"


def describe_gain(norm: Norm, *, preserve: bool) -> str:
    """Return an operator and the state of its gain: zero, one, carried over, or at another initial value."""
    function = norm.function()
    if function.gain is None or function.gain.is_meta:
        return type(norm).__name__
    gain = function.gain.detach().double() + function.offset
    other = "carried over" if preserve else "at its initial value"
    state = "zero" if not gain.any() else "one" if bool((gain == 1).all()) else other
    return f"{type(norm).__name__}, gain {state}"


def describe_move(norm: NormFunction | None, target: str) -> str:
    """Return which parameters of a norm move to another one."""
    parameters = [] if norm is None else [name for name in ("gain", "bias") if getattr(norm, name) is not None]
    if not parameters:
        return f"it has no gain and no bias; {target} replaces it"
    return f"its {' and '.join(parameters)} {'go' if len(parameters) > 1 else 'goes'} to {target}"


def norms_of(model: nn.Module) -> dict[str, Norm]:
    """Return the norms of this library in a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Norm)}


def fates_of_new_norms(model: nn.Module, known: Iterable[Norm], *, preserve: bool) -> tuple[NormFate, ...]:
    """Return every norm of a rewired model, except those that it had before, and its gain."""
    old = {id(norm) for norm in known}
    return tuple(
        NormFate(name=name, outcome=NormOutcome.NEW, detail=describe_gain(norm, preserve=preserve))
        for name, norm in norms_of(model).items()
        if id(norm) not in old
    )


def fates_of_old_norms(model: nn.Module, stack: BlockStack, old: HostNorms, *, preserve: bool) -> tuple[NormFate, ...]:
    """Return what becomes of every norm of a host, which is not rewired yet."""
    outcomes = {fate.name: fate for fate in _fates(stack, old, preserve=preserve)}
    fates = []
    for name, module in model.named_modules():
        if looks_like_norm(module):
            part = "part of the sublayer" if name.startswith(f"{stack.name}.") else "outside of the blocks"
            fates.append(outcomes.get(name) or NormFate(name=name, outcome=NormOutcome.KEPT, detail=part))
    return tuple(fates)


def _fates(stack: BlockStack, old: HostNorms, *, preserve: bool) -> Iterator[NormFate]:
    """Yield what becomes of the norms that the specification of the blocks names."""
    spec = stack.spec

    def moved(name: str, norm: NormFunction | None, place: str) -> NormFate:
        if not preserve:
            detail = "the new norms start at their initial values"
            return NormFate(name=name, outcome=NormOutcome.DROPPED, detail=detail)
        return NormFate(name=name, outcome=NormOutcome.MOVED, detail=describe_move(norm, f"the last norm {place}"))

    for index in range(len(stack.blocks)):
        for sublayer in spec.sublayers:
            if sublayer.norm:
                name = f"{stack.name}.{index}.{sublayer.norm}"
                yield moved(name, old.inputs[name], "before the sublayer")
            for path in sublayer.kept:
                detail = "the sublayer normalises its own input with it"
                yield NormFate(name=f"{stack.name}.{index}.{path}", outcome=NormOutcome.KEPT, detail=detail)
        for path in spec.output_norms:
            detail = "the topology decides where outputs are normalised"
            yield NormFate(name=f"{stack.name}.{index}.{path}", outcome=NormOutcome.DROPPED, detail=detail)
    if spec.keeps_final_norm:
        yield NormFate(name=stack.final_norm, outcome=NormOutcome.KEPT, detail="after the closing")
    else:
        yield moved(stack.final_norm, old.final, "of the closing")
