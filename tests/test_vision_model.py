"""The vision Transformer: what it computes, for every topology, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from siamesenorm import available_topologies, build_topology
from siamesenorm.errors import UserError
from siamesenorm.models.vision import VisionTransformer, VisionTransformerConfig, build_vision_transformer

TINY = VisionTransformerConfig(
    depth=2, dim=16, heads=2, hidden=24, image_size=6, patch_size=2, channels=3, classes=5, bias=True
)


def model_of(**changes: Any) -> VisionTransformer:
    return build_vision_transformer(dataclasses.replace(TINY, **changes)).double()


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("topology", available_topologies())
def test_the_order_of_patches_does_not_matter_beyond_their_positions(topology: str, pooling: Any) -> None:
    """Attention is not causal, and every topology is local to a token."""
    model = model_of(topology=build_topology(topology), pooling=pooling)
    before = model(images()).logits
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    patches = F.unfold(images(), 2, stride=2)
    permuted = F.fold(patches[..., order], (6, 6), 2, stride=2)
    model.position.weight.data = model.position.weight.data[order]
    torch.testing.assert_close(model(permuted).logits, before, rtol=0, atol=1e-12)
    assert before.shape == (2, 5) and before.std() > 1e-3


def test_patches_are_projected_as_by_a_convolution() -> None:
    model = model_of(pooling="mean")
    kernel = model.patch.weight.view(16, 3, 2, 2)
    expected = F.conv2d(images(), kernel, model.patch.bias, stride=2).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.embed(images()) - model.position.weight, expected)


def test_initial_weights_follow_from_seed_and_block() -> None:
    first, second = build_vision_transformer(TINY), build_vision_transformer(dataclasses.replace(TINY, depth=3))
    weights = {name: parameter for name, parameter in first.named_parameters() if parameter.ndim == 2}
    same = {name: second.get_parameter(name) for name in weights}
    up = [name for name in weights if "mlp.up" in name or "query" in name]
    assert all(torch.equal(weights[name], same[name]) for name in up)
    assert len({parameter.flatten()[0].item() for parameter in weights.values()}) == len(weights)
    assert not torch.equal(build_vision_transformer(TINY, seed=1).patch.weight, first.patch.weight)


@pytest.mark.parametrize(
    "changes", [{"patch_size": 4}, {"classes": 0}, {"pooling": "max"}, {"channels": 0}, {"heads": 3}, {"image_size": 0}]
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        dataclasses.replace(TINY, **changes)


def test_a_configuration_survives_json() -> None:
    config = dataclasses.replace(TINY, topology=build_topology("dhc-2:streams=4"), pooling="mean").resolved()
    assert VisionTransformerConfig.from_json(config.to_json()) == config
