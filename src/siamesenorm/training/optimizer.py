"""AdamW over groups that follow from each parameter's own declaration of weight decay."""

from __future__ import annotations

import torch
from torch import nn

from siamesenorm.norms import DeclaredModule, declared_parameters
from siamesenorm.training.config import OptimizerConfig


def decayed_parameters(model: nn.Module, rule: str) -> dict[str, bool]:
    """Return for every trained parameter, by name, whether weight decay applies.

    "declared": matrices of projections, and declared parameters that say so; neither biases nor embeddings.
    "all-but-embeddings": everything but embeddings, gains and biases included, as in OLMo. A tied head is an embedding.
    """
    spared = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    declared = {id(parameter): declaration.decay for _, parameter, declaration in declared_parameters(model)}
    decisions: dict[str, bool] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if not parameter.requires_grad or id(parameter) in spared:
                decisions[name] = False
            elif rule == "all-but-embeddings":
                decisions[name] = True
            elif isinstance(module, DeclaredModule):
                decisions[name] = declared[id(parameter)]
            else:
                decisions[name] = parameter.ndim >= 2
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: decay for name, decay in decisions.items() if name in names}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW with one group that is decayed and one that is not, in the order of the model's parameters."""
    decisions = decayed_parameters(model, config.decay)
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name, decay in decisions.items() if decay], "weight_decay": config.weight_decay},
        {"params": [named[name] for name, decay in decisions.items() if not decay], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
