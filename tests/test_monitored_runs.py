"""A run under `StreamMonitor`: training untouched, its losses and verdict, the record, and refusals."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monitored_training import (
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
from siamesenorm import StreamMonitor
from siamesenorm.errors import UserError
from siamesenorm.training.execution import compile_blocks
from siamesenorm.training.loss_curve import LossCurve, read_loss_curve
from siamesenorm.training.verdict import Reason, Unchecked, judge

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


@pytest.mark.every_nth(2)
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


@pytest.mark.every_nth(2)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("topology", ["siamese", "dhc-2"])
def test_compiled_blocks_are_measured_at_their_edges(topology: str) -> None:
    model, batch = tiny_model(topology), batches(1)[0]
    edges = {}
    handles = [
        block.register_forward_hook(lambda _, given, result, i=i: edges.update({f"blocks.{i}": (given[0], result[0])}))
        for i, block in enumerate(model.blocks)
    ]
    with torch.no_grad():
        cross_entropy(model, batch)
    for handle in handles:
        handle.remove()
    compile_blocks(model, backend="aot_eager")
    (line,) = of_kind("streams", train(model, 1)[1])
    assert list(line["sublayers"]) == list(edges)
    for name, (before, after) in edges.items():
        found = line["sublayers"][name]["streams"].values()
        stacked = [
            [x for each in streams for x in (each.unbind(-2) if each.dim() == 4 else [each])]
            for streams in (before, after)
        ]
        for entry, x, y in zip(found, *stacked, strict=True):
            expected = {"rms": rms(x), "max": float(x.abs().max()), "change": rms(y - x) / rms(x)}
            assert entry == {quantity: near(value) for quantity, value in expected.items()}
    assert all(block["update_norm"] > 0 for block in line["blocks"].values()) and line["end"]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("seen", ["model", "compiled"])
def test_a_model_compiled_whole_is_measured_and_compiled_once(seen: str) -> None:
    model, backend = PlainModel(), CountingBackend()
    expected = train(copy.deepcopy(model), 6, every=3)[1]
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StreamMonitor({"model": model, "compiled": compiled}[seen], optimizer, every=3) as monitor:
        for batch in batches(6):
            loss = cross_entropy(compiled, batch)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            optimizer.zero_grad()
    assert monitor.records[1:] == expected[1:] and backend.graphs == 1


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
    """Return a monitor that observed these losses in a loop that trains nothing."""
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
    expected = judge(LossCurve.of(losses, steps_total=60, warmup_steps=5))
    assert name in (expected.label, *expected.reasons)
    monitor = fed(losses, steps_total=60, warmup_steps=5, path=tmp_path / "new" / "metrics.jsonl")
    assert monitor.verdict() == expected
    monitor.close()
    assert judge(read_loss_curve(tmp_path / "new")) == expected, "and so says the command line"


def test_the_floor_and_the_scale_are_used_where_they_are_known() -> None:
    flat = [2.0] * 40
    assert fed(flat).verdict().label == "stable"
    assert Unchecked.NO_FLOOR in fed(flat).verdict().unchecked
    assert fed(flat, floor=2.05).verdict().reasons == (Reason.NOT_LEARNED,)
    assert fed(flat, floor=2.05, scale=0.1).verdict().label == "stable"


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
    assert monitor.verdict().label == "diverged"
    assert not fed(FALLING, steps_total=60).should_stop
    with pytest.raises(UserError):
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
    resumable(parts, steps=range(5, 11), resume=True)
    assert parts.read_bytes() == whole.read_bytes()
    # Killed at step 8, in the middle of a line, with a checkpoint of step 4.
    resumable(cut, steps=range(1, 9), steps_total=10)
    cut.write_bytes(cut.read_bytes()[:-7])
    resumable(cut, steps=range(5, 11), resume=True)
    assert cut.read_bytes() == whole.read_bytes()
    assert judge(read_loss_curve(cut)).steps_total == 10


def test_the_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    resumable(path, steps=range(1, 5))
    before = path.read_bytes()
    with pytest.raises(UserError):
        resumable(path, steps=range(1, 3), resume=True)
    assert path.read_bytes() == before


def test_a_second_run_starts_a_new_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    resumable(path, steps=range(1, 5))
    before = path.read_bytes()
    resumable(path, steps=range(1, 5))
    assert path.read_bytes() == (tmp_path / "metrics.jsonl.old").read_bytes() == before


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    model = PlainModel()
    encoder_decoder = nn.ModuleDict({"encoder": PlainModel(), "decoder": PlainModel()})
    untyped: Any = StreamMonitor
    for build in (
        lambda: untyped(3),
        lambda: untyped("gpt2"),
        lambda: untyped(model, 3),
        lambda: StreamMonitor(model, every=0),
        lambda: untyped(model, every=2.5),
        lambda: StreamMonitor(nn.Linear(2, 2)),
        lambda: StreamMonitor(encoder_decoder),
        lambda: StreamMonitor(model, blocks="layer"),
        lambda: StreamMonitor(model, blocks=[Block()]),
        lambda: StreamMonitor(model, path=tmp_path),
    ):
        with pytest.raises(UserError) as caught:
            build()
        assert "\n" not in str(caught.value)
    assert not any(module._forward_hooks for module in model.modules())

    monitor = fed([2.0])
    for act in (
        lambda: monitor.step(torch.zeros(2)),
        lambda: monitor.step(1.0, step=1),
        lambda: monitor.observe_loss(1.0, step=1),
    ):
        with pytest.raises(UserError):
            act()
    monitor.close()
    with pytest.raises(UserError):
        monitor.step(1.0)
    with pytest.raises(UserError):
        StreamMonitor(model, every=10).verdict()


def test_the_summary_has_a_row_for_every_stream() -> None:
    monitor = StreamMonitor(tiny_model(), every=2)
    assert monitor.summary() == "no step was measured"
    for batch in batches(2):
        monitor.step(cross_entropy(monitor.model, batch))
    head, *rows = monitor.summary().splitlines()
    last = of_kind("streams", monitor.records)[-1]["sublayers"]
    assert [row.split()[:2] for row in rows] == [[name, stream] for name in last for stream in last[name]["streams"]]
    assert f"{last['blocks.1.mlp']['streams']['identity']['rms']:.4g}" in rows[-1].split() + rows[-2].split()
    assert "step 1" in head and "step 2" in head


def test_lines_can_be_written_elsewhere() -> None:
    lines: list[dict[str, Any]] = []
    expected = train(tiny_model(), 3, every=2)[1]
    assert train(tiny_model(), 3, every=2, write=lines.append)[1] == []
    assert lines == expected


def test_a_model_that_does_not_run_is_refused_at_its_first_step() -> None:
    monitor = StreamMonitor(copy.deepcopy(PlainModel()))
    cross_entropy(PlainModel(), batches(1)[0]).backward()
    with pytest.raises(UserError):
        monitor.step(1.0)


def test_two_monitors_on_one_topology_are_refused() -> None:
    model = tiny_model()
    with StreamMonitor(model), StreamMonitor(model), pytest.raises(UserError):
        cross_entropy(model, batches(1)[0])
    assert cross_entropy(model, batches(1)[0]).item() > 0
