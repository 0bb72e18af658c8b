"""Parameters and floating-point operations of a model."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from siamesenorm.kernels.grouped import FLOPS
from siamesenorm.sublayers.moe import ExpertProjection


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (all parameters, those of embeddings and of a head that is tied to one), each counted once."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(p.numel() for p in model.parameters()), sum(weight.numel() for weight in embeddings)


def count_active_parameters(model: nn.Module) -> int:
    """Return the parameters that one token passes through: of experts, as many as are chosen for it."""
    stacks = [module for module in model.modules() if isinstance(module, ExpertProjection)]
    idle = sum(stack.weight[0].numel() * (stack.shape.experts - stack.shape.active) for stack in stacks)
    return count_parameters(model)[0] - idle


@torch.no_grad()
def count_flops(model: nn.Module, *inputs: Tensor) -> int:
    """Return the floating-point operations of a training step of a model with `.blocks`, on the meta device.

    Three times those of the forward pass on `inputs`: matrix products and attention, 2 for a multiply-add, as PyTorch
    counts them; causal attention counts in full, element-wise work not at all, an expert for the tokens that pass
    through it. Blocks made of the same modules are counted once and multiplied.
    """
    from torch.utils.flop_counter import FlopCounterMode

    blocks = model.get_submodule("blocks")
    copies = Counter(map(_structure, blocks.children()))
    first: dict[tuple[object, ...], nn.Module] = {}
    for block in blocks.children():
        first.setdefault(_structure(block), block)
    model.blocks = nn.ModuleList(first.values())
    try:
        with FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
            model(*inputs)
    finally:
        model.blocks = blocks
    counts = counter.get_flop_counts()
    forward: int = counter.get_total_flops()
    for index, structure in enumerate(first):
        block = sum(counts.get(f"{type(model).__name__}.blocks.{index}", {}).values())
        forward += (copies[structure] - 1) * block
    return 3 * forward


def _structure(block: nn.Module) -> tuple[object, ...]:
    """Return the modules and the shapes of the parameters of a block, which its matrix products follow from."""
    modules = ((name, type(module)) for name, module in block.named_modules())
    return (*modules, *((name, parameter.shape) for name, parameter in block.named_parameters()))
