"""A training that goes on from saved tensors is the training that never stopped, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.training.checkpoint import load_checkpoint, save_checkpoint
from siamesenorm.training.optimizer_state import optimizer_tensors, restore_optimizer
from siamesenorm.training.random_state import capture_random_state, restore_random_state


def build(seed=0, *, dtype=torch.float32, weight_decay=0.1, **options):
    """A small model with dropout, and AdamW with a group that decays and one that does not."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), **options)


def train(model, optimizer, steps):
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / step
        optimizer.zero_grad()
        inputs = torch.randn(5, 6, dtype=model[0].weight.dtype)
        model(inputs).square().sum().backward()
        optimizer.step()


def names(model):
    return dict(model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_resumed_is_never_stopped_to_the_bit(tmp_path, dtype, options):
    model, optimizer = build(dtype=dtype, **options)
    train(model, optimizer, range(1, 6))
    tensors, values = optimizer_tensors(optimizer, names(model))
    groups = {"model": model.state_dict(), "optimizer": tensors, "random": capture_random_state()}
    save_checkpoint(tmp_path, 5, groups, {"optimizer": values}, keep=1)
    train(model, optimizer, range(6, 11))

    again, its_optimizer = build(seed=99, dtype=dtype, **options)
    checkpoint = load_checkpoint(tmp_path)
    again.load_state_dict(checkpoint.tensors["model"])
    restore_optimizer(its_optimizer, names(again), checkpoint.tensors["optimizer"], checkpoint.state["optimizer"])
    restore_random_state(checkpoint.tensors["random"])
    train(again, its_optimizer, range(6, 11))

    ours, theirs = optimizer.state_dict(), its_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys() == set(range(6))
    for index, entries in ours["state"].items():
        for entry, tensor in entries.items():
            assert tensor.dtype == theirs["state"][index][entry].dtype
            assert torch.equal(tensor, theirs["state"][index][entry]), entry
    for name, parameter in names(model).items():
        assert torch.equal(parameter, names(again)[name]), name


def test_moments_keep_their_own_dtype():
    model, optimizer = build(dtype=torch.bfloat16)
    train(model, optimizer, [1])
    tensors, values = optimizer_tensors(optimizer, names(model))
    wide = {key: tensor.float() for key, tensor in tensors.items()}
    other, its_optimizer = build(seed=1, dtype=torch.bfloat16)
    restore_optimizer(its_optimizer, names(other), wide, values)
    assert its_optimizer.state[other[0].weight]["exp_avg"].dtype == torch.float32


def test_the_names_say_which_parameter_and_which_entry():
    model, optimizer = build()
    train(model, optimizer, [1])
    tensors, values = optimizer_tensors(optimizer, names(model))
    assert set(tensors) == {f"{name}/{entry}" for name in names(model) for entry in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors["0.weight/exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]
    assert values["scalars"] == {}
    assert values["groups"][0]["parameters"] == ["0.weight", "3.weight"]
    assert values["groups"][0]["hyperparameters"]["betas"] == [0.9, 0.95]
    assert "lr" not in values["groups"][0]["hyperparameters"]


def test_entries_that_are_no_tensors_go_to_the_plain_values_and_back():
    model, optimizer = build()
    train(model, optimizer, [1])
    optimizer.state[model[0].weight]["clock"] = 7
    tensors, values = optimizer_tensors(optimizer, names(model))
    assert values["scalars"] == {"0.weight/clock": 7}
    again, its_optimizer = build(seed=1)
    restore_optimizer(its_optimizer, names(again), tensors, values)
    assert its_optimizer.state[again[0].weight]["clock"] == 7


def test_the_order_of_parameters_does_not_matter():
    model, optimizer = build()
    train(model, optimizer, [1])
    tensors, values = optimizer_tensors(optimizer, names(model))
    again, its_optimizer = build(seed=1)
    for group in its_optimizer.param_groups:
        group["params"].reverse()
    restore_optimizer(its_optimizer, names(again), tensors, values)
    restored = its_optimizer.state[again[3].weight]["exp_avg"]
    assert torch.equal(restored, optimizer.state[model[3].weight]["exp_avg"])


def test_restored_tensors_are_copies():
    model, optimizer = build()
    train(model, optimizer, [1])
    tensors, values = optimizer_tensors(optimizer, names(model))
    before = copy.deepcopy(tensors)
    again, its_optimizer = build(seed=1)
    restore_optimizer(its_optimizer, names(again), tensors, values)
    train(again, its_optimizer, [2])
    assert all(torch.equal(tensors[key], before[key]) for key in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_decay": 0.2}, "made with weight_decay = 0.1, this run has 0.2"),
        ({"eps": 1e-6}, "made with eps = 1e-08, this run has 1e-06"),
        ({"amsgrad": True}, "made with amsgrad = False, this run has True"),
    ],
)
def test_other_hyperparameters_are_refused_and_nothing_changes(change, message):
    model, optimizer = build()
    train(model, optimizer, [1])
    tensors, values = optimizer_tensors(optimizer, names(model))
    again, its_optimizer = build(seed=1, **change)
    with pytest.raises(UserError, match=message):
        restore_optimizer(its_optimizer, names(again), tensors, values)
    assert not its_optimizer.state


def test_the_learning_rate_is_neither_compared_nor_loaded():
    model, optimizer = build()
    train(model, optimizer, [1])
    saved = optimizer_tensors(optimizer, names(model))
    again, its_optimizer = build(seed=1)
    its_optimizer.param_groups[0]["lr"] = 0.5
    restore_optimizer(its_optimizer, names(again), *saved)
    assert its_optimizer.param_groups[0]["lr"] == 0.5


def test_other_parameters_or_shapes_are_refused():
    model, optimizer = build()
    train(model, optimizer, [1])
    tensors, values = optimizer_tensors(optimizer, names(model))
    renamed = {f"blocks.{name}": parameter for name, parameter in names(model).items()}
    with pytest.raises(UserError, match="other parameters"):
        restore_optimizer(optimizer, renamed, tensors, values)
    wider = {**tensors, "0.weight/exp_avg": torch.zeros(9, 6)}
    with pytest.raises(UserError, match=r"0.weight/exp_avg has shape \[9, 6\], the parameter \[8, 6\]"):
        restore_optimizer(optimizer, names(model), wider, values)
    with pytest.raises(ValueError, match="1 parameters of the optimizer have no name"):
        optimizer_tensors(optimizer, {name: p for name, p in names(model).items() if name != "0.bias"})


def test_the_random_state_comes_back():
    states = capture_random_state()
    first = torch.rand(5)
    torch.rand(100)
    restore_random_state(states)
    assert torch.equal(torch.rand(5), first)


def test_the_random_state_of_absent_gpus_is_refused():
    states = capture_random_state()
    absent = {f"cuda-{index}": states["cpu"] for index in range(torch.cuda.device_count() + 1)}
    with pytest.raises(UserError, match="GPUs"):
        restore_random_state({**states, **absent})
