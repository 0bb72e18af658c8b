"""Which parameters are decayed: by their own declaration, or, as in OLMo, all but the embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from siamesenorm import LanguageModel, available_norms, available_topologies, build_language_model
from siamesenorm.errors import UserError
from siamesenorm.norms import declared_parameters
from siamesenorm.sublayers.sublayer import Projection
from siamesenorm.training.config import OptimizerConfig
from siamesenorm.training.optimizer import build_optimizer, decayed_parameters, set_learning_rate

SHAPE = {"depth": 2, "dim": 16, "heads": 2, "hidden": 32, "vocabulary": 17, "context": 16}
RULES = ("declared", "all-but-embeddings")


def model(topology: str = "siamese", norm: str = "rmsnorm", **changes: object) -> LanguageModel:
    return build_language_model("nano", topology=topology, norm=norm, device="meta", **{**SHAPE, **changes})


def weight_decays(model: nn.Module, config: OptimizerConfig) -> dict[str, float]:
    """Return the weight decay of every parameter by name, as the optimizer has it."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, float] = {}
    for group in build_optimizer(model, config).param_groups:
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
    build_optimizer(built, config).step()
    # At the first step mean and square are the gradient's, and the update is lr * g / (|g| + epsilon).
    torch.testing.assert_close(spared.double(), before[0] - 0.01 * 0.3 / (0.3 + 1e-8), rtol=0, atol=1e-7)
    torch.testing.assert_close(decayed.double(), before[1] * (1 - 0.01 * 0.5) - 0.01, rtol=0, atol=1e-7)


def test_the_learning_rate_is_set_everywhere() -> None:
    optimizer = build_optimizer(model(), OptimizerConfig())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "nan"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"clip": float("inf")}, "inf"),
        ({"beta2": 1.0}, "beta2"),
        ({"decay": "declard"}, "declard"),
    ],
)
def test_numbers_that_are_none_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**changes)


def test_the_configured_numbers_reach_adamw() -> None:
    config = OptimizerConfig(learning_rate=0.01, beta1=0.7, beta2=0.8, epsilon=1e-3, weight_decay=0.5)
    for group in build_optimizer(model(), config).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.7, 0.8), 1e-3)
