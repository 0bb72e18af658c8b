"""Weights of timm's ViT and DeiT in our own models, and back: the same outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vision_models import HOSTS, IMAGES, build_host, moved

from siamesenorm import build_topology
from siamesenorm.errors import UserError
from siamesenorm.interop.native_weights import foreign_fields, foreign_state, load_foreign_weights
from siamesenorm.models.vision import VisionTransformerConfig, build_vision_transformer, vision_transformer_config

OURS = ("vit", "layer-scale", "no-class-token", "deit", "distilled")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in OURS},
    "deit-3": ("layer-scale", {"no_embed_class": True}),
    "qk-norm": ("vit", {"qk_norm": True}),
    "tanh": ("vit", {"act_layer": "gelu_tanh"}),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_same_weights_give_the_same_outputs_both_ways(kind: str) -> None:
    host, options = OPTIONS[kind]
    theirs = build_host(host, **options)
    ours = build_vision_transformer(VisionTransformerConfig(**foreign_fields(theirs)), seed=1).eval()
    load_foreign_weights(ours, theirs)
    with torch.no_grad():
        expected = theirs(IMAGES)
        torch.testing.assert_close(ours(IMAGES).logits, expected, rtol=1e-4, atol=1e-4)
        assert expected.std() > 0.1
        moved(ours)
        assert not torch.allclose(ours(IMAGES).logits, expected, atol=0.1)
        theirs.load_state_dict(foreign_state(ours))
        torch.testing.assert_close(theirs(IMAGES), ours(IMAGES).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("host", "options"),
    [("registers", {}), ("attention-pool", {}), ("clip", {}), ("rmsnorm", {}), ("vit", {"global_pool": "avg"}),
     ("vit", {"act_layer": "relu"}), ("vit", {"num_classes": 0})],
)  # fmt: skip
def test_what_our_models_do_not_have_is_refused(host: str, options: dict[str, Any]) -> None:
    theirs = build_host(host, **options)
    before = build_vision_transformer(VisionTransformerConfig(**foreign_fields(build_host())))
    weights = {name: each.clone() for name, each in before.state_dict().items()}
    with pytest.raises(UserError):
        load_foreign_weights(before, theirs)
    assert all(torch.equal(each, weights[name]) for name, each in before.state_dict().items())


@pytest.mark.parametrize(
    "changes",
    [
        {"topology": build_topology("post")},
        {"token_position": False},
        {"activation": "relu"},
        {"heads": 4},
        {"dim": 48},
    ],
)
def test_a_model_with_another_function_is_refused(changes: dict[str, Any]) -> None:
    theirs = build_host()
    config = dataclasses.replace(VisionTransformerConfig(**foreign_fields(theirs)), **changes)
    with pytest.raises(UserError):
        load_foreign_weights(build_vision_transformer(config), theirs)


def test_sizes_are_those_of_timm() -> None:
    import timm

    for size, name in (("vit-t", "deit_tiny_patch16_224"), ("vit-b", "vit_base_patch16_224")):
        with torch.device("meta"):
            fields = foreign_fields(timm.create_model(name))
        config = vision_transformer_config(size, topology="pre").to_json()
        expected = VisionTransformerConfig(**fields).to_json()
        assert {name for name in config if config[name] != expected[name]} <= {"initialisation"}
    assert {"vit", "deit", "distilled"} <= HOSTS.keys()
