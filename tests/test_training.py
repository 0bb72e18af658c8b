"""Training from configuration to verdict: what a run learns, records, refuses, and what its identity is made of."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from siamesenorm import available_topologies, build_language_model, language_model_config
from siamesenorm.comparison import worker
from siamesenorm.errors import UserError
from siamesenorm.files import StoppedError, decode_json, exclusive
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.tasks.language import LanguageTask
from siamesenorm.tasks.task import Losses
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.console_and_trackers import build_trackers
from siamesenorm.training.execution import Choices, choose, operators_in_use, require_compiler
from siamesenorm.training.loop import Instrument, TrainingLoop, train
from siamesenorm.training.presets import presets
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import Verdict
from siamesenorm.world import World
from training_runs import (
    CONTEXT,
    END_OF_TEXT,
    VOCABULARY,
    edit_json,
    losses,
    records,
    tiny_run,
    with_model,
    with_task,
    write_data,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "counting")


@pytest.fixture(scope="module")
def learned(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path, Verdict]:
    """A run long enough to learn to count."""
    config, run = tiny_run(data, steps=60, validation_every=30), tmp_path_factory.mktemp("runs") / "learned"
    return config, run, train(config, run)


def files(run: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(run)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def assert_refused(message: str, config: RunConfig, run: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(config, run)
    assert "\n" not in str(caught.value)


# --- a whole run -----------------------------------------------------------------------------------------------------


def test_it_learns_the_structure_of_its_data(learned: tuple[RunConfig, Path, Verdict]) -> None:
    _, run, verdict = learned
    curve = losses(run)
    # Next is the number after this one in seven of eight places: with chance it cannot do better than about 0.7 nats.
    assert 2.5 < curve[0] < 4.0
    assert 0.5 < np.mean(curve[-10:]) < 1.6
    assert verdict.label == "stable"
    assert verdict.steps == verdict.steps_total == len(curve) == 60
    assert verdict.floor == pytest.approx(np.log(16), abs=0.1)


def test_the_record_says_what_the_contract_says(learned: tuple[RunConfig, Path, Verdict]) -> None:
    config, run, _ = learned
    first, *_, last = records(run)
    parameters, embedding = count_parameters(build_language_model(config.task.model, device="meta"))
    assert {name: first[name] for name in ("kind", "label", "steps", "warmup_steps", "batch", "unit", "scale")} == {
        "kind": "model", "label": "siamese", "steps": 60, "warmup_steps": 4, "batch": 4,
        "unit": "nats/token", "scale": 1.0,
    }  # fmt: skip
    assert first["parameters"] == parameters
    assert first["non_embedding_parameters"] == parameters - embedding == parameters - VOCABULARY * 16
    assert first["train_items"] == 3984 == (4000 - 1) // CONTEXT * CONTEXT
    assert last == {"kind": "end", "step": 60, "status": "finished"}
    for step, record in enumerate(records(run, "train"), start=1):
        assert (record["step"], record["samples"]) == (step, 4 * step)
        rate = 1e-2 * (step / 4 if step < 4 else 0.1 + 0.9 * (1 + np.cos(np.pi * (step - 4) / 56)) / 2)
        assert record["learning_rate"] == pytest.approx(rate, rel=1e-12)
        assert record["gradient_norm"] > 0
    raw = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(record["time"] >= 0 for record in raw)
    assert all(0 < record["step_seconds"] < record["time"] + 1 for record in raw if record["kind"] == "train")
    assert raw[-1]["peak_memory_bytes"] > 2**20


def test_what_it_leaves_can_be_read_again(learned: tuple[RunConfig, Path, Verdict]) -> None:
    config, run, verdict = learned
    assert RunDirectory(run).read_config().to_json() == config.to_json()
    assert RunDirectory(run).read_verdict() == verdict
    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["cores"] >= 1
    assert environment["device"] == "cpu"
    assert "earlier" not in environment
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000060"]


def test_held_out_loss_is_the_cross_entropy_of_the_split(learned: tuple[RunConfig, Path, Verdict]) -> None:
    config, run, _ = learned
    model = build_language_model(config.task.model).eval()
    model.load_state_dict(load_file(run / "checkpoints" / "step-00000060" / "model.safetensors"))
    ids = np.fromfile(config.task.data / "shards/validation-00000.bin", dtype="<u2").astype(np.int64)
    surprises = []
    for start in range(0, 128, CONTEXT):
        inputs, targets = ids[start : start + CONTEXT], ids[start + 1 : start + CONTEXT + 1]
        with torch.no_grad():
            scores = model(torch.from_numpy(inputs)[None]).logits[0].double().exp()
        surprises += (-(scores / scores.sum(-1, keepdim=True))[range(CONTEXT), targets].log()).tolist()
    loss = float(np.mean(surprises))
    expected = {"loss": pytest.approx(loss, rel=1e-5), "perplexity": pytest.approx(np.exp(loss), rel=1e-5)}
    assert records(run, "validation")[-1] == {"kind": "validation", "step": 60, "items": 128, **expected}


def test_a_finished_run_is_not_trained_again(learned: tuple[RunConfig, Path, Verdict]) -> None:
    config, run, verdict = learned
    before = files(run)
    elsewhere = with_task(config, data=Path("/nowhere"))
    assert train(elsewhere, run) == verdict, "not even its data are needed"
    assert files(run) == before


def test_a_lost_run_is_ended_early(data: Path, tmp_path: Path) -> None:
    config = tiny_run(data, steps=200, model={"topology": "pre"}, optimizer={"learning_rate": 30.0, "clip": 0.0})
    verdict = train(config, tmp_path / "run")
    assert verdict.label == "diverged"
    steps = len(losses(tmp_path / "run"))
    assert steps < 200
    assert records(tmp_path / "run")[-1] == {"kind": "end", "step": steps, "status": "stopped_early"}
    before = files(tmp_path / "run")
    assert train(config, tmp_path / "run").sentence() == verdict.sentence()
    assert files(tmp_path / "run") == before


def test_losses_that_are_not_finite_are_written_as_words(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(loop: TrainingLoop, position: int) -> dict[str, torch.Tensor]:
        return {"loss": torch.tensor(float("nan") if position else 2.5)}

    monkeypatch.setattr(TrainingLoop, "_accumulate", broken)
    verdict = train(tiny_run(data, steps=100), tmp_path / "run")
    assert (verdict.label, verdict.reasons[0], verdict.divergence_step) == ("diverged", "not finite", 2)
    assert verdict.steps == 11, "a tenth of the run is the patience"
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count('"loss": "nan"') == 10
    assert "NaN" not in text + (tmp_path / "run" / "verdict.json").read_text()
    assert decode_json((tmp_path / "run" / "verdict.json").read_text())["label"] == "diverged"


# --- how a step is computed ------------------------------------------------------------------------------------------


def test_accumulated_gradients_are_those_of_the_whole_batch(data: Path, tmp_path: Path) -> None:
    gradients, means = [], []
    for micro_batch in (0, 1):
        config = with_model(tiny_run(data, micro_batch=micro_batch), residual_dtype="inherit", compute_dtype="inherit")
        loop = TrainingLoop(config, RunDirectory(tmp_path), World())
        loop.model.double()
        means.append(float(loop._accumulate(position=8)["loss"]))
        gradients.append({name: parameter.grad for name, parameter in loop.model.named_parameters()})
    assert means[0] == pytest.approx(means[1], rel=1e-6)
    assert max(gradient.abs().max() for gradient in gradients[0].values()) > 1e-3
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-10, atol=1e-12)


def test_auxiliary_losses_are_minimised_with_their_weights_and_recorded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded loss stays the main one: a verdict must not depend on a balance loss."""

    def with_balance(task: LanguageTask, model: torch.nn.Module, position: int, count: int) -> Losses:
        losses = whole_loss(task, model, position, count)
        return dataclasses.replace(losses, auxiliary={"balance": (model.head.weight.square().mean(), 0.25)})

    config = tiny_run(data, micro_batch=2)
    loops = [TrainingLoop(config, RunDirectory(tmp_path), World()) for _ in range(2)]
    plain = loops[0]._accumulate(0)["loss"]
    whole_loss = LanguageTask.loss
    monkeypatch.setattr(LanguageTask, "loss", with_balance)
    auxiliary = loops[1]._accumulate(0)
    total = auxiliary.pop("loss")
    weight = loops[1].model.head.weight
    assert torch.equal(total, plain)
    assert float(auxiliary["balance"]) == pytest.approx(float(weight.detach().square().mean()))
    torch.testing.assert_close(
        weight.grad, loops[0].model.head.weight.grad + 0.25 * 2 * weight.detach() / weight.numel()
    )
    train(dataclasses.replace(config, steps=5), tmp_path / "run")
    assert all(record["balance"] > 0 for record in records(tmp_path / "run", "train"))


