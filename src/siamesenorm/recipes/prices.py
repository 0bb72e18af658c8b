"""What runs cost before they are trained: parameters and operations of their models, counted on the meta device."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.models.convnext import ConvNextConfig
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.models.diffusion import build_diffusion_transformer
from siamesenorm.models.language import build_language_model
from siamesenorm.models.masked_autoencoder import build_masked_autoencoder
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import build_topology
from siamesenorm.training.config import RunConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Parameters of a model, and operations of training on one sample."""

    parameters: int
    operations_a_sample: int


CONVNEXT_B = Price(parameters=89_000_000, operations_a_sample=3 * 2 * 15_400_000_000)
"""As published (arXiv 2201.03545: 89 M parameters, 15.4 G multiply-adds); its model needs timm."""


def price_of(config: RunConfig) -> Price:
    """Return the price of a run's model with Pre-Norm and RMSNorm, whose residual path is not counted."""
    model = config.task.model
    plain = {"topology": build_topology("pre"), "norm": NormSpec(), "attention_norm": "auto"}
    return _price(config.task.tag, dataclasses.replace(model, **plain) if hasattr(model, "topology") else model)


def count_operations(config: RunConfig) -> float:
    """Return the floating-point operations of a run's training steps."""
    return float(price_of(config).operations_a_sample) * config.batch * config.steps


def items_of(config: RunConfig) -> int:
    """Return how many items (tokens, or images) a run is trained on."""
    return int(config.batch * config.steps * getattr(config.task.model, "context", 1))


@cache
def _price(tag: str, config: Any) -> Price:
    if isinstance(config, ConvNextConfig):
        return CONVNEXT_B
    model, inputs = _on_meta(tag, config)
    return Price(parameters=count_parameters(model)[0], operations_a_sample=count_flops(model, *inputs))


def _on_meta(tag: str, config: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model on the meta device, and one sample of its inputs."""
    device = torch.device("meta")
    if tag == "language":
        return build_language_model(config, device=device), (_zeros(1, config.context, dtype=torch.int64),)
    images = _zeros(1, config.channels, config.image_size, config.image_size)
    if tag == "autoencoding":
        visible = _zeros(1, config.visible, dtype=torch.int64)
        return build_masked_autoencoder(config, device=device), (images, visible)
    if tag == "diffusion":
        numbers = _zeros(1, dtype=torch.int64)
        return build_diffusion_transformer(config, device=device), (images, numbers, numbers)
    return config.build(seed=0, device=device), (images,)


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="meta")
