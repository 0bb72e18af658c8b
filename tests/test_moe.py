"""The mixture of experts: its operator, its formula, its scalars, and the laws of models that have one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm import LanguageModel, available_topologies, build_language_model
from siamesenorm.analysis import StreamMonitor
from siamesenorm.errors import UserError
from siamesenorm.kernels.grouped import (
    can_group,
    grouped_linear,
    grouped_linear_weight,
    looped_linear,
    looped_linear_weight,
)
from siamesenorm.models.conversion import convert, converted_config
from siamesenorm.models.cost import count_active_parameters, count_flops, count_parameters
from siamesenorm.models.language import SIZES
from siamesenorm.sublayers.moe import STATISTICS, MixtureOfExperts, MixtureShape
from siamesenorm.training.execution import checkpoint_blocks, compile_blocks
from siamesenorm.training.loop import Instrument, train
from siamesenorm.training.optimizer import decayed_parameters
from training_runs import records, tiny_run, write_data

EXPERTS: dict[str, Any] = {"experts": 4, "active_experts": 2}
TINY: dict[str, Any] = {"depth": 2, "dim": 16, "heads": 2, "hidden": 24, "vocabulary": 11, **EXPERTS}
# PyTorch's compiler asks every tensor for its gradient and hides the warning, which "error" brings back.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def tiny_model(topology: str = "siamese", *, seed: int = 0, **fields: Any) -> LanguageModel:
    """Return a model whose every parameter is random, gains and gates included."""
    model = build_language_model("nano", topology=topology, **{**TINY, **fields})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def tokens(seed: int = 3) -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(seed))


def run(model: LanguageModel, batch: Tensor) -> dict[str, Tensor]:
    """Return logits, losses, and the gradients of an objective on all of them."""
    model.zero_grad()
    logits, losses = model(batch)
    objective = (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum()
    (objective + losses["load_balancing_loss"] + losses["router_z_loss"]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **{name: loss.detach() for name, loss in losses.items()}, **gradients}


# --- the operator


def groups(dtype: torch.dtype, inside: int = 16, outside: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, weights and the ends of groups of 3, 0, 4 and 0 rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, inside, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, outside, inside, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.tensor([3, 3, 7, 7], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_operator_equals_the_loop(dtype: torch.dtype) -> None:
    """Forward and backward, for a gradient of stride 0 too; in fp64 it is the loop, against products by hand."""
    x, weight, offsets = groups(dtype)
    assert can_group(x, weight) == (dtype != torch.float64)
    found, looped = grouped_linear(x, weight, offsets), looped_linear(x, weight, offsets)
    by_hand = torch.cat((x[:3] @ weight[0].t(), x[3:] @ weight[2].t()))
    for factor in (torch.randn(7, 8).to(dtype), torch.ones((), dtype=dtype).expand(7, 8)):
        ours, theirs, hands = (
            torch.autograd.grad((y * factor).sum() if factor.stride()[0] else y.sum(), (x, weight), retain_graph=True)
            for y in (found, looped, by_hand)
        )
        torch.testing.assert_close((found, *ours), (looped, *theirs))
        torch.testing.assert_close((found, *ours), (by_hand, *hands))
    gradient = torch.ones((), dtype=dtype).expand(7, 8)
    expected = looped_linear_weight(gradient, x, offsets)
    torch.testing.assert_close(grouped_linear_weight(gradient, x, offsets), expected)
    assert expected[1].count_nonzero() == expected[3].count_nonzero() == 0 and expected[0].count_nonzero()


@pytest.mark.parametrize(("inside", "outside"), [(10, 8), (16, 9)])
def test_rows_that_are_no_multiple_of_16_bytes_are_looped(inside: int, outside: int) -> None:
    x, weight, offsets = groups(torch.float32, inside, outside)
    assert not can_group(x, weight)
    grouped_linear(x, weight, offsets).square().sum().backward()
    assert x.grad is not None and weight.grad is not None and weight.grad[1].count_nonzero() == 0


def test_the_operator_is_what_torch_takes_it_for() -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.siamesenorm.grouped_linear.default, groups(torch.float32), test_utils=checks)
    x, weight, offsets = (each.detach() for each in groups(torch.float32))
    arguments = (x @ weight[0].t(), x, offsets)
    torch.library.opcheck(torch.ops.siamesenorm.grouped_linear_weight.default, arguments, test_utils=checks[::2])


# --- the formula


def mixture(*, dtype: torch.dtype = torch.float64, **options: Any) -> MixtureOfExperts:
    sizes: dict[str, Any] = {"dim": 8, "hidden": 12, "experts": 5, "active": 2}
    layer = MixtureOfExperts(MixtureShape(**{**sizes, **options})).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return layer


def states(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(2)).to(dtype)


def by_the_formula(layer: MixtureOfExperts, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return output and scalars token by token, every expert computed."""
    shape, outputs, chosen_of = layer.shape, [], []
    logits = h.flatten(0, 1) @ layer.router.weight.t()
    for token, z in zip(h.flatten(0, 1), logits, strict=True):
        chosen = sorted(range(shape.experts), key=lambda e, z=z: -z[e].item())[: shape.active]
        weights = z[chosen].softmax(0) if shape.renormalise else z.softmax(0)[chosen]
        experts = [
            layer.output.weight[e] @ (F.silu(layer.gate.weight[e] @ token) * (layer.up.weight[e] @ token))
            for e in chosen
        ]
        outputs.append(sum(w * y for w, y in zip(weights, experts, strict=True)))
        chosen_of += chosen
    share = torch.tensor([chosen_of.count(e) / len(chosen_of) for e in range(shape.experts)], dtype=h.dtype)
    scalars = {
        "load_balancing_loss": shape.experts * (share * logits.softmax(-1).mean(0)).sum(),
        "router_z_loss": logits.exp().sum(-1).log().square().mean(),
        "largest_expert_load": share.max() * shape.experts,
        "expert_load_entropy": -(share[share > 0] * share[share > 0].log()).sum()
        / torch.tensor(shape.experts, dtype=h.dtype).log(),
        "dropped_tokens": torch.zeros((), dtype=torch.float32),
    }
    return torch.stack(outputs).view_as(h), scalars


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("active", [1, 2, 5])
def test_it_equals_the_formula(active: int, renormalise: bool) -> None:
    """Values, scalars and gradients; renormalised weights are the softmax of the chosen logits alone."""
    layer, h = mixture(active=active, renormalise=renormalise), states().requires_grad_()
    found, expected = layer(h), by_the_formula(layer, h)
    torch.testing.assert_close(found, expected)
    inputs = (h, *layer.parameters())
    ours, theirs = (
        torch.autograd.grad(
            output.square().sum() + scalars["load_balancing_loss"] + scalars["router_z_loss"], inputs, allow_unused=True
        )
        for output, scalars in (found, expected)
    )
    torch.testing.assert_close(ours, theirs)


