"""What `rewire` says of each norm of a model."""

from __future__ import annotations

from dataclasses import dataclass

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