def test_recomputed_activations_change_no_bit(data: Path, tmp_path: Path) -> None:
    for name in ("kept", "recomputed"):
        config = tiny_run(data, steps=5, model={"dropout": 0.2}, checkpoint_activations=name == "recomputed")
        train(config, tmp_path / name)
    assert losses(tmp_path / "kept") == losses(tmp_path / "recomputed")
    assert [r["gradient_norm"] for r in records(tmp_path / "kept", "train")] == [
        r["gradient_norm"] for r in records(tmp_path / "recomputed", "train")
    ]


@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16"])
def test_bfloat16_is_for_sublayers_and_not_for_weights(data: Path, tmp_path: Path, residual_dtype: str) -> None:
    config = tiny_run(data, steps=2, precision="bfloat16", model={"residual_dtype": residual_dtype})
    loop = TrainingLoop(config, RunDirectory(tmp_path / "run"), World())
    block, seen = loop.model.get_submodule("blocks.0"), {}
    block.register_forward_hook(lambda module, inputs, output: seen.update(streams=output[0]))
    block.mlp.register_forward_hook(lambda module, inputs, output: seen.update(sublayer=output))
    loop._accumulate(0)
    loop.optimizers[0].step()
    assert {stream.dtype for stream in seen["streams"]} == {getattr(torch, residual_dtype)}
    assert seen["sublayer"].dtype == torch.bfloat16
    kept = [*loop.model.parameters(), *(p.grad for p in loop.model.parameters())]
    kept += [state["exp_avg"] for state in loop.optimizers[0].state.values()]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert train(config, tmp_path / "whole").steps == 2


