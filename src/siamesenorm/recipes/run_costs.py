"""What runs will cost: parameters and operations of their models, counted on the meta device."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch

from siamesenorm.models.convnext import ConvNextConfig
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import build_topology
from siamesenorm.training.config import RunConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Parameters of a model, and operations of training on one sample."""

    parameters: int
    operations_per_sample: int


CONVNEXT_B = ModelCost(parameters=89_000_000, operations_per_sample=3 * 2 * 15_400_000_000)
"""As published (arXiv 2201.03545: 89 M parameters, 15.4 G multiply-adds); its model needs timm."""


def model_cost(config: RunConfig) -> ModelCost:
    """Return the cost of a run's model with Pre-Norm and RMSNorm, whose residual path is not counted."""
    model = config.task.model
    plain = {"topology": build_topology("pre"), "norm": NormSpec(), "attention_norm": "auto"}
    return _cost(dataclasses.replace(model, **plain) if hasattr(model, "topology") else model)


def count_operations(config: RunConfig) -> float:
    """Return the floating-point operations of a run's training steps."""
    return float(model_cost(config).operations_per_sample) * config.batch * config.steps


def count_items(config: RunConfig) -> int:
    """Return how many items (tokens, or images) a run is trained on."""
    return int(config.batch * config.steps * getattr(config.task.model, "context", 1))


@cache
def _cost(config: Any) -> ModelCost:
    if isinstance(config, ConvNextConfig):
        return CONVNEXT_B
    model = config.build(seed=0, device=torch.device("meta"))
    return ModelCost(parameters=count_parameters(model)[0], operations_per_sample=count_flops(model, *config.inputs()))
