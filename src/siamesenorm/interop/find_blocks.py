"""Find the blocks in a model, and refuse models whose residual path is not recognised."""

from __future__ import annotations

import re
from dataclasses import replace

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.backbones import is_timm, is_transformers, owner_of
from siamesenorm.interop.block_families import FINAL_NORMS, NORM_FIRST, ONE_TOKEN, recognise
from siamesenorm.interop.rewired_blocks import BlockSpec, BlockStack, RewiredBlock, original_class, qualified_name
from siamesenorm.topologies import Connection

Blocks = nn.ModuleList | nn.Sequential


def find_blocks(model: nn.Module) -> tuple[BlockStack, ...]:
    """Return the stack of blocks of a model whose form is known, or those of an encoder and its decoder.

    Raises UserError, naming the module, for a model that was rewired before, has no known blocks, several stacks of
    them, mixed, shared, skipped or patched blocks, and norms that sublayers share.
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
    stacks = {name: row for name, row in rows.items() if recognise(row[0]) is not None}
    if not stacks:
        # The longest row is where the user expects the blocks; a Sequential may be a stem, and counts if longer.
        longest = max(rows, key=lambda name: (len(rows[name]), isinstance(rows[name], nn.ModuleList)), default=None)
        raise UserError(f"the structure of {type(model).__name__} is unknown: {_unknown(longest, rows)}")
    specs = {name: _common_spec(name, blocks) for name, blocks in _chosen(model, stacks).items()}
    found = tuple(_surroundings(model, name, stacks[name], spec) for name, spec in specs.items())
    for stack in found:
        _refuse_patched(model, stack)
        _refuse_shared_norms(model, stack)
    return found


def _chosen(model: nn.Module, stacks: dict[str, Blocks]) -> dict[str, Blocks]:
    """Return the only stack, that of the language model in a multimodal one, or those of an encoder and its decoder."""
    specs = {name: recognise(blocks[0]) for name, blocks in stacks.items()}
    decoders = [name for name, spec in specs.items() if spec is not None and spec.crosses]
    if len(decoders) == 1 and len(stacks) == 2:
        return {name: stacks[name] for name in sorted(stacks, key=lambda name: name in decoders)}
    if decoders:
        raise UserError(f"{decoders[0]} attends to the states of an encoder: rewire the model that has both")
    return _of_language(model, stacks) if len(stacks) > 1 else stacks


def _unknown(longest: str | None, rows: dict[str, Blocks]) -> str:
    """Return why the longest row of modules is no stack of blocks."""
    if longest is None:
        return "it has no list of blocks"
    block = rows[longest][0]
    what = f"{longest}.0 is a {qualified_name(block)}"
    if any(re.search(r"cross_?att|encoder_attn", name) for name, _ in block.named_children()):
        return f"{what} with cross-attention: rewire supports that of T5, Whisper and BART's Pre-Norm relatives"
    children = ", ".join(name for name, _ in block.named_children()) or "none"
    return f"{what}, and its parts ({children}) are those of no form that rewire supports: see docs/rewire.md"


def _of_language(model: nn.Module, stacks: dict[str, Blocks]) -> dict[str, Blocks]:
    """Return the stack of the language model in a multimodal one; refuse several, and two towers of one rank."""
    chosen = {name: blocks for name, blocks in stacks.items() if _reads_tokens(owner_of(model, name))}
    if len(chosen) == 1 and not hasattr(model, "get_text_features"):
        return chosen
    raise UserError(f"the model has {len(stacks)} stacks of blocks, {', '.join(stacks)}: rewire one backbone alone")


def _reads_tokens(owner: nn.Module) -> bool:
    return is_transformers(owner) and isinstance(owner.get_input_embeddings(), nn.Embedding)  # type: ignore[operator]


def _input_of(owner: nn.Module) -> str:
    return str(getattr(owner, "main_input_name", ""))


def _surroundings(model: nn.Module, name: str, blocks: Blocks, spec: BlockSpec) -> BlockStack:
    """Return the stack with the norm after it and the module that returns its hidden states."""
    what = type(blocks[0]).__name__
    final, place = "", name
    while place and not final:
        place = place.rpartition(".")[0]
        module = model.get_submodule(place)
        names = ("norm_out",) if spec.keeps_final_norm else FINAL_NORMS
        found = next((each for each in names if getattr(module, each, None) is not None), "")
        final = f"{place}.{found}" if place and found else found
    if not final and spec.pre_norm_refusal:
        raise UserError(f"{name} has blocks of class {what}, {spec.pre_norm_refusal}: rewire a Pre-Norm model")
    if not final:
        holder = qualified_name(model.get_submodule(name.rpartition(".")[0]))
        raise UserError(f"{name} has {what}s in a {holder}, and no norm follows them: rewire the whole model")
    owner = owner_of(model, final)
    backbone = owner if is_transformers(owner) else model.get_submodule(final.rpartition(".")[0])
    if original_class(type(owner)).__name__ in ONE_TOKEN:
        final = ""
    if getattr(owner, "layerdrop", 0):
        raise UserError(f"layerdrop of {type(owner).__name__} is {owner.layerdrop}: it skips whole blocks, set it to 0")
    vision = is_timm(backbone) or spec.keeps_final_norm or _input_of(backbone) == "pixel_values"
    return BlockStack(
        name=name, blocks=blocks, spec=spec, backbone=backbone, final_norm=final,
        domain="vision" if vision else "language",
    )  # fmt: skip


def norms_first(stack: BlockStack) -> bool:
    """Return whether the norm after the blocks also normalises the embedding."""
    return original_class(type(stack.backbone)).__name__ in NORM_FIRST


def _common_spec(name: str, blocks: Blocks) -> BlockSpec:
    """Return the specification of all blocks; refuse blocks of several classes or forms, and a shared one."""
    seen: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if type(block) is not type(blocks[0]):
            kinds = f"{type(block).__name__} among {type(blocks[0]).__name__}s"
            raise UserError(f"{name}.{index} is a {kinds}: rewire needs blocks of one class")
        if id(block) in seen:
            raise UserError(f"{name}.{index} is {name}.{seen[id(block)]} again: shared blocks cannot be rewired")
        seen[id(block)] = index
    specs = [recognise(block) for block in blocks]
    first = specs[0]
    assert first is not None
    # Some blocks of a mixture of experts have one MLP: projections are those that all have.
    common = {
        role: path
        for role, path in first.projections.items()
        if all(spec is not None and spec.projections.get(role) == path for spec in specs)
    }
    first = replace(first, projections=common)
    for index, spec in enumerate(specs):
        if spec is None or replace(spec, projections=common) != first:
            raise UserError(f"{name}.{index} differs from {name}.0: rewire needs blocks of one form")
    return first


def _refuse_patched(model: nn.Module, stack: BlockStack) -> None:
    """Refuse a forward that was replaced on an instance: it would hide the new one."""
    prefix = stack.name.rpartition(".")[0]
    blocks = [(f"{stack.name}.{index}", block) for index, block in enumerate(stack.blocks)]
    for name, module in [(prefix or "the model", model.get_submodule(prefix)), *blocks]:
        if "forward" in vars(module):
            raise UserError(f"{name} has had its forward replaced (accelerate, or a patch): rewire the model before")


def _refuse_shared_norms(model: nn.Module, stack: BlockStack) -> None:
    """Refuse a norm on the residual path that has two names, as a module or through its parameters."""
    norms = {norm for sublayer in stack.spec.sublayers for norm in (sublayer.norm, *sublayer.kept)}
    paths = {
        *filter(None, [stack.final_norm]),
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
