"""Find the blocks in a model, and refuse every model whose residual path is not surely understood."""

from __future__ import annotations

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.block_families import FAMILIES
from siamesenorm.interop.rewired_blocks import BlockSpec, BlockStack, RewiredBlock, qualified_name
from siamesenorm.topologies import Connection

Blocks = nn.ModuleList | nn.Sequential


def find_blocks(model: nn.Module) -> BlockStack:
    """Return the one stack of known blocks of a model.

    Raises UserError, naming the module, for a model that was rewired before, has no known blocks, several stacks of
    them, mixed, shared or patched blocks, and norms that sublayers share.
    """
    for name, module in model.named_modules():
        where = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, RewiredBlock):
            raise UserError(f"{where}: the model has been rewired already; rewire the original")
        if isinstance(module, Connection):
            raise UserError(f"{where}: the blocks have connections of this library; build them with another topology")
    rows = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
    }
    stacks = {name: row for name, row in rows.items() if any(qualified_name(block) in FAMILIES for block in row)}
    if not stacks:
        known = ", ".join(sorted(family.rpartition(".")[2] for family in FAMILIES))
        # The longest row is where the user expects the blocks; a Sequential may be a stem, and counts if longer.
        longest = max(rows, key=lambda name: (len(rows[name]), isinstance(rows[name], nn.ModuleList)), default=None)
        found = (
            "it has no list of blocks" if longest is None else f"{longest}.0 is a {qualified_name(rows[longest][0])}"
        )
        raise UserError(f"the structure of {type(model).__name__} is unknown: {found}; rewire supports {known}")
    if len(stacks) > 1:
        raise UserError(f"the model has {len(stacks)} stacks of blocks, {', '.join(stacks)}: rewire one backbone alone")
    [(name, blocks)] = stacks.items()
    spec = _common_spec(name, blocks)
    stack = BlockStack(name=name, backbone=model.get_submodule(name.rpartition(".")[0]), blocks=blocks, spec=spec)
    if qualified_name(stack.backbone) not in spec.backbones:
        raise UserError(
            f"{type(blocks[0]).__name__}s in a {qualified_name(stack.backbone)}, which may use them in any way: rewire "
            f"supports them in a {' or '.join(spec.backbones)}"
        )
    spec.check_backbone(stack.backbone)
    _refuse_patched(stack)
    _refuse_shared_norms(model, stack)
    return stack


def _common_spec(name: str, blocks: Blocks) -> BlockSpec:
    """Return the specification of all blocks; refuse blocks of several classes or variants, and a shared one."""
    seen: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if type(block) is not type(blocks[0]):
            kinds = f"{type(block).__name__} among {type(blocks[0]).__name__}s"
            raise UserError(f"{name}.{index} is a {kinds}: rewire needs blocks of one class")
        if id(block) in seen:
            raise UserError(f"{name}.{index} is {name}.{seen[id(block)]} again: shared blocks cannot be rewired")
        seen[id(block)] = index
    specs = [FAMILIES[qualified_name(block)](block) for block in blocks]
    for index, spec in enumerate(specs):
        if spec is not specs[0]:
            raise UserError(f"{name}.{index} differs from {name}.0: rewire needs blocks of one kind")
    return specs[0]


def _refuse_patched(stack: BlockStack) -> None:
    """Refuse a forward that was replaced on an instance: it would hide the new one."""
    prefix = stack.name.rpartition(".")[0]
    blocks = [(f"{stack.name}.{index}", block) for index, block in enumerate(stack.blocks)]
    for name, module in [(prefix or "the model", stack.backbone), *blocks]:
        if "forward" in vars(module):
            raise UserError(f"{name} has had its forward replaced (accelerate, or a patch): rewire the model before")


def _refuse_shared_norms(model: nn.Module, stack: BlockStack) -> None:
    """Refuse a norm on the residual path that has two names, as a module or through its parameters."""
    norms = {norm for sublayer in stack.spec.sublayers for norm in (sublayer.norm, *sublayer.kept)}
    paths = {
        stack.final_norm,
        *(f"{stack.name}.{index}.{norm}" for index in range(len(stack.blocks)) for norm in norms),
    }
    owners: dict[int, str] = {}
    for other, module in model.named_modules(remove_duplicate=False):
        # An absent dropout or norm may be one Identity everywhere: only what has parameters can be shared.
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        for key in [id(module), *own] if own else []:
            first = owners.setdefault(key, other)
            if first != other and (other in paths or first in paths):
                raise UserError(f"{other} shares its norm with {first}: give each sublayer its own norm first")
