"""What `rewire` says of each norm of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from siamesenorm.interop.foreign_norms import looks_like_norm
from siamesenorm.interop.rewire.anatomy import Host
from siamesenorm.interop.rewire.parts import Parts
from siamesenorm.norms import Norm
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


def describe_gain(norm: Norm) -> str:
    """Return an operator and where its gain stands: zero, one, or carried over."""
    function = norm.function()
    if function.gain is None or function.gain.is_meta:
        return type(norm).__name__
    gain = function.gain.detach().double() + function.offset
    state = "zero" if not gain.any() else "one" if bool((gain == 1).all()) else "carried over"
    return f"{type(norm).__name__}, gain {state}"


def fates_of_norms(model: nn.Module, host: Host, parts: Parts, *, preserve: bool) -> tuple[NormFate, ...]:
    """Say of every norm of the host, and of every new one, what becomes of it; the host is not rewired yet."""
    anatomy = host.anatomy
    outcomes = dict(_outcomes(host, preserve=preserve))
    fates = []
    for name, module in model.named_modules():
        if looks_like_norm(module):
            part = "part of the sublayer" if name.startswith(f"{host.name}.") else "not on the residual path"
            outcome, detail = outcomes.get(name, ("kept", part))
            fates.append(NormFate(name=name, outcome=outcome, detail=detail))
    for index, connections in enumerate(parts.connections):
        for slot, connection in zip(anatomy.slots, connections, strict=True):
            fates.extend(_new_norms(f"{host.name}.{index}.{slot.connection}", connection))
    return (*fates, *_new_norms(f"{host.final_norm}.closing", parts.closing))


def _outcomes(host: Host, *, preserve: bool) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what becomes of the norms that the anatomy names."""
    anatomy = host.anatomy

    def goes_to(place: str) -> tuple[str, str]:
        moved = ("moved", f"its gain and bias go to the last norm {place}")
        return moved if preserve else ("dropped", f"new norms {place} start at their initial values")

    for index in range(len(host.blocks)):
        for slot in anatomy.slots:
            if slot.norm:
                yield f"{host.name}.{index}.{slot.norm}", goes_to("before the sublayer")
            for path in slot.kept:
                yield f"{host.name}.{index}.{path}", ("kept", "the sublayer normalises its own input with it")
        for path in anatomy.output_norms:
            yield f"{host.name}.{index}.{path}", ("dropped", "the topology decides where outputs are normalised")
    yield host.final_norm, ("kept", "after the closing") if anatomy.keeps_final_norm else goes_to("of the closing")


def _new_norms(prefix: str, part: nn.Module) -> list[NormFate]:
    norms = [(name, module) for name, module in part.named_modules() if isinstance(module, Norm)]
    return [NormFate(name=f"{prefix}.{name}", outcome="new", detail=describe_gain(norm)) for name, norm in norms]
