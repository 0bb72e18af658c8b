"""What `rewire` says of each norm of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from siamesenorm.interop.foreign_norms import looks_like_norm
from siamesenorm.interop.rewire.anatomy import Host
from siamesenorm.interop.rewire.host_norms import HostNorms
from siamesenorm.norms import Norm, NormFunction
from siamesenorm.topologies import Topology, topology_name


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFate:
    """What became of one norm: "moved" into a connection, "kept" where it was, "dropped", or "new"."""

    name: str
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewireReport:
    """The topology as installed, the norms old and new, and in what the function differs.

    `differences` is empty where the function is kept up to rounding; a norm of a norm differs by its eps. It is None
    where nothing was to be preserved.
    """

    topology: Topology
    blocks: str
    norms: tuple[NormFate, ...]
    differences: tuple[str, ...] | None

    @property
    def function_kept(self) -> bool:
        """Whether the model computes what it did, up to rounding and the eps of norms that are applied twice."""
        return self.differences is not None

    @property
    def exact(self) -> bool:
        """Whether the model computes what it did, up to rounding alone."""
        return self.differences == ()

    def __str__(self) -> str:
        """Return the report as a table, one norm a line."""
        width = max(len(norm.name) for norm in self.norms)
        lines = [f"{norm.name:<{width}}  {norm.outcome:<7}  {norm.detail}" for norm in self.norms]
        return "\n".join([f"{self.blocks} rewired to {topology_name(self.topology)}: {self._function()}", *lines])

    def _function(self) -> str:
        if self.differences is None:
            return "starting from scratch, function not kept"
        return "function kept" + ("" if self.exact else f", but for: {'; '.join(self.differences)}")


def describe_gain(norm: Norm, *, preserve: bool) -> str:
    """Return an operator and where its gain stands: zero, one, carried over, or at another initial value."""
    function = norm.function()
    if function.gain is None or function.gain.is_meta:
        return type(norm).__name__
    gain = function.gain.detach().double() + function.offset
    other = "carried over" if preserve else "at its initial value"
    state = "zero" if not gain.any() else "one" if bool((gain == 1).all()) else other
    return f"{type(norm).__name__}, gain {state}"


def describe_move(norm: NormFunction | None, target: str) -> str:
    """Return what of a norm goes to another one."""
    parameters = [] if norm is None else [name for name in ("gain", "bias") if getattr(norm, name) is not None]
    if not parameters:
        return f"it has no gain and no bias; {target} takes its place"
    return f"its {' and '.join(parameters)} {'go' if len(parameters) > 1 else 'goes'} to {target}"


def norms_of(model: nn.Module) -> dict[str, Norm]:
    """Return the norms of this library in a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Norm)}


def fates_of_new_norms(model: nn.Module, known: Iterable[Norm], *, preserve: bool) -> tuple[NormFate, ...]:
    """Name every norm of a rewired model, those apart that it had before, and its gain."""
    old = {id(norm) for norm in known}
    return tuple(
        NormFate(name=name, outcome="new", detail=describe_gain(norm, preserve=preserve))
        for name, norm in norms_of(model).items()
        if id(norm) not in old
    )


def fates_of_old_norms(model: nn.Module, host: Host, old: HostNorms, *, preserve: bool) -> tuple[NormFate, ...]:
    """Say of every norm of a host, which is not rewired yet, what becomes of it."""
    outcomes = dict(_outcomes(host, old, preserve=preserve))
    fates = []
    for name, module in model.named_modules():
        if looks_like_norm(module):
            part = "part of the sublayer" if name.startswith(f"{host.name}.") else "outside of the blocks"
            outcome, detail = outcomes.get(name, ("kept", part))
            fates.append(NormFate(name=name, outcome=outcome, detail=detail))
    return tuple(fates)


def _outcomes(host: Host, old: HostNorms, *, preserve: bool) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what becomes of the norms that the anatomy names."""
    anatomy = host.anatomy

    def goes_to(norm: NormFunction | None, place: str) -> tuple[str, str]:
        if not preserve:
            return "dropped", "the new norms start at their initial values"
        return "moved", describe_move(norm, f"the last norm {place}")

    for index in range(len(host.blocks)):
        for slot in anatomy.slots:
            if slot.norm:
                name = f"{host.name}.{index}.{slot.norm}"
                yield name, goes_to(old.inputs[name], "before the sublayer")
            for path in slot.kept:
                yield f"{host.name}.{index}.{path}", ("kept", "the sublayer normalises its own input with it")
        for path in anatomy.output_norms:
            yield f"{host.name}.{index}.{path}", ("dropped", "the topology decides where outputs are normalised")
    kept = ("kept", "after the closing")
    yield host.final_norm, kept if anatomy.keeps_final_norm else goes_to(old.final, "of the closing")
