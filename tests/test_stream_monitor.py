"""`StreamMonitor`: its numbers against numbers from elsewhere, training untouched, and the loops of others."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import siamesenorm
from siamesenorm import LanguageModel, StreamMonitor, build_language_model
from siamesenorm.analysis.blocks import find_anatomy
from siamesenorm.analysis.measurements import Measurements
from siamesenorm.errors import UserError
from siamesenorm.models.block import split_losses
from siamesenorm.sublayers.rotary import rotation
from siamesenorm.topologies import Materials, build_topology, transformer_places
from siamesenorm.training.curves import read_loss_curve
from siamesenorm.training.parallel import checkpoint_blocks, compile_blocks
from siamesenorm.training.stability import judge, judge_curve

VOCABULARY, DIM = 11, 16


def tiny_model(topology: str = "siamese", **fields: Any) -> LanguageModel:
    """Return a model whose every parameter is random, gains and gates included."""
    sizes = {"depth": 2, "dim": DIM, "heads": 2, "hidden": 24, "vocabulary": VOCABULARY}
    model = build_language_model("nano", topology=topology, **{**sizes, **fields})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


class Block(nn.Module):
    """A residual block that hands on a tuple, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, *, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden + self.linear(hidden), None


class PlainModel(nn.Module):
    """A model that knows nothing of this package; `checkpointing` is that of `torch.utils.checkpoint`, if any."""

    def __init__(self, depth: int = 3, checkpointing: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, VOCABULARY)
        self.reentrant = checkpointing

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.reentrant is None:
                x, _ = layer(hidden=x)
            else:
                x = checkpoint(lambda x, layer=layer: layer(hidden=x)[0], x, use_reentrant=self.reentrant)
        return SimpleNamespace(logits=self.head(x))


def batches(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (2, 9), generator=generator) for _ in range(count)]


def cross_entropy(model: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())


