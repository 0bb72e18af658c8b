"""A training that goes on from saved tensors is the training that never stopped, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from checkpoint_stages import save_checkpoint
from siamesenorm.errors import UserError
from siamesenorm.training.checkpoint import capture_random_state, load_checkpoint, restore_random_state
from siamesenorm.training.optimizer import optimizer_tensors, restore_optimizers


def build(seed=0, *, dtype=torch.float32, weight_decay=0.1, **options):
    """A small model with dropout, and AdamW with a group that decays and one that does not."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    decayed = [(name, parameter) for name, parameter in model.named_parameters() if parameter.ndim > 1]
    others = [(name, parameter) for name, parameter in model.named_parameters() if parameter.ndim <= 1]
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
    tensors = optimizer_tensors([optimizer])
    groups = {"model": model.state_dict(), "optimizer": tensors, "random": capture_random_state()}
    save_checkpoint(tmp_path, 5, groups, {}, keep=1)
    train(model, optimizer, range(6, 11))

    again, its_optimizer = build(seed=99, dtype=dtype, **options)
    checkpoint = load_checkpoint(tmp_path)
    again.load_state_dict(checkpoint.tensors["model"])
    restore_optimizers([its_optimizer], checkpoint.tensors["optimizer"])
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


def test_the_names_say_which_parameter_and_which_entry():
    model, optimizer = build()
    train(model, optimizer, [1])
    tensors = optimizer_tensors([optimizer])
    assert set(tensors) == {f"{name}/{entry}" for name in names(model) for entry in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors["0.weight/exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]


def test_the_order_of_parameters_does_not_matter():
    model, optimizer = build()
    train(model, optimizer, [1])
    again, its_optimizer = build(seed=1)
    for group in its_optimizer.param_groups:
        group["params"].reverse()
        group["param_names"].reverse()
    restore_optimizers([its_optimizer], optimizer_tensors([optimizer]))
    restored = its_optimizer.state[again[3].weight]["exp_avg"]
    assert torch.equal(restored, optimizer.state[model[3].weight]["exp_avg"])


def test_restored_tensors_are_copies():
    model, optimizer = build()
    train(model, optimizer, [1])
    tensors = optimizer_tensors([optimizer])
    before = copy.deepcopy(tensors)
    again, its_optimizer = build(seed=1)
    restore_optimizers([its_optimizer], tensors)
    train(again, its_optimizer, [2])
    assert all(torch.equal(tensors[key], before[key]) for key in before)


def test_hyperparameters_stay_those_of_the_optimizer():
    model, optimizer = build()
    train(model, optimizer, [1])
    _, its_optimizer = build(seed=1, weight_decay=0.2)
    its_optimizer.param_groups[0]["lr"] = 0.5
    restore_optimizers([its_optimizer], optimizer_tensors([optimizer]))
    assert (its_optimizer.param_groups[0]["lr"], its_optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.2)


def test_other_parameters_are_refused_and_nothing_changes():
    model, optimizer = build()
    train(model, optimizer, [1])
    tensors = {f"blocks.{key}": tensor for key, tensor in optimizer_tensors([optimizer]).items()}
    _, its_optimizer = build(seed=1)
    with pytest.raises(UserError):
        restore_optimizers([its_optimizer], tensors)
    assert not its_optimizer.state


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_the_step_count_is_where_the_kernel_reads_it(options):
    """On a GPU AdamW counts on the CPU, unless its kernel reads the count; the meta device stands for the GPU."""
    model, optimizer = build(**options)
    train(model, optimizer, [1]) if not options.get("capturable") else None
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(8, 6), "exp_avg_sq": torch.zeros(8, 6)}
    model.to("meta")
    groups = [{"params": [("0.weight", nn.Parameter(torch.zeros(8, 6, device="meta")))]}]
    restored = torch.optim.AdamW(groups, **options)
    restore_optimizers([restored], {f"0.weight/{entry}": value for entry, value in state.items()})
    (entries,) = restored.state.values()
    assert entries["exp_avg"].is_meta
    assert entries["step"].is_meta == bool(options)


def test_the_random_state_comes_back():
    states = capture_random_state()
    first = torch.rand(5)
    torch.rand(100)
    restore_random_state(states)
    assert torch.equal(torch.rand(5), first)


def test_the_random_state_of_absent_gpus_is_refused():
    states = capture_random_state()
    absent = {f"cuda-{index}": states["cpu"] for index in range(torch.cuda.device_count() + 1)}
    with pytest.raises(UserError):
        restore_random_state({**states, **absent})
