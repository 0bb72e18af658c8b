"""Models of this library under `rewire` and `swap_norms`: function, gradients, and a configuration that is true.

What must be kept is known without the code that keeps it: the logits of the Pre-Norm model itself.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siamesenorm import build_language_model, build_topology, rewire, swap_norms
from siamesenorm.errors import UserError
from siamesenorm.models.conversion import convert, converted_config, require_convertible
from siamesenorm.models.language import LanguageModel, LanguageModelConfig
from siamesenorm.norms import NormSpec, declared_parameters
from siamesenorm.topologies import TOPOLOGIES, topology_name
from siamesenorm.training.optimizer import decayed_parameters

SHAPE: dict[str, Any] = {"depth": 3, "dim": 16, "heads": 2, "hidden": 24, "context": 12, "vocabulary": 11}
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 11
EXACT = 1e-12
INEXACT_WITH_SCALENORM = (
    "shc-2", "dhc-2", "mhc-4", "siamese", "siamese-post-pre", "siamese-post-pre:post_norm=lazy",
    "siamese-post-pre:readout=code", "siamese:normalized_input=false",
)  # fmt: skip
CAN = (
    "pre", "ln-scaling", "layerscale", "lambdas", "shc-2", "dhc-2", "mhc-4", "attnres", "attnres-full", "siamese",
    "siamese-post-pre",
    "siamese-post-pre:normalized_input=false", "siamese-post-pre:post_norm=lazy", "siamese-post-pre:readout=code",
    "siamese:normalized_input=false",
)  # fmt: skip
CANNOT = (
    "pre-embednorm", "post", "deepnorm", "residual", "residual-hybridnorm", "mixln", "hybridnorm", "hybridnorm-star",
    "spannorm", "keel", "peri", "olmo2", "rezero",
)  # fmt: skip


def trained(norm: str = "rmsnorm", **fields: Any) -> LanguageModel:
    """Return a Pre-Norm model in fp64 whose gains and biases are none of their initial values."""
    model = build_language_model("nano", topology="pre", norm=norm, **{**SHAPE, **fields}).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter, _ in declared_parameters(model):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model: nn.Module) -> Tensor:
    return model(TOKENS).logits


def attention_norm_for(topology: str) -> str:
    needed = build_topology(topology).attention_norm
    return "qk" if needed == "auto" else needed


def test_every_topology_is_known_to_this_file() -> None:
    ours = {name for name, topology in TOPOLOGIES.items() if type(topology).__module__.startswith("siamesenorm.")}
    assert {name.partition(":")[0] for name in CAN + CANNOT} == ours


@pytest.mark.parametrize("norm", ["rmsnorm:eps=1e-12", "layernorm:eps=1e-12", "scalenorm:eps=1e-12"])
@pytest.mark.parametrize("topology", CAN)
def test_the_function_is_kept(topology: str, norm: str) -> None:
    model = trained(norm, attention_norm=attention_norm_for(topology))
    before = logits(model)
    report = rewire(model, topology)
    assert (logits(model) - before).abs().max() < EXACT
    # The eps of ScaleNorm bounds a length: that of a norm of a norm differs, for very short tokens.
    doubled = norm.startswith("scalenorm") and topology in INEXACT_WITH_SCALENORM
    assert report.function_kept == (not doubled)


def test_without_input_norm_it_is_kept_bit_for_bit() -> None:
    model = trained().float()
    before = logits(model)
    assert rewire(model, "siamese-post-pre:normalized_input=false").function_kept
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("topology", ["siamese-post-pre", "mhc-4"])
def test_an_eps_that_is_not_small_makes_no_difference(topology: str) -> None:
    model = trained("rmsnorm:eps=1e-2")
    before = logits(model)
    assert rewire(model, topology).function_kept
    assert (logits(model) - before).abs().max() < EXACT


@pytest.mark.parametrize("topology", CAN)
def test_the_result_is_the_model_that_its_configuration_describes(topology: str) -> None:
    model = trained(attention_norm=attention_norm_for(topology))
    rewire(model, topology)
    again = LanguageModel(LanguageModelConfig.from_json(model.config.to_json())).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))
    assert model.config.topology == build_topology(topology).preserving()


@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre", "siamese-post-pre:post_norm=lazy"])
def test_the_silent_stream_wakes_up(topology: str) -> None:
    model = trained(attention_norm=attention_norm_for(topology))
    rewire(model, topology)
    logits(model).square().mean().backward()
    silent = {name: p for name, p, _ in declared_parameters(model) if not p.detach().any()}
    assert silent, "the bounded stream starts at zero"
    if topology == "siamese-post-pre:post_norm=lazy":
        assert len(silent) == 2 * SHAPE["depth"] + 1
    for name, parameter in silent.items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-8, name


@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre"])
def test_no_weight_decay_holds_the_new_gains_at_zero(topology: str) -> None:
    model = trained(attention_norm=attention_norm_for(topology))
    rewire(model, topology)
    decays = decayed_parameters(model, "declared")
    assert not any(decays[name] for name, _, _ in declared_parameters(model))
    assert any(decays.values()), "the projections are decayed as before"


def test_sublayers_are_left_alone_and_the_new_parts_are_where_the_old_were() -> None:
    model = trained().eval()
    kept = [model.embedding, model.head, *[m for block in model.blocks for m in (block.attention, block.mlp)]]
    states = [copy.deepcopy(module.state_dict()) for module in kept]
    report = rewire(model, "siamese-post-pre")
    assert kept == [model.embedding, model.head, *[m for b in model.blocks for m in (b.attention, b.mlp)]]
    for module, state in zip(kept, states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    fates = {norm.name: norm.outcome for norm in report.norms}
    assert {fates[name] for name in fates if ".attention." in name} == {"kept"}
    assert fates["blocks.1.mlp_connection.norm"] == "moved" and fates["closing.norm"] == "moved"
    assert fates["blocks.1.mlp_connection.post_norm"] == "new" and "siamese-post-pre" in str(report)


def test_generation_with_a_cache_goes_on_as_before() -> None:
    model = trained()
    before = model.generate(TOKENS[:, :4], 6)
    rewire(model, "siamese-post-pre")
    assert torch.equal(model.generate(TOKENS[:, :4], 6), before)


def test_fused_kernels_read_the_same_function() -> None:
    model = trained(kernels="fused")
    before = logits(model)
    rewire(model, "siamese-post-pre:normalized_input=false")
    assert model.kernels == "fused"
    assert (logits(model) - before).abs().max() < EXACT


@pytest.mark.parametrize("topology", CANNOT)
def test_what_cannot_keep_the_function_is_refused_with_the_model_untouched(topology: str) -> None:
    model = trained(attention_norm=attention_norm_for(topology))
    before, config = logits(model), model.config
    with pytest.raises(UserError):
        rewire(model, topology)
    assert model.config is config and torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        ({}, {"topology": "siamese"}, "needs attention norm 'qkv-head', and the model has 'qk'"),
        ({"norm": "dyt"}, {"topology": "siamese-post-pre"}, "norm dyt"),
        ({"norm": "seednorm"}, {"topology": "siamese-post-pre"}, "norm seednorm"),
        ({"norm": "layernorm"}, {"topology": "pre", "norm": "rmsnorm"}, "the mean is no longer subtracted"),
        ({"norm": "layernorm"}, {"topology": "pre", "norm": "layernorm:bias=false"}, "the bias is dropped"),
        ({}, {"topology": "pre", "norm": "rmsnorm:eps=1e-3"}, "eps 1e-05 became 0.001"),
        ({}, {"topology": "pre", "norm": "dyt"}, "rmsnorm became dyt"),
        ({}, {"topology": "siamese-post-pre", "preserve": False}, "preserve=False"),
        ({}, {"topology": "siamse"}, "siamese"),
    ],
)
def test_refusals_name_the_reason(source: dict[str, Any], change: dict[str, Any], words: str) -> None:
    model = trained(**source)
    before = logits(model)
    with pytest.raises(UserError) as refusal:
        rewire(model, **change)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    assert torch.equal(logits(model), before)


def test_a_rewired_model_is_not_rewired_again() -> None:
    model = trained()
    rewire(model, "siamese-post-pre")
    with pytest.raises(UserError, match="siamese-post-pre"):
        rewire(model, "dhc-2")


# --- the operator


@pytest.mark.parametrize("swap", [lambda m: swap_norms(m, "seednorm"), lambda m: rewire(m, "pre", norm="seednorm")])
def test_rmsnorm_becomes_seednorm_and_the_configuration_says_so(swap: Any) -> None:
    model = trained("rmsnorm:eps=1e-6")
    before = logits(model)
    assert swap(model).function_kept
    assert (logits(model) - before).abs().max() < EXACT
    assert model.config.norm == NormSpec.parse("seednorm:eps=1e-6")
    again = LanguageModel(LanguageModelConfig.from_json(model.config.to_json())).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))
    logits(model).square().mean().backward()
    betas = [p.grad for name, p in model.named_parameters() if name.endswith(".beta")]
    assert len(betas) == 2 * SHAPE["depth"] + 1 and all(grad is not None and grad.any() for grad in betas)


def test_a_swap_that_no_configuration_describes_is_refused() -> None:
    for norm, where, words in (
        ("seednorm", "blocks.0.*", "leave it out"),
        ("layernorm", None, "other norms in the attention"),
        ("dyt", None, "scale of the embedding"),
    ):
        model = trained()
        config, before = model.config, logits(model)
        with pytest.raises(UserError, match=words):
            swap_norms(model, norm, where)
        assert model.config is config and torch.equal(logits(model), before)


def test_fused_connections_keep_their_operator() -> None:
    model = trained(kernels="fused")
    with pytest.raises(UserError, match="kernels='plain'"):
        swap_norms(model, "seednorm")
    assert model.config.norm == NormSpec()


# --- configurations


def test_a_model_may_stay_what_it_is() -> None:
    for topology in ("post", "siamese", "dhc-2"):
        model = build_language_model("nano", topology=topology, norm="seednorm", **SHAPE)
        before = logits(model)
        target = converted_config(model.config, dropout=0.5)
        assert convert(model, target) == () and model.config.dropout == 0.5
        assert model.blocks[0].dropout.p == 0.5
        assert torch.equal(logits(model.eval()), before)


def test_a_target_that_is_not_reached_is_refused_by_the_field() -> None:
    config = trained().config
    for field, value in (("depth", 4), ("vocabulary", 12), ("rope_theta", 5.0), ("tied", True)):
        with pytest.raises(UserError, match=f"^{field} of a model"):
            require_convertible(config, dataclasses.replace(config, **{field: value}))
    with pytest.raises(UserError, match="topology"):
        require_convertible(config, dataclasses.replace(config, topology=build_topology("siamese-post-pre")))
    with pytest.raises(UserError, match="depth"):
        converted_config(config, "pre", depth=4)


def test_the_name_of_the_preserving_topology_reads_back() -> None:
    config = converted_config(trained().config, "siamese-post-pre")
    assert build_topology(topology_name(config.topology)) == config.topology
    assert math.isclose(config.norm.to_json()["eps"], 1e-5)