def test_a_document_mask_hides_other_documents(data: Path, tmp_path: Path) -> None:
    curves = {}
    for masked in (False, True):
        config = tiny_run(data, steps=3, model={"document_mask": masked})
        train(config, tmp_path / str(masked))
        curves[masked] = losses(tmp_path / str(masked))
    assert curves[True] != curves[False]
    loop = TrainingLoop(config, RunDirectory(tmp_path / "unused"), World())
    batch = torch.from_numpy(loop.task.train.batch(0, 16))
    row, place = (batch[:, 2:-2] == END_OF_TEXT).nonzero()[0].tolist()
    place += 2
    changed = batch.clone()
    changed[row, :place] = (batch[row, :place] + 1) % 16
    with torch.no_grad():
        before, after = (loop.task._forward(loop.model, each)[0][row] for each in (batch, changed))
    torch.testing.assert_close(before[place + 1 :], after[place + 1 :], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:place], after[:place])


# --- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["nano", "olmo-1.3b"])
@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_flops_are_those_counted_by_hand(size: str, topology: str) -> None:
    config = language_model_config(size, topology=topology)
    weights = config.depth * (4 * config.dim**2 + 3 * config.dim * config.hidden) + config.dim * config.vocabulary
    attention = config.depth * 2 * (2 * config.context * config.dim)  # queries with keys, weights with values
    tokens = torch.zeros(1, config.context, dtype=torch.int64, device="meta")
    model = build_language_model(config, device="meta")
    assert count_flops(model, tokens) == 3 * (2 * weights + attention) * config.context


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", available_topologies())
def test_flops_of_blocks_counted_once_are_those_of_all_blocks(topology: str) -> None:
    config = language_model_config("nano", topology=topology, depth=4)
    model, tokens = build_language_model(config, device="meta"), torch.zeros(1, 128, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert count_flops(model, tokens) == 3 * counter.get_total_flops()
    assert len(model.blocks) == 4, "the model is as it was"


def test_a_tied_head_counts_once_and_as_an_embedding() -> None:
    untied, embedding = count_parameters(build_language_model("nano", device="meta"))
    tied, tied_embedding = count_parameters(build_language_model("nano", tied=True, device="meta"))
    assert embedding == tied_embedding == 257 * 64
    assert untied - tied == 257 * 64


# --- identity and configuration --------------------------------------------------------------------------------------

SAME = {"execution": {"threads": 1, "checkpoint_every": 7, "keep_checkpoints": 5, "trackers": ("wandb",)}}
OTHER: dict[str, dict[str, Any]] = {
    "topology": {"model": {"topology": "pre"}},
    "option of a topology": {"model": {"topology": "dhc-2:streams=4"}},
    "norm": {"model": {"norm": "layernorm"}},
    "residual dtype": {"model": {"residual_dtype": "bfloat16"}},
    "dropout": {"model": {"dropout": 0.1}},
    "seed": {"seed": 1},
    "steps": {"steps": 21},
    "batch": {"batch": 8},
    "learning rate": {"optimizer": {"learning_rate": 1.0000001e-2}},
    "decay rule": {"optimizer": {"decay": "all-but-embeddings"}},
    "precision": {"precision": "bfloat16"},
    "validation": {"validation_every": 11},
}


def test_where_and_how_often_is_no_part_of_the_identity(data: Path, tmp_path: Path) -> None:
    config = tiny_run(data)
    copy = write_data(tmp_path / "copy")
    same = (tiny_run(data, **SAME), tiny_run(copy), tiny_run(data, model={"attention_norm": "qkv-head"}))
    assert {each.identity for each in same} == {config.identity}
    assert len(config.identity) == 64


def test_what_changes_numbers_changes_the_identity(data: Path, tmp_path: Path) -> None:
    configs = {name: tiny_run(data, **changes) for name, changes in OTHER.items()}
    configs |= {"as it is": tiny_run(data), "data": tiny_run(write_data(tmp_path / "other", seed=9))}
    assert len({config.identity for config in configs.values()}) == len(configs)


@pytest.mark.parametrize("changes", [SAME, *OTHER.values()], ids=["execution", *OTHER])
def test_a_configuration_survives_json(data: Path, changes: dict[str, Any]) -> None:
    config = tiny_run(data, **changes)
    again = RunConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again.to_json() == config.to_json()
    assert again.identity == config.identity
    assert again.execution == config.execution


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch.* 0"),
        ({"micro_batch": 3}, "micro_batch.* 3"),
        ({"seed": 2**63}, "9223372036854775808"),
        ({"steps": 0}, "steps.* 0"),
        ({"seed": -1}, "seed.* -1"),
        ({"precision": "bf16"}, "bf16"),
        ({"optimizer": {"warmup_steps": 20}}, "warmup_steps.* 20"),
        ({"optimizer": {"shape": "cosin"}}, "cosin"),
        ({"execution": {"checkpoint_every": 0}}, "checkpoint_every.* 0"),
        ({"execution": {"trackers": ("mlflow",)}}, "mlflow"),
        ({"execution": {"compile": "yes"}}, "yes"),
        ({"model": {"vocabulary": 10}}, "17.* 10"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(data: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        tiny_run(data, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("record", [{}, {"schema": 99}, {"schema": 2, "task": []}, []])
def test_what_is_no_configuration_is_refused(record: Any) -> None:
    with pytest.raises(UserError):
        RunConfig.from_json(record)


# --- directories -----------------------------------------------------------------------------------------------------


def test_a_directory_belongs_to_one_configuration(learned: tuple[RunConfig, Path, Verdict]) -> None:
    config, run, _ = learned
    before = files(run)
    assert_refused("seed its default, not 1: choose another directory", dataclasses.replace(config, seed=1), run)
    assert files(run) == before


def test_a_directory_of_something_else_is_left_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert_refused("exists and is not the directory of a run", tiny_run(data), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    assert_refused("exists and is not the directory of a run", tiny_run(data), tmp_path / "file")


def test_the_configuration_of_a_finished_run_is_not_rewritten(
    learned: tuple[RunConfig, Path, Verdict], data: Path, tmp_path: Path
) -> None:
    config, run, _ = learned
    before = files(run)
    elsewhere = with_task(config, data=Path("/nowhere"))
    RunDirectory(run).prepare(elsewhere)
    assert files(run) == before
    unfinished = RunDirectory(tmp_path / "run")
    for each in (config, elsewhere):
        unfinished.prepare(each)
        assert unfinished.read_config().task.data == each.task.data, "it goes on with the data where they are now"


class Listener(Instrument):
    """Keeps the notes, and interrupts the run at a step."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.interrupt_at, self.lines = interrupt_at, []

    def on_step(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        if record["step"] == self.interrupt_at:
            raise KeyboardInterrupt

    def on_note(self, loop: TrainingLoop, line: str) -> None:
        self.lines.append(line)


def test_every_environment_of_a_run_is_kept_and_a_change_is_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = tiny_run(data, execution={"checkpoint_every": 2}), tmp_path / "run"
    environments = iter(
        [
            {"device": "cpu", "torch": "2.8", "commit": "aaa", "cores": 2},
            {"device": "cpu", "torch": "2.8", "commit": "aaa", "cores": 2},
            {"device": "cpu", "torch": "2.8", "commit": "aaa", "cores": 4},
            {"device": "cuda", "torch": "2.9", "commit": "aaa", "cores": 4},
        ]
    )
    monkeypatch.setattr("siamesenorm.training.execution.describe_environment", lambda device: next(environments))
    lines_seen = []
    for interrupt_at in (3, 5, 7, None):
        listener = Listener(interrupt_at)
        try:
            train(config, run, instruments=(listener,))
        except KeyboardInterrupt:
            assert interrupt_at is not None
        lines_seen.append(listener.lines)
    line = "resumes with device cuda (was cpu), torch 2.9 (was 2.8): its bits may differ from here on"
    assert lines_seen == [[], [], [], [line]]
    kept = json.loads((run / "environment.json").read_text())
    earlier = kept.pop("earlier")
    chosen = {"kernels": "plain", "compiled": False, "operators": [], "processes": 1}
    assert kept == {"device": "cuda", "torch": "2.9", "commit": "aaa", "cores": 4, **chosen}
    assert [each["cores"] for each in earlier] == [4, 2]
    assert all("earlier" not in each for each in earlier)


def test_a_worker_tells_into_its_log_and_feeds_the_trackers(
    data: Path,
    tmp_path: Path,
    mirrors: tuple[StandIn, StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    board, _ = mirrors
    config, run = tiny_run(data, execution={"checkpoint_every": 2, "trackers": ("tensorboard",)}), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(config, run, instruments=(Listener(7),))
    newest = max((run / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"damaged")
    monkeypatch.setattr(sys, "argv", ["worker", str(run)])
    monkeypatch.setattr(worker, "_follow_parent", lambda: None)
    assert worker.main() == 0
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    assert line.endswith("resumes after step 4")
    logged = [call[-1] for call in board.calls if call[0] == "add_scalar"]
    assert (min(logged), max(logged)) == (5, 20)


def test_compiling_without_a_compiler_is_refused_before_anything_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    config = tiny_run(data, execution={"compile": "on"})
    assert_refused(r"needs a C\+\+ compiler, and c\+\+, g\+\+, .* --execution.compile off", config, tmp_path / "run")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert_refused("no-such-compiler", config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("CXX", f"{sys.executable} -O2")
    require_compiler("cpu")
    monkeypatch.delenv("CXX")
    require_compiler("cuda")


def test_one_process_at_a_time(data: Path, tmp_path: Path) -> None:
    config, run = tiny_run(data, steps=2), tmp_path / "run"
    RunDirectory(run).prepare(config)
    with exclusive(run / "lock"), pytest.raises(StoppedError):
        train(config, run)
    assert not (run / "metrics.jsonl").exists()
    assert train(config, run).steps == 2


def test_data_of_another_digest_are_refused_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    other = write_data(tmp_path / "other", seed=5)
    config = with_task(tiny_run(data), data=other)
    assert_refused("holds other data than the run was configured for", config, tmp_path / "run")
    long = with_model(tiny_run(data), context=1024)
    assert_refused("validation split has 500 tokens.* choose a shorter context", long, tmp_path / "run")
    nowhere = with_task(tiny_run(data), data=tmp_path / "nowhere")
    assert_refused("no prepared data", nowhere, tmp_path / "run")
    elsewhere = dataclasses.replace(tiny_run(data).execution, device="gpu9")
    assert_refused("device 'gpu9'", dataclasses.replace(tiny_run(data), execution=elsewhere), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_verdict_or_configuration_is_reported(data: Path, tmp_path: Path) -> None:
    config, run = tiny_run(data), tmp_path / "run"
    RunDirectory(run).prepare(config)
    (run / "verdict.json").write_text("{")
    assert_refused("verdict.json cannot be read .* remove it", config, run)
    edit_json(run / "config.json", schema=3)
    assert_refused("schema 3, this version reads 2", config, run)


# --- trackers --------------------------------------------------------------------------------------------------------


class StandIn:
    """What TensorBoard's writer and W&B's run are asked to do, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.summary: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self.calls.append((name, *arguments, *options.values()))


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> tuple[StandIn, StandIn]:
    """Stand-ins for TensorBoard and W&B; each notes how it was opened as its first call."""
    board, wandb = StandIn(), StandIn()

    def open_board(directory: str, purge_step: int) -> StandIn:
        board.calls.append(("open", directory, purge_step))
        return board

    def open_wandb(**options: Any) -> StandIn:
        wandb.calls.append(("open", options))
        return wandb

    modules = {"torch.utils.tensorboard": {"SummaryWriter": open_board}, "wandb": {"init": open_wandb}}
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return board, wandb


def test_trackers_mirror_the_record(data: Path, tmp_path: Path, mirrors: tuple[StandIn, StandIn]) -> None:
    board, wandb = mirrors
    execution = {"trackers": ("tensorboard", "wandb"), "checkpoint_every": 2}
    config = tiny_run(data, steps=4, validation_every=4, execution=execution)
    run = tmp_path / "run"

    with pytest.raises(KeyboardInterrupt):
        train(config, run, instruments=(*build_trackers(config, run), Listener(3)))
    interrupted = len(board.calls)
    verdict = train(config, run, instruments=tuple(build_trackers(config, run)))

    by_step = {record["step"]: record for record in records(run, "train")}
    assert [call[:1] + call[2:] for call in board.calls if call[0] == "open"] == [("open", 1), ("open", 3)]
    logged = {
        (name, step): value for _, name, value, step in (c for c in board.calls[interrupted:] if c[0] == "add_scalar")
    }
    assert logged[("train/loss", 3)] == by_step[3]["loss"]
    assert logged[("train/gradient_norm", 4)] == by_step[4]["gradient_norm"]
    assert logged[("validation/loss", 4)] == records(run, "validation")[0]["loss"]
    assert board.calls[-2:] == [("add_text", "verdict", verdict.sentence()), ("close",)]

    opened = [call[1] for call in wandb.calls if call[0] == "open"]
    assert {each["id"] for each in opened} == {config.identity[:12]}
    assert opened[0]["config"] == config.to_json()
    assert ("log", 4) in [(call[0], call[2]) for call in wandb.calls if call[0] == "log"]
    assert wandb.summary == {"verdict": verdict.sentence()}
    assert wandb.calls[-1] == ("finish",)


def test_a_tracker_that_is_not_installed_is_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_run(data, execution={"trackers": ("wandb",)})
    with pytest.raises(UserError, match="wandb"):
        build_trackers(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def chosen(operations: float = 0.0, started_with: dict[str, Any] | None = None, **execution: Any) -> Choices:
    return choose(Execution(**execution), operations, started_with)


def test_long_runs_on_a_cpu_are_compiled_and_short_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("siamesenorm.training.execution.compiler_for_cpu", lambda: "c++")
    assert not chosen(1e12).compiled and chosen(1e16).compiled
    assert chosen(1e12, compile="on").compiled and not chosen(1e16, compile="off").compiled
    assert not chosen(1e16, device="cuda").compiled
    monkeypatch.setattr("siamesenorm.training.execution.compiler_for_cpu", lambda: None)
    assert not chosen(1e16).compiled


def test_kernels_are_chosen_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_triton, kernels in ((True, "auto"), (False, "plain")):
        monkeypatch.setattr("siamesenorm.training.execution.HAS_TRITON", has_triton)
        assert (chosen().kernels, chosen(device="cuda").kernels) == ("plain", kernels)
    assert chosen(kernels="lean").kernels == "lean"


@pytest.mark.parametrize(
    ("kernels", "topology", "device", "operators"),
    [
        ("plain", "siamese", "cuda", []),
        ("auto", "siamese", "cpu", []),
        ("auto", "siamese", "cuda", ["boundary", "norm"]),
        ("auto", "dhc-2", "cuda", ["norm"]),
        ("fused", "siamese", "cpu", ["boundary"]),
    ],
)
def test_the_operators_in_use_are_known(
    kernels: str, topology: str, device: str, operators: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siamesenorm.training.execution.HAS_TRITON", True)
    config = language_model_config("nano", topology=topology, depth=2, dim=16, hidden=16, vocabulary=17)
    model = build_language_model(config, seed=0, kernels=kernels)
    assert operators_in_use(model, torch.device(device)) == operators


def test_a_resumed_run_keeps_its_choices_or_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = {"kernels": "fused", "compiled": True}
    monkeypatch.setattr("siamesenorm.training.execution.compiler_for_cpu", lambda: "c++")
    assert chosen(started_with=earlier) == Choices(kernels="fused", compiled=True)
    assert chosen(1e16, {"kernels": "plain", "compiled": False}) == Choices(kernels="plain", compiled=False)
    assert not chosen(started_with=earlier, compile="off").compiled
    monkeypatch.setattr("siamesenorm.training.execution.compiler_for_cpu", lambda: None)
    with pytest.raises(UserError):
        chosen(started_with=earlier)


def test_a_lost_run_goes_to_its_end_where_it_may_not_stop_early(data: Path, tmp_path: Path) -> None:
    config = tiny_run(data, steps=40, model={"topology": "pre"}, optimizer={"learning_rate": 1e4, "clip": 0.0})
    train(dataclasses.replace(config, stop_early=False), tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 40
    assert records(tmp_path / "run")[-1]["status"] == "finished"
    train(config, tmp_path / "stopped")
    assert len(losses(tmp_path / "stopped")) < 40


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_the_gradient_is_clipped_to_its_largest_norm(data: Path, tmp_path: Path, clip: float) -> None:
    """AdamW hardly shows the scale of a gradient; its mean of gradients does: a tenth of the first one."""
    config = tiny_run(data, steps=1, optimizer={"clip": clip}, execution={"keep_states": True})
    train(config, tmp_path / "run")
    state = load_file(tmp_path / "run" / "checkpoints" / "step-00000001" / "optimizer.safetensors")
    means = [value.flatten() for name, value in state.items() if name.endswith("/exp_avg")]
    (record,) = records(tmp_path / "run", "train")
    assert record["gradient_norm"] > 0.1
    assert float(torch.cat(means).norm()) / 0.1 == pytest.approx(clip or record["gradient_norm"], rel=1e-3)


def test_a_finished_run_keeps_only_its_last_weights(data: Path, tmp_path: Path) -> None:
    config = tiny_run(data, steps=4, execution={"checkpoint_every": 2})
    train(config, tmp_path / "run")
    (left,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert {path.name for path in left.iterdir()} == {"model.safetensors", "state.json", "manifest.json"}
    execution = dataclasses.replace(config.execution, keep_states=True)
    train(dataclasses.replace(config, execution=execution), tmp_path / "kept")
    assert len(list((tmp_path / "kept").rglob("optimizer.safetensors"))) == 2
    (tmp_path / "run" / "verdict.json").unlink()
    assert train(config, tmp_path / "run").steps == 4, "its last weights are enough for its verdict"


def test_a_run_that_ended_early_and_lost_its_verdict_says_that_it_cannot_resume(data: Path, tmp_path: Path) -> None:
    config = tiny_run(data, steps=200, model={"topology": "pre"}, optimizer={"learning_rate": 1e4, "clip": 0.0})
    train(config, tmp_path / "run")
    (tmp_path / "run" / "verdict.json").unlink()
    assert_refused("no optimizer state", config, tmp_path / "run")


def test_the_paper_preset_is_table_4(data: Path) -> None:
    """arXiv 2602.08064, Table 4: 1.3 B, 100 B tokens, batches of 512 x 2048 tokens."""
    config = presets(data)["paper"]
    model, optimizer = config.task.model, config.optimizer
    assert (model.depth, model.dim, model.heads, model.hidden, model.vocabulary) == (16, 2048, 16, 8192, 50304)
    assert (model.context, model.activation, model.tied, model.bias, model.dropout) == (2048, "swiglu", False, False, 0)
    assert (model.initialisation, model.rope_theta, model.document_mask) == ("mitchell", 10_000, False)
    assert model.attention_shape.attention_norm == "qkv-head" and str(model.norm) == "rmsnorm"
    assert model.with_method("pre").attention_shape.attention_norm == "qk"
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.shape) == (1e-3, 2000, "cosine")
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.95, 1e-8)
    assert (optimizer.weight_decay, optimizer.decay, optimizer.clip) == (0.1, "all-but-embeddings", 1.0)
    assert optimizer.final_fraction == 0.1
    assert (config.batch, config.precision) == (512, "bfloat16")
    assert config.steps == 95_367 and config.steps * config.batch * model.context == pytest.approx(1e11, rel=1e-5)
    assert config.execution.device == "cuda"
