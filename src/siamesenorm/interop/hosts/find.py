"""Find the blocks in a model, and refuse every model whose residual path is not surely understood."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.hosts import decoders, vision
from siamesenorm.interop.hosts.blocks import BlockSpec, BlockStack, RewiredBlock, SpecReader, qualified_name
from siamesenorm.topologies import Connection

FAMILIES: dict[str, SpecReader] = {**decoders.BLOCKS, **vision.BLOCKS}
"""By the full name of a block's class: a subclass may compute anything."""

Blocks = nn.ModuleList | nn.Sequential


def find_blocks(model: nn.Module) -> BlockStack:
    """Return the one stack of known blocks of a model.

    Raises UserError, naming the module, for a model that was rewired before, has no known blocks, several stacks of
    them, mixed, shared or patched blocks, and norms that sublayers share.
    """
    for name, module in model.named_modules():
        if isinstance(module, RewiredBlock):
            raise UserError(
                f"{name or 'the model'} is a {type(module).__name__}: the model has been rewired already; rewire the "
                "original"
            )
        if isinstance(module, Connection):
            raise UserError(
                f"{name or 'the model'} is a {type(module).__name__}: the blocks have connections of this library "
                "already; build them with another topology"
            )
    stacks = {
        name: stack for name, stack in _rows_of(model) if any(qualified_name(block) in FAMILIES for block in stack)
    }
    if not stacks:
        known = ", ".join(sorted(family.rpartition(".")[2] for family in FAMILIES))
        raise UserError(f"{_unknown_structure(model)}; rewire supports {known}")
    if len(stacks) > 1:
        raise UserError(f"the model has {len(stacks)} stacks of blocks, {', '.join(stacks)}: rewire one backbone alone")
    [(name, blocks)] = stacks.items()
    _refuse_mixed(name, blocks)
    backbone = model.get_submodule(name.rpartition(".")[0])
    spec = FAMILIES[qualified_name(blocks[0])](blocks[0])
    _refuse_other_variants(name, blocks, spec)
    if spec.check_backbone:
        spec.check_backbone(backbone)
    stack = BlockStack(name=name, backbone=backbone, blocks=blocks, spec=spec)
    _refuse_patched(stack)
    _refuse_shared_norms(model, stack)
    return stack


def _rows_of(model: nn.Module) -> Iterator[tuple[str, Blocks]]:
    """Yield the names and modules of everything that holds modules in a row."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            yield name, module


def _unknown_structure(model: nn.Module) -> str:
    """Name the model's longest row of blocks, which is what its owner would expect to be found."""
    rows = list(_rows_of(model))
    if not rows:
        return f"the structure of {type(model).__name__} is unknown: it has no list of blocks"
    # A Sequential may be a stem or an MLP as well: it counts where it is longer than every list.
    name, stack = max(rows, key=lambda row: (len(row[1]), isinstance(row[1], nn.ModuleList)))
    return f"the structure of {type(model).__name__} is unknown: {name}.0 is a {qualified_name(stack[0])}"


def _refuse_mixed(name: str, blocks: Blocks) -> None:
    seen: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if type(block) is not type(blocks[0]):
            raise UserError(
                f"{name}.{index} is a {type(block).__name__} among {type(blocks[0]).__name__}s: rewire needs blocks of "
                "one class"
            )
        if id(block) in seen:
            raise UserError(f"{name}.{index} is {name}.{seen[id(block)]} again: shared blocks cannot be rewired")
        seen[id(block)] = index


def _refuse_other_variants(name: str, blocks: Blocks, spec: BlockSpec) -> None:
    """Refuse blocks of one class that do not all use the residual path in the same way."""
    for index, block in enumerate(blocks):
        if FAMILIES[qualified_name(block)](block) is not spec:
            raise UserError(f"{name}.{index} differs from {name}.0: rewire needs blocks of one kind")


def _refuse_patched(stack: BlockStack) -> None:
    """Refuse a forward that was replaced on an instance: it would hide the new one."""
    prefix = stack.name.rpartition(".")[0]
    blocks = [(f"{stack.name}.{index}", block) for index, block in enumerate(stack.blocks)]
    for name, module in [(prefix or "the model", stack.backbone), *blocks]:
        if "forward" in vars(module):
            raise UserError(
                f"{name} has had its forward replaced (by a device map of accelerate, or a patch): rewire the model "
                "before that"
            )


def _refuse_shared_norms(model: nn.Module, stack: BlockStack) -> None:
    """Refuse a norm on the residual path that has two names, as a module or through its parameters."""
    paths = {*stack.input_norms(), stack.final_norm}
    owners: dict[int, str] = {}
    for other, module in model.named_modules(remove_duplicate=False):
        # An absent dropout or norm may be one Identity everywhere: only what has parameters can be shared.
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        for key in [id(module), *own] if own else []:
            first = owners.setdefault(key, other)
            if first != other and (other in paths or first in paths):
                raise UserError(f"{other} shares its norm with {first}: give each sublayer its own norm first")
