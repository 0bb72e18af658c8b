"""`rewire` on timm's Vision Transformers: the function is kept, and every way to ask them for features still works."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from vision_models import DEPTH, DIM, HOSTS, IMAGES, SMALL, build_host, gradients, moved

from siamesenorm import available_topologies, rewire
from siamesenorm.errors import UserError
from siamesenorm.interop.rewire import record_streams

KEEPING = ("pre", "layerscale", "dhc-2", "mhc-4", "siamese-post-pre", "siamese")
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 2e-4}
"""Norms of norms differ by eps / (2 mean square), with eps 1e-6 and tokens of mean square above 1e-2."""


def rewired(kind: str = "vit", topology: str = "siamese-post-pre", **options: Any) -> tuple[Any, Any]:
    """Return a host and its rewired copy."""
    host = build_host(kind, **options)
    model = copy.deepcopy(host)
    rewire(model, topology)
    return host, model


# --- the function


@pytest.mark.parametrize("topology", KEEPING)
@pytest.mark.parametrize("kind", HOSTS)
@torch.no_grad()
def test_the_function_is_kept(kind: str, topology: str) -> None:
    host, model = rewired(kind, topology)
    torch.testing.assert_close(model(IMAGES), host(IMAGES), **CLOSE)
    torch.testing.assert_close(model.forward_features(IMAGES), host.forward_features(IMAGES), **CLOSE)
    torch.testing.assert_close(model.forward_head(model.forward_features(IMAGES)), model(IMAGES), rtol=0, atol=0)


@torch.no_grad()
def test_without_a_norm_of_a_norm_the_function_is_kept_exactly() -> None:
    host, model = rewired("layer-scale", "siamese-post-pre:normalized_input=false")
    torch.testing.assert_close(model(IMAGES), host(IMAGES), rtol=1e-6, atol=1e-6)


def test_drop_path_draws_what_it_drew_and_drops_from_both_streams() -> None:
    host, model = rewired(drop_path_rate=0.5, proj_drop_rate=0.3)
    torch.manual_seed(3)
    expected = host.train()(IMAGES)
    torch.manual_seed(3)
    torch.testing.assert_close(model.train()(IMAGES), expected, **CLOSE)
    assert not torch.allclose(expected, host.eval()(IMAGES), atol=1e-2)


@pytest.mark.parametrize("masks", [{"is_causal": True}, {"attn_mask": torch.ones(5, 5).tril().bool()}], ids=str)
@torch.no_grad()
def test_masks_reach_the_attention(masks: dict[str, Any]) -> None:
    host, model = rewired()
    torch.testing.assert_close(model(IMAGES, **masks), host(IMAGES, **masks), **CLOSE)
    assert not torch.allclose(model(IMAGES, **masks), model(IMAGES), atol=1e-2)


@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre", "siamese-post-pre:post_norm=lazy,readout=code"])
def test_every_zeroed_gain_gets_a_gradient(topology: str) -> None:
    _, model = rewired("layer-scale", topology)
    found = gradients(model)
    silent = [name for name, parameter in model.named_parameters() if not parameter.any()]
    assert len(silent) > DEPTH
    assert all(found[name].abs().max() > 0 for name in silent)


def official_siamese_deit(model: Any, images: Tensor) -> Tensor:
    """Compute the released SiameseNorm DeiT, written out from its equations, on a rewired model's parameters."""

    def norm(module: nn.Module, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.gain + module.bias

    x = model.patch_embed(images)
    x = y = torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1) + model.pos_embed
    for index, block in enumerate(model.blocks):
        scale = (2 * (index + 1)) ** -0.5
        for around, sublayer in ((block.attention_connection, block.attn), (block.mlp_connection, block.mlp)):
            x = norm(around.post_norm, x)
            output = sublayer(norm(around.input_norm, x + norm(around.identity_norm, y)))
            x, y = x + scale * output, y + output
    last = model.norm.closing
    return model.head(norm(last.output_norm, norm(last.post_norm, x) + norm(last.identity_norm, y))[:, 0])


@torch.no_grad()
def test_from_scratch_it_is_the_released_siamese_deit() -> None:
    model = timm.create_model("deit_tiny_patch16_224", **SMALL)
    report = rewire(model, "siamese-post-pre:post_norm=lazy,readout=code", preserve=False)
    assert sum(fate.outcome == "new" for fate in report.norms) == 6 * DEPTH + 3
    moved(model.double())
    images = IMAGES.double()
    torch.testing.assert_close(model(images), official_siamese_deit(model, images), rtol=1e-10, atol=1e-10)


# --- features


@pytest.mark.parametrize("kind", ["vit", "registers", "distilled", "no-class-token"])
@pytest.mark.parametrize("output_fmt", ["NCHW", "NLC"])
@torch.no_grad()
def test_intermediates_are_closed_states(kind: str, output_fmt: str) -> None:
    """At the start of a converted model they are its host's normalised ones, whether normalisation is asked or not."""
    host, model = rewired(kind, "siamese")
    for norm in (False, True):
        options = {"indices": [0, 2], "return_prefix_tokens": True, "output_fmt": output_fmt}
        _, found = model.forward_intermediates(IMAGES, norm=norm, **options)
        _, expected = host.forward_intermediates(IMAGES, norm=True, **options)
        torch.testing.assert_close(found, expected, **CLOSE)
        only = model.forward_intermediates(IMAGES, norm=norm, intermediates_only=True, **options)
        torch.testing.assert_close(only, found)


