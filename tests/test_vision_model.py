"""The vision Transformer: what it computes, for every topology, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from siamesenorm import available_topologies, build_topology
from siamesenorm.errors import UserError
from siamesenorm.models.cost import count_parameters
from siamesenorm.models.diffusion import build_diffusion_transformer, diffusion_transformer_config
from siamesenorm.models.masked_autoencoder import build_masked_autoencoder, masked_autoencoder_config
from siamesenorm.models.vision import (
    VisionTransformer,
    VisionTransformerConfig,
    build_vision_transformer,
    layer_of,
    vision_transformer_config,
)
from siamesenorm.norms import NormSpec
from siamesenorm.norms.seed_norm import SeeDNorm

TINY = VisionTransformerConfig(
    depth=2, dim=16, heads=2, hidden=24, image_size=6, patch_size=2, channels=3, classes=5, bias=True
)


def model_of(**changes: Any) -> VisionTransformer:
    return build_vision_transformer(dataclasses.replace(TINY, **changes)).double()


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.one_of_each_family
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
    "changes",
    [
        {"patch_size": 4},
        {"classes": 0},
        {"pooling": "max"},
        {"channels": 0},
        {"heads": 3},
        {"image_size": 0},
        {"distillation": True, "pooling": "mean"},
        {"positions": "sine-cosine", "dim": 18},
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        dataclasses.replace(TINY, **changes)


def test_a_configuration_survives_json() -> None:
    config = dataclasses.replace(TINY, topology=build_topology("dhc-2:streams=4"), pooling="mean").resolved()
    assert VisionTransformerConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("size", "topology", "millions"),
    [
        ("vit-t", "pre", 5.717416),
        ("vit-s", "pre", 22.050664),
        ("vit-b", "pre", 86.567656),
        ("vit-l", "pre", 304.326632),
        ("vit-s", "siamese-post-pre:post_norm=lazy,readout=code", 22.050664 + (2 * 12 * 2 + 2) * 2 * 384e-6),
    ],
)
def test_sizes_have_the_published_numbers_of_parameters(size: str, topology: str, millions: float) -> None:
    """SiameseNorm adds two LayerNorms to every sublayer and two to the closing."""
    model = build_vision_transformer(vision_transformer_config(size, topology=topology), device="meta")
    assert count_parameters(model)[0] == round(millions * 1e6)


@pytest.mark.parametrize("distillation", [False, True])
def test_a_recomputed_stream_has_the_gradients_of_all_tokens(distillation: bool) -> None:
    changes = {"topology": build_topology("siamese-post-pre"), "distillation": distillation}
    config = dataclasses.replace(TINY, **changes, norm=NormSpec(), dropout=0.0, drop_path=0.0)
    found = {}
    for kernels in ("plain", "lean"):
        model = build_vision_transformer(config, kernels=kernels).train()
        logits = model(images().float()).logits
        logits.square().sum().backward()
        found[kernels] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found["lean"], found["plain"], rtol=1e-4, atol=1e-5)


def test_models_are_built_by_size_or_by_configuration() -> None:
    named = build_vision_transformer("vit-t", topology="post", depth=2, device="meta")
    config = vision_transformer_config("vit-t", topology="post", depth=2)
    assert named.config == build_vision_transformer(config, device="meta").config == config
    diffusion = build_diffusion_transformer("dit-s-4", topology="pre", depth=1, device="meta")
    assert diffusion.config == diffusion_transformer_config("dit-s-4", topology="pre", depth=1)
    autoencoder = build_masked_autoencoder("mae-b", topology="pre", depth=1, device="meta")
    assert autoencoder.config == masked_autoencoder_config("mae-b", topology="pre", depth=1)
    with pytest.raises(UserError, match="depth: change the configuration"):
        build_vision_transformer(config, depth=3)


def test_a_size_has_the_attention_norm_that_the_topology_needs() -> None:
    norms = [vision_transformer_config("vit-t", topology=t).attention_shape.attention_norm for t in ("pre", "siamese")]
    assert norms == ["none", "qkv-head"]
    with pytest.raises(UserError, match="qkv-head"):
        vision_transformer_config("vit-t", topology="siamese", attention_norm="none")


def test_a_position_of_the_class_token_is_added_to_it() -> None:
    model = model_of(token_position=True)
    embedded = model.embed(images())
    assert model.token is not None and model.position.weight.shape == (10, 16)
    torch.testing.assert_close(embedded[:, 0], (model.token.weight + model.position.weight[:1]).expand(2, -1))
    patches = embedded[:, 1:] - model.position.weight[1:]
    torch.testing.assert_close(patches, model_of().embed(images())[:, 1:] - model_of().position.weight)


@pytest.mark.parametrize("topology", ["pre", "siamese-post-pre:post_norm=lazy,readout=code"])
def test_the_logits_of_a_distilled_model_are_the_mean_of_two_heads_on_two_tokens(topology: str) -> None:
    model = model_of(distillation=True, token_position=True, topology=build_topology(topology))
    assert model.position.weight.shape == (11, 16)
    tokens = torch.cat((model.token.weight, model.distillation_token.weight)) + model.position.weight[:2]
    torch.testing.assert_close(model.embed(images())[:, :2], tokens.expand(2, -1, -1))
    streams, _ = model.encode(images())
    tokens = model.closing(streams)
    expected = (model.head(tokens[:, 0]) + model.distillation_head(tokens[:, 1])) / 2
    torch.testing.assert_close(model(images()).logits, expected)
    model(images()).logits.sum().backward()
    assert model.distillation_head.weight.grad is not None and model.distillation_token.weight.grad is not None


def test_seednorm_drops_its_coefficient_at_the_rate_of_stochastic_depth() -> None:
    """Unless it sets a rate; its heads are 16 where they divide the width, its dot product is divided by the width."""

    def norms(text: str, **changes: Any) -> list[SeeDNorm]:
        model = model_of(norm=NormSpec.parse(text), dim=32, **changes)
        return [module for module in model.modules() if isinstance(module, SeeDNorm)]

    assert {norm.dropout for norm in norms("seednorm", drop_path=0.25)} == {0.25}
    assert {norm.dropout for norm in norms("seednorm:dropout=0.5", drop_path=0.25)} == {0.5}
    assert {(norm.dropout, norm.heads, norm.dot_scale) for norm in norms("seednorm")} == {(0.0, 16, 1 / 32)}


def test_layers_count_from_the_patches_to_the_head() -> None:
    model = model_of(topology=build_topology("siamese-post-pre:gated_opening=True"), distillation=True)
    layers = {name: layer_of(name, depth=2) for name, _ in model.named_parameters()}
    assert {name.split(".")[0] for name, layer in layers.items() if layer == 0} == {
        "patch", "position", "token", "distillation_token", "opening",
    }  # fmt: skip
    assert all(layers[name] == 1 + int(name.split(".")[1]) for name in layers if name.startswith("blocks."))
    last = {"closing", "head", "distillation_head"}
    assert {name.split(".")[0] for name, layer in layers.items() if layer == 3} == last
