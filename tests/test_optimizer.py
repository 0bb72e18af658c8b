"""Which parameters are decayed: by their own declaration, or, as in OLMo, all but the embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from siamesenorm import LanguageModel, available_norms, available_topologies, build_language_model
from siamesenorm.errors import UserError
from siamesenorm.norms import declared_parameters
from siamesenorm.sublayers.sublayer import Projection
from siamesenorm.training.config import OptimizerConfig
from siamesenorm.training.optimizer import build_optimizers, decayed_parameters, hidden_matrices, set_learning_rate

SHAPE = {"depth": 2, "dim": 16, "heads": 2, "hidden": 32, "vocabulary": 17, "context": 16}
MATRIX = "blocks.0.attention.query.weight"
MLP = ("mlp.up", "mlp.gate", "mlp.output")
RULES = ("declared", "all-but-embeddings")


def model(topology: str = "siamese", norm: str = "rmsnorm", **changes: object) -> LanguageModel:
    return build_language_model("nano", topology=topology, norm=norm, device="meta", **{**SHAPE, **changes})


def groups_of(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    return [group for optimizer in build_optimizers(model, config) for group in optimizer.param_groups]


def weight_decays(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    """Return the weight decay of every parameter by name, as the optimizer has it."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, float] = {}
    for group in groups_of(model, config):
        for parameter in group["params"]:
            assert name_of[id(parameter)] not in found, "in two groups"
            found[name_of[id(parameter)]] = group["weight_decay"]
    return found


@pytest.mark.parametrize("norm", available_norms())
@pytest.mark.parametrize("topology", available_topologies())
def test_every_parameter_is_in_one_group_and_its_declaration_decides(topology: str, norm: str) -> None:
    built = model(topology, norm, bias=True)
    declared = {name: 0.1 * declaration.decay for name, _, declaration in declared_parameters(built)}
    projections = {
        f"{prefix}.{name}": 0.1 * (name == "weight")
        for prefix, module in built.named_modules()
        if isinstance(module, Projection)
        for name, _ in module.named_parameters()
    }
    assert declared and projections
    expected = {"embedding.weight": 0.0, **projections, **declared}
    assert weight_decays(built, OptimizerConfig(weight_decay=0.1)) == expected
    olmo = dict.fromkeys(expected, 0.1) | {"embedding.weight": 0.0}
    assert weight_decays(built, OptimizerConfig(weight_decay=0.1, decay="all-but-embeddings")) == olmo


def test_declarations_are_those_of_the_papers() -> None:
    """SeeDNorm decays alpha and beta, not gamma; Hyper-Connections their dynamic part, not the static one."""
    seed = decayed_parameters(model("pre", "seednorm"), "declared")
    ours = {name.rpartition(".")[2]: decay for name, decay in seed.items() if "connection" in name}
    assert ours == {"alpha": True, "beta": True, "gamma": False}
    mixing = decayed_parameters(model("dhc-2"), "declared")
    dynamic = {name: "project_" in name for name in mixing if "connection" in name}
    assert {mixing[name] for name, is_dynamic in dynamic.items() if is_dynamic} == {True}
    assert {mixing[name] for name, is_dynamic in dynamic.items() if not is_dynamic} == {False}
    assert not any(decay for name, decay in decayed_parameters(model("siamese"), "declared").items() if "norm" in name)


@pytest.mark.parametrize("rule", RULES)
def test_a_tied_head_is_an_embedding(rule: str) -> None:
    built = model(tied=True)
    decisions = decayed_parameters(built, rule)
    assert decisions["embedding.weight"] is False
    assert "head.weight" not in decisions
    assert decisions.keys() == {name for name, _ in built.named_parameters()}
    assert decayed_parameters(model(tied=False), rule)["head.weight"] is True


@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_trained_has_no_group(rule: str) -> None:
    built = model()
    built.head.requires_grad_(False)
    assert "head.weight" not in weight_decays(built, OptimizerConfig(decay=rule))


