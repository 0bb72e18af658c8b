"""Skipped steps, and the post-mortem of a run that diverges."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from siamesenorm.analysis.monitor_instrument import MonitorInstrument
from siamesenorm.analysis.post_mortem import PostMortem
from siamesenorm.cli import main
from siamesenorm.comparison.comparison_report import run_report
from siamesenorm.comparison.report_parts import Statements
from siamesenorm.comparison.results import read_single_run
from siamesenorm.errors import UserError
from siamesenorm.training.loop import Instrument, TrainingLoop, train
from siamesenorm.training.optimizer import OptimizerConfig, SpikeFilter, optimizer_tensors
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import Reason, StabilityMonitor, Verdict, judge
from stability import TOOLS, Settings, measure
from training_runs import records, tiny_run, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data")


class Fault(Instrument):
    """From a step on, multiply the output of a sublayer, or its gradient, or the learning rate of its weights."""

    def __init__(self, layer: str, what: str, factor: float, steps: range) -> None:
        self.layer, self.what, self.factor, self.steps = layer, what, factor, steps

    def on_start(self, loop: TrainingLoop, step: int) -> None:
        self.now = step + 1
        loop.model.get_submodule(self.layer).register_forward_hook(self.change)

    def change(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        if self.now in self.steps and self.what == "gradient" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * self.factor)
        return output * self.factor if self.now in self.steps and self.what == "output" else output

    def before_update(self, loop: TrainingLoop, record: dict[str, Any], norms: list[Tensor]) -> None:
        if self.now in self.steps and self.what == "rate":
            with torch.no_grad():
                for weight in loop.model.get_submodule(self.layer).parameters():
                    weight.sub_(self.factor * record["learning_rate"] * weight.grad.sign())

    def on_step(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        self.now = record["step"] + 1


# --- skipped steps


def test_a_norm_is_a_spike_above_a_multiple_of_the_median() -> None:
    spikes = SpikeFilter(3.0)
    assert not any(spikes.skips(norm) for norm in [1.0] * 15 + [100.0]), "too few are known"
    assert [spikes.skips(norm) for norm in (2.9, 3.1, math.nan, math.inf, 1.0)] == [False, True, True, True, False]
    assert [spikes.skips(4.0) for _ in range(200)].count(True) in range(10, 65), "a lasting change is accepted"
    assert not any(SpikeFilter(0.0).skips(norm) for norm in [1.0] * 20 + [1e9, math.nan])


@pytest.mark.parametrize("value", [1.0, -2.0, 0.5, math.inf, math.nan])
def test_a_bad_multiple_is_refused(value: float) -> None:
    with pytest.raises(UserError, match="skip_above"):
        OptimizerConfig(skip_above=value)


States = dict[tuple[int, str], dict[str, Tensor]]


class Spy(Instrument):
    """Copies weights and moments before and after every update."""

    def __init__(self) -> None:
        self.states: States = {}

    def before_update(self, loop: TrainingLoop, record: dict[str, Any], norms: list[Tensor]) -> None:
        self.copy(loop, record["step"], "before")

    def on_step(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        self.copy(loop, record["step"], "after")

    def copy(self, loop: TrainingLoop, step: int, when: str) -> None:
        tensors = {**dict(loop.model.named_parameters()), **optimizer_tensors(loop.optimizers)}
        self.states[step, when] = {name: x.detach().clone() for name, x in tensors.items()}


def equal(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in state.items())


def train_with_a_spike(data: Path, run: Path) -> tuple[Verdict, States]:
    """Train 20 steps with Muon and AdamW, of which step 18 is skipped."""
    optimizer = {"name": "muon", "skip_above": 3.0}
    config = tiny_run(data, optimizer=optimizer, execution={"keep_checkpoints": 9, "keep_states": True})
    fault, spy = Fault("blocks.1.mlp", "gradient", 1e4, range(18, 19)), Spy()
    verdict = train(config, run, instruments=(fault, spy, MonitorInstrument(6), PostMortem()))
    return verdict, spy.states


@pytest.fixture(scope="module")
def spiked(data: Path) -> tuple[Path, Verdict, States]:
    run = data.with_name("spiked")
    return run, *train_with_a_spike(data, run)


def test_a_skipped_step_changes_neither_weights_nor_moments(spiked: tuple[Path, Verdict, States]) -> None:
    run, verdict, states = spiked
    steps = range(2, 21)
    kept = [t for t in steps if equal(states[t, "before"], states[t, "after"])]
    assert kept == [18] == [record["step"] for record in records(run, "train") if "skipped" in record]
    assert verdict.skipped == (18,) and verdict == judge(records(run)) and verdict.label == "stable"
    measured = records(run, "streams")[-1]
    assert measured["step"] == 18 and {block["update_norm"] for block in measured["blocks"].values()} == {0.0}
    assert measured["gradient_norm"] > 0
    assert not (run / "post-mortem.json").exists(), "the run is not lost"


def test_the_window_of_norms_is_resumed(spiked: tuple[Path, Verdict, States], data: Path, tmp_path: Path) -> None:
    """Interrupted after step 10: without the norms before, too few would be known for the step to be skipped."""
    shutil.copytree(spiked[0], tmp_path / "cut")
    shutil.rmtree(max((tmp_path / "cut" / "checkpoints").iterdir()))
    (tmp_path / "cut" / "verdict.json").unlink()
    _, states = train_with_a_spike(data, tmp_path / "cut")
    assert records(tmp_path / "cut") == records(spiked[0]) and (10, "after") not in states
    assert equal(states[20, "after"], spiked[2][20, "after"])


def test_a_filter_that_skips_nothing_changes_no_bit(data: Path, tmp_path: Path) -> None:
    without, never = tiny_run(data), tiny_run(data, optimizer={"skip_above": 1e9})
    assert without.identity != never.identity and "optimizer.skip_above" not in str(without.to_json())
    for name, config in (("without", without), ("never", never)):
        train(config, tmp_path / name, instruments=(PostMortem(),) if name == "never" else ())
    assert records(tmp_path / "without")[1:] == records(tmp_path / "never")[1:]


def test_a_skipped_loss_that_is_not_finite_is_no_divergence_unless_it_stays() -> None:
    for values, label in (([2.0, math.nan, 2.0], "stable"), ([2.0, 2.0, math.nan], "diverged")):
        monitor = StabilityMonitor(steps_total=3)
        for loss in values:
            monitor.observe(loss, loss, skipped=math.isnan(loss))
        assert monitor.verdict().label == label


# --- the post-mortem


def finding(run: Path) -> dict[str, Any]:
    found = RunDirectory(run).read_post_mortem()
    assert found is not None
    return found


@pytest.mark.parametrize(("layer", "what"), [("blocks.1.attention", "output"), ("blocks.0.mlp", "gradient")])
def test_the_layer_that_is_not_finite_is_named(layer: str, what: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_run(data, steps=15), run, instruments=(Fault(layer, what, math.nan, range(12, 13)), PostMortem()))
    found = finding(run)
    assert (found["step"], found["cause"], found["skipped"]) == (12, "not finite", [])
    first = found["suspects"][0]
    assert (first["layer"], first["what"]) == (layer, what) and math.isnan(first["value"])
    assert [record["step"] for record in found["last"]] == list(range(1, 13))
    (note,) = records(run, "note")
    assert "post-mortem.json" in note["text"] and layer in note["text"]
    shown = run_report(read_single_run(run)).sections["What came out"]
    assert isinstance(shown, Statements)
    assert any(each.topic == "First abnormal" and layer in each.text for each in shown.items)


class Examined(PostMortem):
    """Examines a step of a run that is well."""

    def before_update(self, loop: TrainingLoop, record: dict[str, Any], norms: list[Tensor]) -> None:
        super().before_update(loop, record, norms)
        if record["step"] == 12:
            self._examine(loop, Reason.NOT_FINITE)


def test_a_run_is_the_same_with_a_post_mortem_and_the_file_goes_with_its_steps(data: Path, tmp_path: Path) -> None:
    model, execution = {"dropout": 0.2}, {"keep_checkpoints": 9, "keep_states": True}
    config = tiny_run(data, model=model, micro_batch=2, execution=execution)
    train(config, tmp_path / "alone")
    train(config, tmp_path / "examined", instruments=(Examined(), MonitorInstrument(12)))
    examined = RunDirectory(tmp_path / "examined")
    kept = [record for record in records(examined.path) if record["kind"] != "streams"]
    assert kept == records(tmp_path / "alone") and finding(examined.path)["suspects"] == []
    shutil.rmtree(max(examined.checkpoints.iterdir()))
    examined.verdict_file.unlink()
    train(config, examined.path, instruments=(PostMortem(),))
    assert not examined.post_mortem_file.exists(), "trained again from step 10, without a finding"


def test_the_layer_whose_learning_rate_explodes_is_named(data: Path, tmp_path: Path) -> None:
    config = tiny_run(data, steps=40, optimizer={"learning_rate": 3e-3}, execution={"checkpoint_every": 50})
    fault = Fault("blocks.1.attention", "rate", 1e3, range(25, 41))
    verdict = train(config, tmp_path / "run", instruments=(PostMortem(), MonitorInstrument(3), fault))
    assert verdict.label == "diverged"
    found = finding(tmp_path / "run")
    assert found["cause"] == "rose and stayed" and found["rise_step"] == verdict.divergence_step
    (cause, *others) = found["suspects"]
    assert (cause["layer"], cause["what"]) == ("blocks.1.attention", "weight") and cause["growth"] > 5
    assert others[0]["what"] == "stream" and others[0]["layer"] == "blocks.1.mlp", "which reads what it wrote"


def test_the_command_names_the_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "mini", "--data", str(data), "--out", str(tmp_path / "run"), "--optimizer.learning-rate", "1e30"]
    words += ["--model.depth", "1", "--model.dim", "16", "--model.heads", "2", "--model.hidden", "16", "--steps", "9"]
    words += ["--model.context", "16", "--optimizer.warmup-steps", "0", "--optimizer.clip", "0", "--batch", "2"]
    main([*words, "--execution.compile", "off", "--model.kv-heads", "0"])
    assert str(tmp_path / "run" / "post-mortem.json") in capsys.readouterr().err.replace("\n", "")
    assert finding(tmp_path / "run")["suspects"]


# --- what the tools cost


def test_the_tools_cost_little() -> None:
    rows = json.loads((Path(__file__).parents[1] / "benchmarks/stability.json").read_text())["rows"]
    assert [(row["blocks"], row["tool"]) for row in rows] == [(b, t) for b in ("plain", "compiled") for t in TOOLS]
    assert all(row["to_nothing"]["median"] < (1.3 if row["tool"] == "monitored step" else 1.03) for row in rows)


def test_every_tool_is_measured() -> None:
    settings = Settings(depth=1, dim=16, heads=2, hidden=16, vocabulary=32, context=8, rounds=1, candidates=("plain",))
    rows = measure(settings)
    assert [row["tool"] for row in rows] == list(TOOLS) and rows[0]["to_nothing"]["median"] == 1
    monitored = rows[-1]
    assert monitored["percent_every_50"]["median"] == pytest.approx(2 * (monitored["to_nothing"]["median"] - 1))
