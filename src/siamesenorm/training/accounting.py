"""Parameters and FLOPs of a model, counted without allocating it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from siamesenorm.models.language import LanguageModelConfig, build_language_model


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
    causal attention counts in full. Norms and other element-wise work are not counted.
    """
    model = build_language_model(config, device="meta")
    tokens = torch.zeros(1, config.context, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    forward: int = counter.get_total_flops()
    return round(3 * forward / config.context)