@torch.no_grad()
def test_intermediates_are_closed_states_once_both_streams_are_alive() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL)
    rewire(model, "siamese-post-pre", preserve=False)
    moved(model)
    with record_streams(model) as streams:
        final, found = model.forward_intermediates(IMAGES, 2, output_fmt="NLC")
    closed = [model.norm.closing((one["bounded"], one["identity"])) for one in streams]
    assert [state.shape for state in closed] == [(2, 5, DIM)] * DEPTH
    torch.testing.assert_close(found, [state[:, 1:] for state in closed[1:]])
    torch.testing.assert_close(final, closed[-1])
    [last] = model.get_intermediate_layers(IMAGES, 1)
    torch.testing.assert_close(last, found[-1])


@pytest.mark.parametrize("prune_norm", [False, True])
@torch.no_grad()
def test_pruned_models_give_the_same_features(prune_norm: bool) -> None:
    _, model = rewired()
    expected = model.forward_intermediates(IMAGES, [1], intermediates_only=True)
    assert model.prune_intermediate_layers([1], prune_norm=prune_norm) == [1]
    assert len(model.blocks) == 2
    assert isinstance(model.head, nn.Identity)
    torch.testing.assert_close(model.forward_intermediates(IMAGES, [1], intermediates_only=True), expected)


@torch.no_grad()
def test_classifier_and_input_size_can_be_changed() -> None:
    host, model = rewired(dynamic_img_size=True)
    larger = torch.randn(2, 3, 64, 48, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(larger), host(larger), **CLOSE)
    for one in (host, model):
        one.set_input_size((64, 48))
        one.reset_classifier(7, "avg")
    model.head.load_state_dict(host.head.state_dict())
    assert model(larger).shape == (2, 7)
    torch.testing.assert_close(model(larger), host(larger), **CLOSE)


def test_distilled_training_returns_both_heads() -> None:
    host, model = rewired("distilled")
    for one in (host, model):
        one.train().set_distilled_training()
    torch.testing.assert_close(model(IMAGES), host(IMAGES), **CLOSE)


# --- training


def test_checkpointing_changes_no_gradient() -> None:
    _, model = rewired("layer-scale", "siamese", drop_path_rate=0.3)
    model.train()
    plain = gradients(model)
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradients(model), plain, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_training_step_is_the_plain_one() -> None:
    _, model = rewired("layer-scale")
    plain = gradients(model.train())
    compiled = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    for name, expected in plain.items():
        torch.testing.assert_close(compiled[f"_orig_mod.{name}"], expected)


def test_weight_decay_leaves_out_what_declares_it() -> None:
    """timm leaves out vectors by itself; the mixing matrices of Hyper-Connections say so of some alone."""
    from timm.optim import param_groups_weight_decay

    _, model = rewired("vit", "dhc-2")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    decaying = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    connection = "blocks.0.mlp_connection"
    assert {f"{connection}.project_residual", "blocks.0.attn.qkv.weight"} <= decaying
    assert not {f"{connection}.mix_residual", "pos_embed", "cls_token"} & decaying


def test_lora_attaches() -> None:
    peft = pytest.importorskip("peft")
    _, model = rewired()
    expected = model(IMAGES)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv", "fc1"]))
    torch.testing.assert_close(adapted(IMAGES), expected, rtol=0, atol=0)
    adapted(IMAGES).square().sum().backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert len(trained) == 2 * 2 * DEPTH
    assert all("lora" in name for name in trained)


# --- refusals


def refusal(model: nn.Module, topology: str = "siamese-post-pre", **options: Any) -> str:
    """Return the reason why a model cannot be rewired, which leaves it as it was."""
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(UserError) as caught:
        rewire(model, topology, **options)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("options", [{"global_pool": "avg"}, {"final_norm": False}], ids=str)
@torch.no_grad()
def test_without_a_norm_of_every_token_only_the_sum_of_streams_can_stay(options: dict[str, Any]) -> None:
    assert "which no norm of every token follows" in refusal(build_host(**options))
    host = build_host(**options)
    model = copy.deepcopy(host)
    assert rewire(model, "attnres").function_kept
    torch.testing.assert_close(model(IMAGES), host(IMAGES), rtol=1e-4, atol=1e-5)


def test_a_model_that_returns_features_is_refused() -> None:
    features = build_host(features_only=True)
    assert "model.norm runs 0 times in one forward" in refusal(features, inputs={"x": IMAGES})


def test_blocks_of_other_classes_are_refused() -> None:
    from timm.models.vision_transformer import ParallelScalingBlock

    message = refusal(build_host(block_fn=ParallelScalingBlock))
    assert "blocks.0 is a timm.models.vision_transformer.ParallelScalingBlock" in message


def test_other_backbones_are_refused() -> None:
    naflex = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=DIM, num_heads=2)
    assert "NaFlexVit" in refusal(naflex)
    pyramid = timm.create_model("pit_ti_224")
    assert "3 stacks of blocks" in refusal(pyramid)


def test_a_second_rewiring_is_refused() -> None:
    _, model = rewired()
    assert "rewired already" in refusal(model, "siamese")


def test_one_projection_for_queries_keys_and_values_has_no_norm_of_each() -> None:
    assert "siamese-post-pre" in refusal(build_host(), "siamese", preserve=False)


@pytest.mark.parametrize("topology", available_topologies())
def test_every_topology_starts_from_scratch_or_says_why_not(topology: str) -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL)
    if topology in ("siamese", "hybridnorm", "hybridnorm-star", "residual-hybridnorm", "deepnorm"):
        refusal(model, topology, preserve=False)
    else:
        assert rewire(model, topology, preserve=False).differences is None
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())
