"""Small Vision Transformers of timm with weights that are nothing special, and images for them."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

DIM, DEPTH, PREFIX = 24, 3, "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"img_size": 32, "depth": DEPTH, "embed_dim": DIM, "num_heads": 2, "num_classes": 5}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))

HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "layer-scale": ("vit_tiny_patch16_224", {"init_values": 0.1}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 3, "no_embed_class": True}),
    "no-class-token": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "fc_norm": False}),
    "attention-pool": ("vit_tiny_patch16_224", {"global_pool": "map"}),
    "clip": ("vit_tiny_patch16_224", {"pre_norm": True, "qk_norm": True}),
    "rmsnorm": ("vit_tiny_patch16_224", {"norm_layer": "rmsnorm"}),
    "deit": ("deit_tiny_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
}


def build_host(kind: str = "vit", **options: Any) -> Any:
    """Return a host in evaluation mode whose every parameter, gains and LayerScale included, was moved at random."""
    name, own = HOSTS[kind]
    return moved(timm.create_model(name, **{**SMALL, **own, **options}))


def moved(model: nn.Module) -> Any:
    """Move all parameters at random and return the model in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def gradients(model: nn.Module, images: Tensor = IMAGES) -> dict[str, Tensor]:
    """Return the gradient of each parameter under one loss, with the random numbers of one seed."""
    model.zero_grad()
    torch.manual_seed(0)
    model(images).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
