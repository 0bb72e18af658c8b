"""What rewire knows of a family of blocks: where they meet the residual path, and in which models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.derived_class import original_class
from siamesenorm.interop.rewire.block import RewiredBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One sublayer of a block: the attribute under which its connection comes, and the norms at its entrance.

    `norm` names the input norm, which the connection takes over; None where the sublayer reads the raw stream. `kept`
    names input norms that stay inside the sublayer instead: those of parallel attention and MLP, or conditioned ones.
    """

    kind: Literal["attention", "mlp"]
    connection: str
    norm: str | None = None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """How a block of one class meets the residual path.

    `final_norm` is the attribute of the module that holds the blocks (the backbone); `keeps_final_norm` leaves it in
    place after the closing. `projections` names the linear maps by the roles of this library's own ("query", "key",
    "value", "attention_output", "mlp_up", "mlp_gate", "mlp_output"), as far as they are maps of their own; `head_norms`
    are the roles whose output the host normalises itself; `head_dim` reads the width of a head off the attention.
    `output_norms` normalise what a sublayer returns, on a block without input norms: starting from scratch drops them.
    `pre_norm_refusal` says why the block is no Pre-Norm block. `check_backbone` raises UserError for a backbone whose
    use of the blocks is not understood; `adapt_backbone` makes its other outputs (hidden states) those of one stream.
    """

    rewired: type[RewiredBlock]
    slots: tuple[Slot, ...]
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
        return len(self.slots) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A model's stack of blocks: its name, the module that holds it, the blocks, and their anatomy."""

    name: str
    backbone: nn.Module
    blocks: nn.ModuleList | nn.Sequential
    anatomy: Anatomy

    @property
    def final_norm(self) -> str:
        """The qualified name of the final norm."""
        return qualify(self.name.rpartition(".")[0], self.anatomy.final_norm)

    def norms_of_slots(self) -> list[str]:
        """Return the qualified names of all input norms, taken over or kept."""
        return [
            f"{self.name}.{index}.{norm}"
            for index in range(len(self.blocks))
            for slot in self.anatomy.slots
            for norm in (*filter(None, (slot.norm,)), *slot.kept)
        ]


Reading = Callable[[nn.Module], Anatomy]
"""Return the anatomy of a block; raises UserError for a variant that is not understood."""


def qualify(prefix: str, name: str) -> str:
    """Return the name of a part of the module `prefix`, which is empty for the model itself."""
    return f"{prefix}.{name}" if prefix else name


def qualified_name(module: nn.Module) -> str:
    """Return the full name of a module's class, or of the host's if it was derived from that."""
    kind = original_class(type(module))
    return f"{kind.__module__}.{kind.__qualname__}"


def inside(backbone: str, block: str) -> Callable[[nn.Module], None]:
    """Return the check that blocks stand in a backbone of the one class whose loop over them is known."""

    def check(module: nn.Module) -> None:
        if qualified_name(module) != backbone:
            raise UserError(
                f"{block}s in a {qualified_name(module)}, which may use them in any way: rewire knows them in a "
                f"{backbone}"
            )

    return check