def test_statistics_of_an_even_load_and_of_a_collapse() -> None:
    even = mixture(active=5)(states())[1]
    assert [even[name].item() for name in ("load_balancing_loss", *STATISTICS)] == pytest.approx([1, 1, 1, 0])
    layer = mixture(active=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[3] = 100.0
    collapsed = layer(states().abs())[1]
    numbers = [collapsed[name].item() for name in ("load_balancing_loss", *STATISTICS)]
    assert numbers == pytest.approx([5, 5, 0, 0], abs=1e-9)


def test_autocast_lowers_the_experts_and_not_the_router() -> None:
    layer, h = mixture(dtype=torch.float32), states(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, scalars = layer(h)
    expected, exact = layer(h)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    assert all(torch.equal(scalars[name], exact[name]) for name in exact)


# --- initial weights and cost


def test_experts_start_alike_in_every_topology_but_for_its_factors() -> None:
    pre, siamese, deepnorm = (
        build_language_model("nano", topology=name, **TINY, seed=5) for name in ("pre", "siamese", "deepnorm")
    )
    for name, weight in pre.blocks[1].mlp.named_parameters():
        assert torch.equal(siamese.blocks[1].mlp.get_parameter(name), weight)
        tamed = name.startswith(("up", "output"))  # of gated MLPs, too, the gate is not
        expected = weight * ((8 * 2) ** -0.25 if tamed else 1.0)
        torch.testing.assert_close(deepnorm.blocks[1].mlp.get_parameter(name), expected)
    output = pre.blocks[1].mlp.output.weight
    assert not torch.equal(output[0], output[1]) and not torch.equal(output, pre.blocks[0].mlp.output.weight)
    assert output.std().item() == pytest.approx((2 * 24 * 2) ** -0.5, rel=0.1)


def test_matrices_of_experts_and_routers_are_decayed() -> None:
    decided = decayed_parameters(tiny_model(), "declared")
    assert all(decided[f"blocks.0.mlp.{name}.weight"] for name in ("router", "up", "gate", "output"))


def test_total_and_active_parameters_and_flops() -> None:
    model = build_language_model("nano", topology="pre", device="meta", context=6, **TINY)
    dense = build_language_model("nano", topology="pre", device="meta", context=6, **{**TINY, "experts": 0})
    expert, router = 3 * 16 * 24, 16 * 4
    (parameters, _), (dense_parameters, _) = count_parameters(model), count_parameters(dense)
    assert parameters - dense_parameters == 2 * (3 * expert + router)
    assert parameters - count_active_parameters(model) == 2 * 2 * expert
    assert count_active_parameters(dense) == dense_parameters
    batch = torch.zeros(1, 6, dtype=torch.int64, device="meta")
    assert count_flops(model, batch) - count_flops(dense, batch) == 3 * 2 * 2 * 6 * (expert + router)


@pytest.mark.parametrize(
    ("size", "total", "active"),
    [("olmoe-1b-7b", 6.92e9, 1.28e9), ("olmoe-1.3b", 1.36e9, 0.305e9), ("moe-15b-a2b", 14.8e9, 2.09e9)],
)
def test_sizes_have_the_published_numbers_of_parameters(size: str, total: float, active: float) -> None:
    model = build_language_model(size, topology="pre", device="meta")
    assert count_parameters(model)[0] == pytest.approx(total, rel=0.005)
    assert count_active_parameters(model) == pytest.approx(active, rel=0.01)


# --- laws


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", available_topologies())
def test_every_topology_takes_a_step(topology: str) -> None:
    model = build_language_model("nano", topology=topology, **TINY)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(3):
        logits, auxiliary = model(tokens())
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens().flatten()))
        (losses[-1] + 0.01 * auxiliary["load_balancing_loss"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]
    moved = {name for name, p in model.named_parameters() if "mlp." in name and not torch.equal(p, before[name])}
    assert moved == {name for name in before if "mlp." in name}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.every_nth(2)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("topology", ["siamese", "dhc-2"])
def test_compiled_equals_eager(topology: str) -> None:
    """Whatever the routing: other tokens make no other graph."""
    model = tiny_model(topology)
    first, second = run(model, tokens()), run(model, tokens(seed=4))
    compile_blocks(model, backend="aot_eager")
    torch.testing.assert_close(run(model, tokens()), first, rtol=1e-4, atol=1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(run(model, tokens(seed=4)), second, rtol=1e-4, atol=1e-5)


def test_checkpointed_blocks_have_the_same_gradients() -> None:
    model = tiny_model()
    expected = run(model, tokens())
    checkpoint_blocks(model)
    torch.testing.assert_close(run(model, tokens()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("topology", ["pre", "siamese", "post"])
def test_fused_boundaries_equal_plain_ones(topology: str) -> None:
    plain, fused = tiny_model(topology), tiny_model(topology, kernels="fused")
    torch.testing.assert_close(run(fused, tokens()), run(plain, tokens()), rtol=1e-4, atol=1e-5)


def test_a_trained_mixture_takes_another_topology_and_keeps_its_function() -> None:
    model = tiny_model("pre").double()
    expected = model(tokens()).logits
    convert(model, converted_config(model.config, "siamese-post-pre"))
    assert model.config.experts == 4
    torch.testing.assert_close(model(tokens()).logits, expected)


def test_the_monitor_measures_a_mixture() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StreamMonitor(model, optimizer, every=1) as monitor:
        model(tokens()).logits.square().sum().backward()
        optimizer.step()
        monitor.step()
    (line,) = [line for line in monitor.records if line["kind"] == "streams"]
    assert line["sublayers"]["blocks.1.mlp"]["output"] > 0 and line["blocks"]["blocks.1"]["update_norm"] > 0


# --- training


class Stop(Exception):
    """Ends a run in its middle."""


class StopAfter(Instrument):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, loop: Any, record: dict[str, Any]) -> None:
        if record["step"] == self.step:
            raise Stop


def test_a_run_records_its_experts_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    config = tiny_run(write_data(tmp_path / "data"), model=EXPERTS)
    with pytest.raises(Stop):
        train(config, tmp_path / "stopped", instruments=(StopAfter(13),))
    train(config, tmp_path / "stopped")
    train(config, tmp_path / "whole")
    for file in ("model", "optimizer"):
        name = f"checkpoints/step-00000020/{file}.safetensors"
        paths = [tmp_path / run / name for run in ("stopped", "whole")]
        assert all(path.exists() for path in paths) == (file == "model")
        assert len({path.read_bytes() for path in paths if path.exists()}) <= 1
    assert records(tmp_path / "stopped", "train") == records(tmp_path / "whole", "train")
    described = records(tmp_path / "whole", "model")[0]
    assert described["active_parameters"] < described["parameters"]
    steps = records(tmp_path / "whole", "train")
    assert {step["dropped_tokens"] for step in steps} == {0.0}
    assert all(step["load_balancing_loss"] > 0.5 and 1 <= step["largest_expert_load"] <= 2 for step in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_weights_of_the_losses_count_and_statistics_do_not(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    changed = [{}, {"load_balancing_weight": 0.5}, {"router_z_weight": 0.5}]
    tasks = [tiny_run(data, model=EXPERTS | changes).task for changes in changed]
    model = tasks[0].build(0).build_model(torch.device("cpu"))
    losses = [task.build(0).loss(model, 0, 4) for task in tasks]
    (first, *others), scalars = losses, {name: value for name, (value, _) in losses[0].auxiliary.items()}
    balance, z = scalars["load_balancing_loss"], scalars["router_z_loss"]
    torch.testing.assert_close(first.objective, first.mean + 0.01 * balance + 0.001 * z)
    torch.testing.assert_close(others[0].objective - first.objective, 0.49 * balance)
    torch.testing.assert_close(others[1].objective - first.objective, 0.499 * z)


# --- bad input


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"experts": 1}, "experts is 1"),
        ({"experts": -4}, "experts is -4"),
        ({"active_experts": 5}, "active_experts is 5"),
        ({"active_experts": 0}, "active_experts is 0"),
        ({"bias": True}, "bias"),
        ({"activation": "gelu"}, "gelu"),
        ({"router_z_weight": -1.0}, "router_z_weight is -1"),
        ({"load_balancing_weight": float("nan")}, "load_balancing_weight is nan"),
    ],
)
def test_a_mixture_that_cannot_be_built_is_refused_in_one_line(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word) as error:
        build_language_model("nano", **{**TINY, **fields})
    assert "\n" not in str(error.value)


def test_the_small_size_is_one_for_a_cpu() -> None:
    total, _ = count_parameters(build_language_model("mini-moe", vocabulary=1024, device="meta"))
    assert 8e6 < total < 10e6 and SIZES["mini-moe"]["experts"] == 16