def test_one_step_is_adamw() -> None:
    """On one decayed and on one spared parameter, by the formula."""
    config = OptimizerConfig(learning_rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.5)
    built = build_language_model("nano", topology="pre", **SHAPE)
    spared, decayed = built.embedding.weight, built.head.weight
    before = [parameter.detach().double() for parameter in (spared, decayed)]
    for parameter in built.parameters():
        parameter.grad = torch.full_like(parameter, 0.3)
    build_optimizers(built, config)[0].step()
    # At the first step mean and square are the gradient's, and the update is lr * g / (|g| + epsilon).
    torch.testing.assert_close(spared.double(), before[0] - 0.01 * 0.3 / (0.3 + 1e-8), rtol=0, atol=1e-7)
    torch.testing.assert_close(decayed.double(), before[1] * (1 - 0.01 * 0.5) - 0.01, rtol=0, atol=1e-7)


def test_the_learning_rate_is_set_everywhere() -> None:
    optimizers = build_optimizers(model(), OptimizerConfig(name="muon"), {"head.weight": 0.5, MATRIX: 0.25})
    set_learning_rate(optimizers, 0.125)
    adamw, muon = ([group["lr"] for group in optimizer.param_groups] for optimizer in optimizers)
    assert sorted(adamw) == [0.0625, 0.125] and sorted(muon) == [0.03125, 0.125]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "nan"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"clip": float("inf")}, "inf"),
        ({"beta2": 1.0}, "beta2"),
        ({"decay": "declard"}, "declard"),
        ({"name": "moun"}, "moun"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_numbers_that_are_none_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**changes)


def test_the_configured_numbers_reach_adamw() -> None:
    config = OptimizerConfig(learning_rate=0.01, beta1=0.7, beta2=0.8, epsilon=1e-3, weight_decay=0.5)
    for group in groups_of(model(), config):
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.7, 0.8), 1e-3)


# --- Muon


def test_muon_trains_the_matrices_of_attention_and_mlps_and_adamw_the_rest() -> None:
    built = model("dhc-2", "seednorm", bias=True)
    adamw, muon = build_optimizers(built, OptimizerConfig(name="muon", weight_decay=0.2, momentum=0.8))
    names = [{name for group in each.param_groups for name in group["param_names"]} for each in (adamw, muon)]
    assert names[1] == hidden_matrices(built) == {
        f"blocks.{block}.{name}.weight"
        for block in (0, 1)
        for name in (*(f"attention.{x}" for x in ("query", "key", "value", "output")), *MLP)
    }  # fmt: skip
    assert not names[0] & names[1] and names[0] | names[1] == {name for name, _ in built.named_parameters()}
    assert {"embedding.weight", "head.weight", "blocks.0.attention.query.bias"} <= names[0]
    (group,) = muon.param_groups
    assert (group["weight_decay"], group["momentum"], group["nesterov"]) == (0.2, 0.8, True)


def test_experts_and_routers_stay_with_adamw() -> None:
    names = hidden_matrices(model(experts=4))
    assert names and all(".attention." in name for name in names)


def test_a_model_without_such_matrices_refuses_muon() -> None:
    with pytest.raises(UserError, match="muon"):
        build_optimizers(nn.Sequential(nn.Linear(2, 2)), OptimizerConfig(name="muon"))


def test_one_step_of_muon_is_orthogonal_and_as_large_as_adamws() -> None:
    """The update is U V^T of the gradient, scaled to a root mean square of 0.2 (a step of AdamW has up to 1)."""
    config = OptimizerConfig(name="muon", learning_rate=0.01, weight_decay=0.5)
    built = build_language_model("nano", topology="pre", **{**SHAPE, "dim": 32, "hidden": 64})
    weight = built.get_parameter("blocks.0.mlp.up.weight")
    before = weight.detach().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in built.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    assert weight.grad is not None
    left, _, right = torch.linalg.svd(weight.grad.double(), full_matrices=False)
    for optimizer in build_optimizers(built, config):
        optimizer.step()
    update = (before * (1 - 0.01 * 0.5) - weight.detach().double()) / 0.01
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.25)
    assert torch.linalg.svdvals(update).div(0.2 * 64**0.5).sub(1).abs().max() < 0.4, "Newton-Schulz in five steps"
    assert torch.nn.functional.cosine_similarity(update.flatten(), (left @ right).flatten(), dim=0) > 0.97
