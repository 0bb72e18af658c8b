"""What `StreamMonitor` measures: streams, gradients and updates, against numbers from elsewhere."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import siamesenorm
from monitored_training import (
    DIM,
    VOCABULARY,
    Block,
    PlainModel,
    batches,
    cross_entropy,
    near,
    of_kind,
    rms,
    tiny_model,
    train,
)
from siamesenorm import LanguageModel, StreamMonitor
from siamesenorm.analysis import observe_streams
from siamesenorm.analysis.measurements import Measurements
from siamesenorm.analysis.probes import plan_probes
from siamesenorm.errors import UserError
from siamesenorm.models.block import split_losses
from siamesenorm.sublayers.attention import rotation
from siamesenorm.sublayers.sublayer import Context
from siamesenorm.topologies import ResidualSpec, available_topologies, build_topology, transformer_places
from siamesenorm.training.execution import checkpoint_blocks, compile_blocks

# --- the streams


@torch.no_grad()
def streams_by_hand(model: LanguageModel, tokens: Tensor) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return, for every sublayer, (streams as read, output, written streams), and the streams at the end."""
    streams = model.opening(model.embedding(tokens))
    rotary = rotation(torch.arange(tokens.shape[1]), DIM // 2, model.config.rope_theta, torch.float32)
    seen = {}
    for index, block in enumerate(model.blocks):
        attention = lambda h, block=block: block.attention(h, Context(rotary))  # noqa: E731
        for slot, connection, sublayer in (
            ("attention", block.attention_connection, attention),
            ("mlp", block.mlp_connection, block.mlp),
        ):
            h, read = connection.read(streams)
            output, _ = split_losses(sublayer(h))
            streams = connection.write(read, output)
            seen[f"blocks.{index}.{slot}"] = (read, output, streams)
    return seen, streams


STACKED = ("shc-2", "dhc-2", "mhc-4")
CROSSING = ("spannorm",)
"""Whose write keeps the block's input for another sublayer's."""


@pytest.mark.parametrize("topology", [name for name in available_topologies() if name not in STACKED + CROSSING])
def test_the_streams_are_those_between_read_and_write(topology: str) -> None:
    model = tiny_model(topology)
    name_streams = model.config.topology.name_streams
    seen, end = streams_by_hand(model, batches(1)[0][:, :-1])
    _, records = train(model, 1)
    (line,) = of_kind("streams", records)
    assert list(line["sublayers"]) == list(seen)
    for sublayer, (read, output, written) in seen.items():
        found = line["sublayers"][sublayer]
        assert found["output"] == near(rms(output))
        names = name_streams(len(read))
        assert list(found["streams"]) == list(names)
        for name, x, after in zip(names, read, written, strict=False):
            grows = len(written) > len(read)  # a new source changes none of the others
            assert found["streams"][name] == {
                "rms": near(rms(x)),
                "max": near(float(x.abs().max())),
                "ratio": near(rms(output) / rms(x)),
                **({} if grows else {"change": near(rms(after - x) / rms(x))}),
            }
    names = name_streams(len(end))
    assert line["end"] == {
        name: {"rms": near(rms(x)), "max": near(float(x.abs().max()))} for name, x in zip(names, end, strict=True)
    }


@pytest.mark.parametrize("topology", STACKED)
def test_stacked_streams_are_distinguished(topology: str) -> None:
    model = tiny_model(topology)
    seen, (end,) = streams_by_hand(model, batches(1)[0][:, :-1])
    _, records = train(model, 1)
    (line,) = of_kind("streams", records)
    for sublayer, (read, output, (after,)) in seen.items():
        found = line["sublayers"][sublayer]["streams"]
        assert list(found) == [f"streams[{number}]" for number in range(end.shape[-2])]
        for number, entry in enumerate(found.values()):
            x = read[0][..., number, :]
            assert entry["rms"] == near(rms(x))
            assert entry["ratio"] == near(rms(output) / rms(x))
            assert entry["change"] == near(rms(after[..., number, :] - x) / rms(x))
    assert [entry["rms"] for entry in line["end"].values()] == [near(rms(x)) for x in end.unbind(-2)]


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_writes_are_observed_by_name(compiled: bool) -> None:
    model, tokens = tiny_model("siamese"), batches(1)[0][:, :-1]
    if compiled:
        compile_blocks(model, backend="eager")
    before = model(tokens).logits
    seen, _ = streams_by_hand(model, tokens)
    found: dict[str, tuple[Any, ...]] = {}
    with observe_streams(model, lambda name, *values: found.update({name.removesuffix("_connection"): values})):
        assert torch.equal(model(tokens).logits, before)
        with pytest.raises(UserError), observe_streams(model, lambda *_: None):
            pass
        copied = copy.deepcopy(model)
    assert list(found) == list(seen)
    for name, (streams, output, written) in seen.items():
        torch.testing.assert_close(found[name], (streams, output, written))
    found.clear()
    model(tokens)
    assert not found and not any("write" in vars(module) for module in model.modules())
    assert torch.equal(copied(tokens).logits, before)


def test_pending_writes_show_the_same_streams() -> None:
    """Of a fused model everything but the change is known, which happens in the next sublayer's read."""
    plain, fused = (tiny_model("siamese", kernels=kernels) for kernels in ("plain", "fused"))
    (expected,), (found,) = (of_kind("streams", train(model, 1)[1]) for model in (plain, fused))
    assert list(found["sublayers"]) == list(expected["sublayers"])
    for name, sublayer in found["sublayers"].items():
        for stream, entry in sublayer["streams"].items():
            known = {key: value for key, value in expected["sublayers"][name]["streams"][stream].items()}
            del known["change"]
            assert entry == {key: near(value) for key, value in known.items()}
    assert found["end"] == {}


def test_a_plain_models_streams_are_seen_at_the_edges_of_its_blocks() -> None:
    model = PlainModel()
    edges = []
    with torch.no_grad():
        x = model.embedding(batches(1)[0][:, :-1])
        for layer in model.layers:
            after, _ = layer(hidden=x)
            edges.append((x, after))
            x = after
    (line,) = of_kind("streams", train(model, 1)[1])
    assert list(line["sublayers"]) == ["layers.0", "layers.1", "layers.2"]
    for found, (before, after) in zip(line["sublayers"].values(), edges, strict=True):
        ratio = near(rms(after - before) / rms(before))
        maximum = near(float(before.abs().max()))
        assert found["output"] == near(rms(after - before))
        assert found["streams"] == {
            "residual": {"rms": near(rms(before)), "max": maximum, "ratio": ratio, "change": ratio}
        }
    assert line["end"]["residual"]["rms"] == near(rms(x))


def test_a_block_that_overwrites_its_input_keeps_its_output_to_itself() -> None:
    class InPlace(Block):
        def forward(self, *, hidden: Tensor) -> tuple[Tensor, None]:
            return hidden.add_(self.linear.bias), None

    model = PlainModel()
    model.layers = nn.ModuleList((Block(), InPlace(), Block()))
    (line,) = of_kind("streams", train(model, 1, blocks="layers")[1])
    found = line["sublayers"]
    assert "output" in found["layers.0"] and "output" in found["layers.2"]
    assert list(found["layers.1"]["streams"]["residual"]) == ["rms", "max"] and "output" not in found["layers.1"]


def test_connections_in_a_model_of_ones_own_are_found() -> None:
    """Nothing there says what the streams are called."""
    topology, spec = build_topology("siamese"), ResidualSpec(dim=DIM)

    class OwnBlock(nn.Module):
        def __init__(self, places: Any) -> None:
            super().__init__()
            self.connections = nn.ModuleList(topology.connection(place, spec) for place in places)
            self.sublayers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in places)

        def forward(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
                streams = connection(streams, sublayer)
            return streams

    class Own(PlainModel):
        def __init__(self) -> None:
            super().__init__()
            self.opening = topology.opening(spec)
            self.layers = nn.ModuleList(OwnBlock(places) for places in transformer_places(2))

        def forward(self, tokens: Tensor) -> SimpleNamespace:
            streams = self.opening(self.embedding(tokens))
            for layer in self.layers:
                streams = layer(streams)
            return SimpleNamespace(logits=self.head(sum(streams)))

    (line,) = of_kind("streams", train(Own(), 1)[1])
    assert list(line["sublayers"]) == [f"layers.{b}.connections.{c}" for b in range(2) for c in range(2)]
    assert list(line["sublayers"]["layers.0.connections.0"]["streams"]) == ["stream0", "stream1"]
    assert list(line["blocks"]) == ["layers.0", "layers.1", "other"]


def test_a_step_of_several_micro_batches_is_their_mean() -> None:
    first, second = (streams_by_hand(tiny_model(), batch[:, :-1])[0]["blocks.1.mlp"][0][1] for batch in batches(2))
    (line,) = of_kind("streams", train(tiny_model(), 1, micro_batches=2)[1])
    found = line["sublayers"]["blocks.1.mlp"]["streams"]["identity"]
    assert rms(first) != near(rms(second))
    assert found["rms"] == near((rms(first) + rms(second)) / 2)
    assert found["max"] == near(max(float(first.abs().max()), float(second.abs().max())))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_the_backward_pass_computes_again_counts_once(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    add = Measurements.add
    monkeypatch.setattr(Measurements, "add", lambda self, key, *rest: (counted.append(key), add(self, key, *rest)))
    records = train(PlainModel(checkpointing=reentrant), 1)[1]
    assert len(counted) == len(set(counted)) > 0, "a mean would hide what counts twice"
    assert records == train(PlainModel(), 1)[1]


def test_checkpointed_blocks_of_connections_count_once() -> None:
    model = tiny_model()
    checkpoint_blocks(model)
    assert train(model, 3, every=1)[1] == train(tiny_model(), 3, every=1)[1]


def test_evaluation_is_not_training() -> None:
    for model in (tiny_model(), PlainModel()):
        monitor = StreamMonitor(model, every=1)
        model.eval()
        with torch.no_grad():
            cross_entropy(model, torch.zeros_like(batches(1)[0]))
        model.train()
        cross_entropy(model, batches(1)[0]).backward()
        monitor.step()
        monitor.close()
        assert monitor.records[1]["sublayers"] == train(copy.deepcopy(model), 1)[1][2]["sublayers"]


# --- gradients and updates


def gradients_of(model: nn.Module, module: nn.Module) -> float:
    cross_entropy(model, batches(1)[0]).backward()
    squares = [float(p.grad.double().pow(2).sum()) for p in module.parameters()]
    model.zero_grad()
    return math.sqrt(sum(squares))


def length(module: nn.Module) -> float:
    return math.sqrt(sum(float(p.detach().double().pow(2).sum()) for p in module.parameters()))


@pytest.mark.parametrize("give_optimizer", [True, False])
def test_updates_are_those_of_plain_gradient_descent(give_optimizer: bool) -> None:
    """Its step is the learning rate times the gradient."""
    model = tiny_model()
    gradients = {f"blocks.{index}": gradients_of(model, block) for index, block in enumerate(model.blocks)}
    weights = {f"blocks.{index}": length(block) for index, block in enumerate(model.blocks)}
    whole, everything = gradients_of(model, model), length(model)
    _, records = train(model, 1, give_optimizer=give_optimizer)
    train_line, line = records[1:]
    assert line["gradient_norm"] == train_line["gradient_norm"] == near(whole)
    assert line.get("learning_rate") == train_line.get("learning_rate") == (0.1 if give_optimizer else None)
    assert list(line["blocks"]) == [*gradients, "other"]
    for name, gradient in gradients.items():
        found = line["blocks"][name]
        assert found["gradient_norm"] == near(gradient)
        assert found["weight_norm"] == near(weights[name])
        assert found["update_norm"] == pytest.approx(0.1 * gradient, rel=1e-4)
        assert found["update_ratio"] == pytest.approx(0.1 * gradient / weights[name], rel=1e-4)
    assert math.hypot(*(block["weight_norm"] for block in line["blocks"].values())) == near(everything)


def test_frozen_and_tied_parameters_count_once_or_not_at_all() -> None:
    model = PlainModel()
    model.head.weight = model.embedding.weight
    model.layers[0].requires_grad_(False)
    (line,) = of_kind("streams", train(model, 1)[1])
    assert list(line["blocks"]) == ["layers.1", "layers.2", "other"]
    outside = math.hypot(length(model.embedding), float(model.head.bias.detach().norm()))
    assert line["blocks"]["other"]["weight_norm"] == pytest.approx(outside, rel=0.05)
    assert length(model.head) == near(outside)


def test_several_optimizers_and_one_with_a_closure() -> None:
    model = PlainModel()
    expected = train(copy.deepcopy(model), 1)[1][2]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.layers, model.embedding, model.head)]
    with StreamMonitor(model, *optimizers) as monitor:
        cross_entropy(model, batches(1)[0]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        monitor.step()
    assert monitor.records[1] == expected

    model = PlainModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, batches(1)[0])
        loss.backward()
        return loss

    with StreamMonitor(model, optimizer) as monitor:
        optimizer.step(closure)
        monitor.step()
    assert monitor.records[1] == expected


def test_a_scaled_loss_shows_in_nothing() -> None:
    model, scaler = tiny_model(), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    expected = train(copy.deepcopy(model), 1)[1][2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StreamMonitor(model, optimizer) as monitor:
        scaler.scale(cross_entropy(model, batches(1)[0])).backward()
        scaler.step(optimizer)
        monitor.step()
    assert monitor.records[1] == expected, "the scale is a power of two"


def test_without_updates_no_weights_are_copied() -> None:
    (line,) = of_kind("streams", train(tiny_model(), 1, updates=False)[1])
    assert line["blocks"] == {} and "gradient_norm" not in line and len(line["sublayers"]) == 4


def test_blocks_are_found_where_they_are_the_longest_list() -> None:
    class Mixture(Block):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(8))

    model = PlainModel()
    model.layers = nn.Sequential(Mixture(), Mixture())
    model.head = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, VOCABULARY))
    assert list(plan_probes(model).blocks) == ["layers.0", "layers.1"], "neither experts nor the head"


def test_it_is_public() -> None:
    assert siamesenorm.StreamMonitor is StreamMonitor
    assert "StreamMonitor" in siamesenorm.__all__
