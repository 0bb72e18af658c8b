"""The mark by which transformers knows what has its weights: on modules, where copies keep it, not on parameters."""

from __future__ import annotations

from torch import nn

from siamesenorm.norms import DeclaredModule


def mark_initialised(model: nn.Module) -> None:
    """Say of a model and all its modules that they have their weights: nothing draws them again."""
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


def is_initialised(part: object) -> bool:
    """Return whether a module is marked, or a parameter, which is while weights are loaded."""
    return bool(getattr(part, "_is_hf_initialized", False))


def refill_constants(model: nn.Module) -> None:
    """Give the constants of a model, which no file holds, their values."""
    for module in model.modules():
        if isinstance(module, DeclaredModule):
            module.refill_constants()
