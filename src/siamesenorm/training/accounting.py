"""Parameters and FLOPs of a model, counted without allocating it."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from siamesenorm.models.language import build_language_model
from siamesenorm.models.language_config import LanguageModelConfig


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (all parameters, those of embeddings and of a head that is tied to one), each counted once."""
    embedding = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    return sum(parameter.numel() for parameter in model.parameters()), sum(embedding.values())


def count_flops(config: LanguageModelConfig) -> int:
    """Return the floating-point operations of training on one token, at the configured context.

    Three times those of the forward pass: matrix products and attention, 2 for a multiply-add, as PyTorch counts them;
    causal attention counts in full. Norms and other element-wise work are not counted. Blocks made of the same modules
    are counted once and multiplied: the streams have the same shapes at every block.
    """
    model = build_language_model(config, device="meta")
    copies = Counter(map(_structure, model.blocks))
    first = {_structure(block): block for block in reversed(model.blocks)}
    model.blocks = nn.ModuleList(first.values())
    tokens = torch.zeros(1, config.context, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counts = counter.get_flop_counts()
    forward: int = counter.get_total_flops()
    for index, structure in enumerate(first):
        block = sum(counts.get(f"{type(model).__name__}.blocks.{index}", {}).values())
        forward += (copies[structure] - 1) * block
    return round(3 * forward / config.context)


def _structure(block: nn.Module) -> tuple[object, ...]:
    """Return the modules and the shapes of the parameters of a block, which its matrix products follow from."""
    modules = ((name, type(module)) for name, module in block.named_modules())
    return (*modules, *((name, parameter.shape) for name, parameter in block.named_parameters()))