def train(
    model: nn.Module,
    steps: int,
    *,
    monitored: bool = True,
    micro_batches: int = 1,
    give_optimizer: bool = True,
    **options: Any,
) -> tuple[list[float], list[dict[str, Any]]]:
    """Train as any loop does, and return the losses and the monitor's records."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = [optimizer] if give_optimizer else []
    monitor = StreamMonitor(model, *optimizers, **options) if monitored else None
    data, losses = iter(batches(steps * micro_batches)), []
    for _ in range(steps):
        total = torch.zeros(())
        for _ in range(micro_batches):
            loss = cross_entropy(model, next(data)) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(float(total))
        if give_optimizer:
            optimizer.zero_grad()  # what the optimizer saw is known
        if monitor:
            monitor.step(total)
        optimizer.zero_grad()
    if monitor is None:
        return losses, []
    monitor.close()
    return losses, monitor.records


def of_kind(kind: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def rms(x: Tensor) -> float:
    """The mean over tokens of the root of the mean square, by the book."""
    return float(x.double().pow(2).mean(-1).sqrt().mean())


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-5)


# --- the streams


@torch.no_grad()
def streams_by_hand(model: LanguageModel, tokens: Tensor) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return, for every sublayer, (settled streams, output, written streams), and the streams at the end."""
    streams = model.opening(model.embedding(tokens))
    rotary = rotation(torch.arange(tokens.shape[1]), DIM // 2, model.config.rope_theta, torch.float32)
    seen = {}
    for index, block in enumerate(model.blocks):
        attention = lambda h, block=block: block.attention(h, rotary, None, None)  # noqa: E731
        for slot, connection, sublayer in (
            ("attention", block.attention_connection, attention),
            ("mlp", block.mlp_connection, block.mlp),
        ):
            h, settled = connection.read(streams)
            output, _ = split_losses(sublayer(h))
            streams = connection.write(settled, output)
            seen[f"blocks.{index}.{slot}"] = (settled, output, streams)
    return seen, streams


@pytest.mark.parametrize("topology", ["pre", "peri", "siamese", "siamese-post-pre", "residual", "deepnorm"])
def test_the_streams_are_those_between_read_and_write(topology: str) -> None:
    model = tiny_model(topology)
    names = model.config.topology.stream_names
    seen, end = streams_by_hand(model, batches(1)[0][:, :-1])
    _, records = train(model, 1)
    (line,) = of_kind("streams", records)
    assert list(line["sublayers"]) == list(seen)
    for sublayer, (settled, output, written) in seen.items():
        found = line["sublayers"][sublayer]
        assert found["output"] == near(rms(output))
        assert list(found["streams"]) == list(names)
        for name, x, after in zip(names, settled, written, strict=True):
            assert found["streams"][name] == {
                "rms": near(rms(x)),
                "max": near(float(x.abs().max())),
                "ratio": near(rms(output) / rms(x)),
                "change": near(rms(after - x) / rms(x)),
            }
    assert line["end"] == {
        name: {"rms": near(rms(x)), "max": near(float(x.abs().max()))} for name, x in zip(names, end, strict=True)
    }


@pytest.mark.parametrize("topology", ["shc-2", "dhc-2", "mhc-4"])
def test_stacked_streams_are_told_apart(topology: str) -> None:
    model = tiny_model(topology)
    seen, (end,) = streams_by_hand(model, batches(1)[0][:, :-1])
    _, records = train(model, 1)
    (line,) = of_kind("streams", records)
    for sublayer, (settled, output, (after,)) in seen.items():
        found = line["sublayers"][sublayer]["streams"]
        assert list(found) == [f"streams[{number}]" for number in range(end.shape[-2])]
        for number, entry in enumerate(found.values()):
            x = settled[0][..., number, :]
            assert entry["rms"] == near(rms(x))
            assert entry["ratio"] == near(rms(output) / rms(x))
            assert entry["change"] == near(rms(after[..., number, :] - x) / rms(x))
    assert [entry["rms"] for entry in line["end"].values()] == [near(rms(x)) for x in end.unbind(-2)]


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
    topology, materials = build_topology("siamese"), Materials(dim=DIM)

    class OwnBlock(nn.Module):
        def __init__(self, places: Any) -> None:
            super().__init__()
            self.connections = nn.ModuleList(topology.connection(place, materials) for place in places)
            self.sublayers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in places)

        def forward(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
                streams = connection(streams, sublayer)
            return streams

    class Own(PlainModel):
        def __init__(self) -> None:
            super().__init__()
            self.opening = topology.opening(materials)
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
    monkeypatch.setattr(Measurements, "add", lambda self, key, value: (counted.append(key), add(self, key, value)))
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


def test_without_updates_no_weights_are_copied() -> None:
    (line,) = of_kind("streams", train(tiny_model(), 1, updates=False)[1])
    assert line["blocks"] == {} and "gradient_norm" not in line and len(line["sublayers"]) == 4


# --- training is untouched


@pytest.mark.parametrize("make", [lambda: tiny_model(dropout=0.2), PlainModel, lambda: tiny_model("dhc-2")])
@pytest.mark.parametrize("give_optimizer", [True, False])
def test_training_is_bit_for_bit_the_same(make: Callable[[], nn.Module], give_optimizer: bool) -> None:
    watched, alone = make(), make()
    losses, records = train(watched, 5, every=2, give_optimizer=give_optimizer)
    assert losses == train(alone, 5, monitored=False)[0]
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))
    assert [record["loss"] for record in of_kind("train", records)] == losses
    assert [record["step"] for record in of_kind("streams", records)] == [1, 2, 4]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class CountingBackend:
    """A compiler that generates no code, and counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.compile: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return self.compile(graph, inputs)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("attached_first", [True, False])
def test_compiled_blocks_are_not_compiled_again(attached_first: bool) -> None:
    expected, _ = train(tiny_model("pre"), 6, monitored=False)
    model, backend = tiny_model("pre"), CountingBackend()
    compile_blocks(model, backend=backend)
    if not attached_first:
        cross_entropy(model, batches(1)[0]).backward()
        model.zero_grad()
        assert backend.graphs == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses, records = train(model, 6, every=3)
    assert losses == expected
    assert [record["step"] for record in of_kind("streams", records)] == [1, 3, 6]
    assert backend.graphs == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_monitors_that_end_in_any_order_leave_the_compiler_as_it_was() -> None:
    def graphs_of_a_call() -> int:
        torch._dynamo.reset()
        backend = CountingBackend()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        return backend.graphs

    first, second = StreamMonitor(PlainModel(), every=1), StreamMonitor(PlainModel(), every=1)
    dropped = StreamMonitor(model := PlainModel(), torch.optim.SGD(model.parameters()), every=1)
    first.close()
    assert graphs_of_a_call() == 0
    second.close()
    assert graphs_of_a_call() == 0
    del dropped
    assert graphs_of_a_call() == 1
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("model", [tiny_model(), PlainModel()], ids=["native", "plain"])
def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    def marks() -> list[Any]:
        return [
            (sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_with_kwargs))
            for m in model.modules()
        ]

    before = marks()
    with pytest.raises(RuntimeError, match="mid-step"), StreamMonitor(model, every=1):
        cross_entropy(model, batches(1)[0])
        raise RuntimeError("mid-step")
    assert marks() == before
    monitor = StreamMonitor(model, every=4)
    assert marks() != before
    cross_entropy(model, batches(1)[0])
    monitor.step()
    assert marks() == before, "between measured steps nothing is on the model"


def test_copies_of_a_watched_model_are_free() -> None:
    model = tiny_model()
    monitor = StreamMonitor(model, every=1)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in copies:
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert cross_entropy(twin, batches(1)[0]).item() == near(math.log(VOCABULARY)), "its own weights"
    loss = cross_entropy(model, batches(1)[0])
    monitor.step(loss)
    monitor.close()
    assert monitor.records[2]["sublayers"] == train(tiny_model(), 1)[1][2]["sublayers"]


def test_it_waits_for_the_device_once_a_measured_step_and_never_else(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    for name in ("tolist", "item", "__float__", "__bool__", "__int__", "cpu", "numpy"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *arguments: Any, name: str = name, original: Any = original, **named: Any) -> Any:
            waits.append(name)
            return original(self, *arguments, **named)

        monkeypatch.setattr(Tensor, name, counted)
    model = tiny_model()
    monitor = StreamMonitor(model, every=5)
    for step, batch in enumerate(batches(10), start=1):
        loss = cross_entropy(model, batch)
        loss.backward()
        before = len(waits)
        monitor.step(loss, gradient_norm=torch.ones(()))
        assert waits[before:] == (["tolist"] if step in (1, 5, 10) else [])


# --- the loss, the verdict and the record


def fed(losses: list[float], **options: Any) -> StreamMonitor:
    """Return a monitor that was told these losses by a loop that trains nothing."""
    monitor = StreamMonitor(PlainModel(), every=10**6, updates=False, **options)
    monitor.model(batches(1)[0])
    for loss in losses:
        monitor.step(loss)
    return monitor


FALLING = [3.0 * 0.97**step + 1 for step in range(60)]
CURVES = {
    "stable": FALLING,
    "spiked": [2 + 0.02 * math.sin(step) + (2 if 40 <= step < 43 else 0) for step in range(60)],
    "diverged": [*FALLING[:40], *([4.0] * 20)],
    "not finite": [*FALLING[:59], math.nan],
}


@pytest.mark.parametrize("name", CURVES)
def test_the_verdict_is_that_of_the_curve(name: str, tmp_path: Path) -> None:
    losses = CURVES[name]
    expected = judge(losses, steps_total=60, warmup_steps=5)
    assert name in (expected.word, expected.reason)
    monitor = fed(losses, steps_total=60, warmup_steps=5, path=tmp_path / "new" / "metrics.jsonl")
    assert monitor.verdict() == expected
    monitor.close()
    assert judge_curve(read_loss_curve(tmp_path / "new")) == expected, "and so says the command line"


def test_the_entropy_of_the_data_is_used_where_it_is_known() -> None:
    flat = [2.0] * 40
    assert fed(flat).verdict().word == "stable"
    assert fed(flat, unigram_entropy=2.05).verdict().reason == "not learned"


def test_a_run_that_is_lost_can_be_ended() -> None:
    losses = [*FALLING[:40], *([9.0] * 60)]
    monitor = StreamMonitor(PlainModel(), every=1, updates=False, steps_total=100)
    for loss in losses:
        monitor.model(batches(1)[0])
        monitor.step(loss)
        if monitor.should_stop:
            break
    monitor.close()
    assert 50 <= monitor.verdict().steps <= 65, "a tenth of the run, once the running median has risen"
    assert monitor.verdict().word == "diverged"
    assert not fed(FALLING, steps_total=60).should_stop
    with pytest.raises(UserError, match="needs the length of the run"):
        _ = fed(FALLING).should_stop


def test_every_loss_is_kept_and_read_as_it_was() -> None:
    losses = [torch.tensor(value, dtype=torch.float64) for value in FALLING]
    monitor = fed([*losses[:30], *FALLING[30:]])
    for loss in losses:
        loss.zero_()  # a loop may use its memory again
    lines = of_kind("train", monitor.records)
    assert [line["loss"] for line in lines] == FALLING
    assert [line["step"] for line in lines] == list(range(1, 61))


def resumable(path: Path, *, steps: range, **options: Any) -> None:
    """Train some steps of a run whose state at any step is known."""
    torch.manual_seed(0)
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches(steps.stop - 1)
    for batch in data[: steps.start - 1]:
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
    with StreamMonitor(model, optimizer, every=3, path=path, **options) as monitor:
        for step, batch in zip(steps, data[steps.start - 1 :], strict=True):
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            monitor.step(loss, step=step)


def test_a_resumed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    whole, parts, cut = (tmp_path / name for name in ("whole", "parts", "cut"))
    resumable(whole, steps=range(1, 11), steps_total=10)
    resumable(parts, steps=range(1, 5), steps_total=10)
    resumable(parts, steps=range(5, 11))
    assert parts.read_bytes() == whole.read_bytes()
    # Killed at step 8, in the middle of a line, with a checkpoint of step 4.
    resumable(cut, steps=range(1, 9), steps_total=10)
    cut.write_bytes(cut.read_bytes()[:-7])
    resumable(cut, steps=range(5, 11))
    assert cut.read_bytes() == whole.read_bytes()
    assert judge_curve(read_loss_curve(cut)).steps_total == 10


def test_the_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    resumable(path, steps=range(1, 5))
    before = path.read_bytes()
    with pytest.raises(UserError, match="holds steps 1 to 4 and this run begins at step 1: give another path"):
        resumable(path, steps=range(1, 3))
    assert path.read_bytes() == before


def test_bad_input_is_refused_with_its_remedy(tmp_path: Path) -> None:
    model = PlainModel()
    encoder_decoder = nn.ModuleDict({"encoder": PlainModel(), "decoder": PlainModel()})
    for words, build in {
        "every is 0": lambda: StreamMonitor(model, every=0),
        "Linear has no list of blocks of one class: say which by blocks=": lambda: StreamMonitor(nn.Linear(2, 2)),
        "several lists of blocks, encoder.layers, decoder.layers": lambda: StreamMonitor(encoder_decoder),
        "no blocks in 'layer' of PlainModel": lambda: StreamMonitor(model, blocks="layer"),
        "a Block among the blocks is not in PlainModel": lambda: StreamMonitor(model, blocks=[Block()]),
        f"{tmp_path}": lambda: StreamMonitor(model, path=tmp_path),
    }.items():
        with pytest.raises(UserError, match=words.replace("(", r"\(")):
            build()
    assert not any(module._forward_hooks for module in model.modules())

    monitor = fed([2.0])
    for words, act in {
        r"loss has the shape \(2,\)": lambda: monitor.step(torch.zeros(2)),
        "step 1 follows step 1": lambda: monitor.step(1.0, step=1),
        "a loss of step 1 already": lambda: monitor.observe_loss(1.0, step=1),
    }.items():
        with pytest.raises(UserError, match=words):
            act()
    monitor.close()
    with pytest.raises(UserError, match="the monitor is closed"):
        monitor.step(1.0)
    with pytest.raises(UserError, match="no losses to judge"):
        StreamMonitor(model, every=10).verdict()


def test_a_model_that_does_not_run_is_told_at_once() -> None:
    monitor = StreamMonitor(copy.deepcopy(PlainModel()))
    cross_entropy(PlainModel(), batches(1)[0]).backward()
    with pytest.raises(UserError, match="no block of PlainModel ran in step 1"):
        monitor.step(1.0)


def test_two_monitors_on_one_topology_are_refused() -> None:
    model = tiny_model()
    with StreamMonitor(model), StreamMonitor(model), pytest.raises(UserError, match="monitored already"):
        cross_entropy(model, batches(1)[0])
    assert cross_entropy(model, batches(1)[0]).item() > 0


def test_blocks_are_found_where_they_are_the_longest_list() -> None:
    class Mixture(Block):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(8))

    model = PlainModel()
    model.layers = nn.Sequential(Mixture(), Mixture())
    model.head = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, VOCABULARY))
    assert list(find_anatomy(model).blocks) == ["layers.0", "layers.1"], "neither experts nor the head"


def test_it_is_public() -> None:
    assert siamesenorm.StreamMonitor is StreamMonitor
    assert "StreamMonitor" in siamesenorm.__all__


# --- the loops of others


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a maker of Hugging Face trainers of a tiny Llama, on whose batches and weights all agree."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    rows = [{"input_ids": batch[0], "labels": batch[0]} for batch in batches(64)]

    def make(path: Path, **arguments: Any) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2,
        )  # fmt: skip
        defaults = {"max_steps": 6, "logging_steps": 1, "save_strategy": "no", "logging_nan_inf_filter": False}
        options = transformers.TrainingArguments(
            str(path), use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, dataloader_pin_memory=False, learning_rate=0.01, **{**defaults, **arguments},
        )  # fmt: skip
        return transformers.Trainer(transformers.LlamaForCausalLM(config), options, train_dataset=rows)

    yield make


third_party = pytest.mark.filterwarnings("ignore")


@third_party
def test_the_trainer_of_hugging_face(trainer: Callable[..., Any], tmp_path: Path) -> None:
    from siamesenorm.interop.callbacks import StreamMonitorCallback

    alone, watched = trainer(tmp_path / "alone"), trainer(tmp_path / "watched")
    monitor = StreamMonitor(watched.model, every=3)
    watched.add_callback(StreamMonitorCallback(monitor))
    alone.train()
    watched.train()
    assert all(torch.equal(a, b) for a, b in zip(alone.model.parameters(), watched.model.parameters(), strict=True))
    history = [entry for entry in alone.state.log_history if "loss" in entry]
    lines = of_kind("train", monitor.records)
    assert [line["loss"] for line in lines] == [entry["loss"] for entry in history]
    assert [line["gradient_norm"] for line in lines] == [entry["grad_norm"] for entry in history]
    measured = of_kind("streams", monitor.records)
    assert [line["step"] for line in measured] == [1, 3, 6]
    assert [line["learning_rate"] for line in measured] == [history[step]["learning_rate"] for step in (0, 2, 5)]
    assert list(measured[0]["sublayers"]) == ["model.layers.0", "model.layers.1"]
    assert all(0 < block["update_ratio"] < 1 for line in measured for block in line["blocks"].values())
    assert monitor.verdict().steps_total == 6


@third_party
def test_the_trainer_resumes_and_checkpoints_activations(trainer: Callable[..., Any], tmp_path: Path) -> None:
    from siamesenorm.interop.callbacks import StreamMonitorCallback

    def run(name: str, **arguments: Any) -> bytes:
        resume = arguments.pop("resume", None)
        loop = trainer(tmp_path / "out", save_strategy="steps", save_steps=3, **arguments)
        loop.add_callback(StreamMonitorCallback(StreamMonitor(loop.model, every=2, path=tmp_path / name)))
        loop.train(resume_from_checkpoint=resume)
        return (tmp_path / name).read_bytes()

    whole = run("whole")
    assert run("whole", resume=str(tmp_path / "out" / "checkpoint-3")) == whole
    assert run("recomputed", gradient_checkpointing=True) == whole


@third_party
def test_the_trainer_hides_broken_losses_unless_told_not_to(trainer: Callable[..., Any], tmp_path: Path) -> None:
    from siamesenorm.interop.callbacks import StreamMonitorCallback

    def run(hidden: bool) -> StreamMonitor:
        loop = trainer(tmp_path, logging_nan_inf_filter=hidden, max_steps=30)
        monitor = StreamMonitor(loop.model, every=1)
        loop.add_callback(StreamMonitorCallback(monitor, stop_when_lost=True))
        with torch.no_grad():
            loop.model.lm_head.weight[0] = math.nan
        loop.train()
        return monitor

    with pytest.warns(UserWarning, match="set logging_nan_inf_filter=False"):
        assert run(hidden=True).verdict().reason != "not finite"
    monitor = run(hidden=False)
    assert monitor.verdict().reason == "not finite"
    assert monitor.verdict().steps == 3, "a tenth of the run"


@third_party
@pytest.mark.parametrize("topology", ["siamese", "residual"])
def test_a_rewired_models_streams_are_those_it_packs(topology: str) -> None:
    transformers = pytest.importorskip("transformers")
    from siamesenorm.interop.rewire import record_streams

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    siamesenorm.rewire(model, topology, preserve=False)
    with record_streams(model) as found, torch.no_grad():
        model(batches(1)[0][:, :-1])
    (line,) = of_kind("streams", train(model, 1)[1])
    slots = [f"model.layers.{block}.{slot}" for block in range(3) for slot in ("attention", "mlp")]
    assert list(line["sublayers"]) == slots and list(line["blocks"]) == [*(s[:-10] for s in slots[::2]), "other"]
    assert {name: entry["rms"] for name, entry in line["end"].items()} == {
        name: near(rms(x)) for name, x in found[-1].items()
    }
    untouched = line["end"].keys() - {"bounded"}  # no norm settles it before the next block
    for block, streams in enumerate(found[:-1], start=1):
        entries = line["sublayers"][f"model.layers.{block}.attention"]["streams"]
        assert all(entries[name]["rms"] == near(rms(streams[name])) for name in untouched)


class LightningTrainer:
    """The order of events in Lightning's own loop, which gives its optimizers a closure."""

    def __init__(self, model: nn.Module, *, accumulate: int = 1, steps: int = 6) -> None:
        self.model, self.accumulate_grad_batches, self.estimated_stepping_batches = model, accumulate, steps
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        self.global_step, self.should_stop = 0, False
        self.module = SimpleNamespace(automatic_optimization=True)

    def fit(self, callback: Any) -> None:
        callback.on_train_start(self, self.module)
        for index, batch in enumerate(batches(self.estimated_stepping_batches * self.accumulate_grad_batches)):
            outputs = self._run(batch, index)
            callback.on_train_batch_end(self, self.module, outputs, batch, index)
            if self.should_stop:
                break
        callback.on_train_end(self, self.module)

    def _run(self, batch: Tensor, index: int) -> dict[str, Tensor]:
        outputs = {}

        def closure() -> Tensor:
            if index % self.accumulate_grad_batches == 0:
                self.optimizers[0].zero_grad()
            loss = cross_entropy(self.model, batch) / self.accumulate_grad_batches
            loss.backward()
            outputs["loss"] = loss.detach()
            return loss

        if (index + 1) % self.accumulate_grad_batches:
            closure()
        else:
            self.optimizers[0].step(closure)
            self.global_step += 1
        return outputs


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_events_of_lightning(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from siamesenorm.interop import callbacks

    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    monkeypatch.setattr(sys.modules["pytorch_lightning"], "Callback", object, raising=False)
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    callbacks.__getattr__.cache_clear()
    model = PlainModel()
    monitor = StreamMonitor(model, every=3)
    LightningTrainer(model, accumulate=accumulate).fit(callbacks.LightningStreamMonitor(monitor))
    callbacks.__getattr__.cache_clear()
    expected = train(PlainModel(), 6, micro_batches=accumulate, every=3, steps_total=6)[1]
    found = monitor.records
    assert [line["loss"] for line in of_kind("train", found)] == [
        near(line["loss"]) for line in of_kind("train", expected)
    ]
    assert of_kind("streams", found) == of_kind("streams", expected)
    assert found[0] == expected[0]


@third_party
def test_lightning_itself(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from siamesenorm.interop.callbacks import LightningStreamMonitor

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = PlainModel()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return cross_entropy(self.net, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    monitor = StreamMonitor(module.net, every=3)
    loop = lightning.Trainer(
        max_steps=6, accumulate_grad_batches=2, callbacks=[LightningStreamMonitor(monitor)], accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loop.fit(module, torch.utils.data.DataLoader(batches(12)))
    expected = train(PlainModel(), 6, micro_batches=2, every=3, steps_total=6)[1]
    assert of_kind("streams", monitor.records) == of_kind("streams", expected)
    assert [line["loss"] for line in of_kind("train", monitor.records)] == [
        near(line["loss"]) for line in of_kind("train", expected)
    ]


def test_other_names_are_not_made() -> None:
    from siamesenorm.interop import callbacks

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = callbacks.Nothing
