"""What rewire knows of a family of blocks, and how it finds them in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewire.block import RewiredBlock
from siamesenorm.topologies import Connection


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


Reading = Callable[[nn.Module], Anatomy]
"""Return the anatomy of a block; raises UserError for a variant that is not understood."""


def qualified_name(module: nn.Module) -> str:
    """Return the full name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def find_host(model: nn.Module, families: Mapping[str, Reading]) -> Host:
    """Return the one stack of known blocks of a model.

    Raises UserError, naming the module, for a model that was rewired before, has no known blocks, several stacks of
    them, mixed or shared blocks.
    """
    for name, module in model.named_modules():
        if isinstance(module, (RewiredBlock, Connection)):
            raise UserError(f"{name or 'the model'} is a {type(module).__name__}: the model has been rewired already")
    stacks = {
        name: stack for name, stack in stacks_of(model) if any(qualified_name(block) in families for block in stack)
    }
    if not stacks:
        raise UserError(f"{_unknown_structure(model)}; rewire knows {', '.join(sorted(_short(f) for f in families))}")
    if len(stacks) > 1:
        raise UserError(f"the model has {len(stacks)} stacks of blocks, {', '.join(stacks)}: rewire one backbone alone")
    [(name, blocks)] = stacks.items()
    _refuse_mixed(name, blocks)
    backbone = model.get_submodule(name.rpartition(".")[0])
    anatomy = families[qualified_name(blocks[0])](blocks[0])
    if anatomy.check_backbone:
        anatomy.check_backbone(backbone)
    _refuse_shared_norms(model, name, blocks, anatomy)
    return Host(name=name, backbone=backbone, blocks=blocks, anatomy=anatomy)


def stacks_of(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Yield the names and modules of everything that holds modules in a row."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            yield name, module


def _short(family: str) -> str:
    return family.rpartition(".")[2]


def _unknown_structure(model: nn.Module) -> str:
    """Say what the model's longest row of blocks is, which is what its owner would expect to be found."""
    rows = list(stacks_of(model))
    if not rows:
        return f"the structure of {type(model).__name__} is unknown: it has no list of blocks"
    # A Sequential may be a stem or an MLP as well: it counts where it is longer than every list.
    name, stack = max(rows, key=lambda row: (len(row[1]), isinstance(row[1], nn.ModuleList)))
    return f"the structure of {type(model).__name__} is unknown: {name}.0 is a {qualified_name(stack[0])}"


def _refuse_mixed(name: str, blocks: nn.ModuleList | nn.Sequential) -> None:
    seen: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if type(block) is not type(blocks[0]):
            raise UserError(
                f"{name}.{index} is a {type(block).__name__} among {type(blocks[0]).__name__}s: rewire wants blocks of "
                "one class"
            )
        if id(block) in seen:
            raise UserError(f"{name}.{index} is {name}.{seen[id(block)]} again: shared blocks cannot be rewired")
        seen[id(block)] = index


def _refuse_shared_norms(model: nn.Module, name: str, blocks: nn.ModuleList | nn.Sequential, anatomy: Anatomy) -> None:
    """Refuse a norm on the residual path that stands under two names, as a module or through its parameters."""
    backbone = name.rpartition(".")[0]
    paths = [
        f"{name}.{index}.{norm}"
        for index in range(len(blocks))
        for slot in anatomy.slots
        for norm in (*filter(None, (slot.norm,)), *slot.kept)
    ]
    paths.append(f"{backbone}.{anatomy.final_norm}".lstrip("."))
    owners: dict[int, str] = {}
    for other, module in model.named_modules(remove_duplicate=False):
        # An absent dropout or norm may be one Identity everywhere: only what has parameters can be shared.
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        for key in [id(module), *own] if own else []:
            first = owners.setdefault(key, other)
            if first != other and (other in paths or first in paths):
                raise UserError(f"{other} shares its norm with {first}: give each sublayer its own norm first")
