"""The average of the weights, stochastic depth, factors on the rate and draws by position: what tasks build on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from siamesenorm import build_language_model
from siamesenorm.data import generator_at
from siamesenorm.errors import UserError
from siamesenorm.models.block import Block, DropPath
from siamesenorm.training.loop import Instrument, train
from siamesenorm.training.optimizer import OptimizerConfig, build_optimizers, set_learning_rate
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.world import World
from training_runs import records, tiny_run, write_data

TINY = {"depth": 3, "dim": 16, "heads": 2, "hidden": 32, "vocabulary": 17, "context": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "tokens")


class Weights(Instrument):
    """Keeps the weights after every step; interrupts after one if asked to."""

    def __init__(self, interrupt_after: int = 0) -> None:
        self.after: list[dict[str, torch.Tensor]] = []
        self.interrupt_after = interrupt_after

    def on_start(self, loop: Any, step: int) -> None:
        self.after.append({name: p.detach().clone() for name, p in loop.model.named_parameters()})

    def on_step(self, loop: Any, record: dict[str, Any]) -> None:
        self.after.append({name: p.detach().clone() for name, p in loop.model.named_parameters()})
        if record["step"] == self.interrupt_after:
            raise KeyboardInterrupt


def test_the_average_is_that_of_the_weights_after_each_step_and_survives_an_interruption(
    data: Path, tmp_path: Path
) -> None:
    config = tiny_run(
        data,
        steps=6,
        ema=0.75,
        validation_every=3,
        optimizer={"name": "muon"},
        execution={"checkpoint_every": 2, "keep_states": True},
    )
    seen = Weights()
    train(config, tmp_path / "whole", instruments=(seen,))
    average = {name: weight.double() for name, weight in seen.after[0].items()}
    for weights in seen.after[1:]:
        average = {name: 0.75 * average[name] + 0.25 * weight for name, weight in weights.items()}
    state = load_file(tmp_path / "whole/checkpoints/step-00000006/optimizer.safetensors")
    assert {name.rpartition("/")[2] for name in state} == {"exp_avg", "exp_avg_sq", "step", "momentum_buffer"}
    stored = load_file(tmp_path / "whole/checkpoints/step-00000006/ema.safetensors")
    assert stored.keys() == average.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor.double(), average[name], rtol=1e-5, atol=1e-7)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "resumed", instruments=(Weights(interrupt_after=5),))
    train(config, tmp_path / "resumed")
    assert records(tmp_path / "resumed") == records(tmp_path / "whole")
    for group in ("model", "ema", "optimizer"):
        path = f"checkpoints/step-00000006/{group}.safetensors"
        assert (tmp_path / "whole" / path).read_bytes() == (tmp_path / "resumed" / path).read_bytes()


def test_the_average_is_evaluated_and_training_goes_on_from_the_weights(data: Path, tmp_path: Path) -> None:
    train(tiny_run(data, steps=6, ema=0.5, validation_every=3, execution={}), tmp_path / "with")
    train(tiny_run(data, steps=6, validation_every=3, execution={}), tmp_path / "without")
    with_average, without = (records(tmp_path / run, "validation") for run in ("with", "without"))
    assert [r["loss"] for r in with_average] == [r["loss"] for r in without]
    assert "ema_loss" not in without[0]
    config = RunDirectory(tmp_path / "with").read_config()
    model = build_language_model(config.task.model)
    checkpoint = tmp_path / "with/checkpoints/step-00000006"
    model.load_state_dict(load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "ema.safetensors"))
    with torch.no_grad():
        result = config.task.build(0).evaluate(model.eval(), config.batch, World())
    assert with_average[-1]["ema_loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert with_average[-1]["ema_loss"] != with_average[-1]["loss"]


@pytest.mark.parametrize("ema", [-0.1, 1.0])
def test_a_decay_that_averages_nothing_is_refused(data: Path, ema: float) -> None:
    with pytest.raises(UserError):
        tiny_run(data, ema=ema)


def test_stochastic_depth_grows_along_the_depth_and_drops_whole_samples() -> None:
    model = build_language_model("nano", topology="siamese", drop_path=0.5, **TINY)
    rates = [1 - float(block.drop_path.keep) for block in model.blocks]
    assert rates == [0.0, 0.25, 0.5]
    torch.manual_seed(0)
    x = torch.ones(4000, 2, 3)
    kept = model.blocks[2].drop_path.train()(x)
    per_sample = kept.flatten(1)
    assert ((per_sample == 0).all(1) | (per_sample == 2).all(1)).all()
    assert float((per_sample[:, 0] > 0).double().mean()) == pytest.approx(0.5, abs=0.05)
    assert torch.equal(model.blocks[2].drop_path.eval()(x), x)


@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre", "post", "dhc-2"])
def test_every_stream_drops_together(topology: str) -> None:
    """A block whose outputs are all dropped is the block without sublayers."""
    model = build_language_model("nano", topology=topology, drop_path=0.5, **TINY).train()
    block = model.blocks[1]
    assert isinstance(block, Block) and isinstance(block.drop_path, DropPath)
    block.drop_path.constant("keep", 1e-9)
    streams = model.opening(torch.randn(2, 5, 16))
    dropped, _ = block(streams)
    for name in ("attention", "mlp"):
        torch.nn.init.zeros_(getattr(block, name).output.weight)
    block.drop_path.eval()
    silent, _ = block(streams)
    for ours, expected in zip(dropped, silent, strict=True):
        torch.testing.assert_close(ours, expected)


def test_blocks_of_different_rates_are_one_compiled_graph_and_equal_the_formula() -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = build_language_model("nano", topology="pre", drop_path=0.5, **TINY).train()
    tokens = torch.randint(17, (4, 16))
    torch.manual_seed(1)
    with torch.no_grad():
        eager = model(tokens).logits
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=count)
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, eager)
    assert len(graphs) == 1


def test_factors_multiply_the_rate_of_single_parameters() -> None:
    model = build_language_model("nano", topology="pre", **TINY)
    factors = {"head.weight": 0.5, "embedding.weight": 0.25}
    (optimizer,) = build_optimizers(model, OptimizerConfig(), factors)
    set_learning_rate([optimizer], 8.0)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rates.keys() == dict(model.named_parameters()).keys()
    assert {name: rate for name, rate in rates.items() if rate != 8.0} == {"head.weight": 4.0, "embedding.weight": 2.0}


def test_draws_are_functions_of_seed_purpose_and_position() -> None:
    def draw(*key: Any) -> float:
        return float(torch.rand((), generator=generator_at(*key), dtype=torch.float64))

    assert draw(0, "noise", 3) == draw(0, "noise", 3)
    keys = [(0, "noise", 3), (1, "noise", 3), (0, "mask", 3), (0, "noise", 4), (0, "noise", 3, 0)]
    assert len({draw(*key) for key in keys}) == len(keys)
    many = torch.tensor([draw(0, "noise", position) for position in range(2000)])
    assert float(many.mean()) == pytest.approx(0.5, abs=0.03) and float(many.var()) == pytest.approx(1 / 12, abs=0.01)
