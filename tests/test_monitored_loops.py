"""`StreamMonitor` in the loops and models of others: transformers' Trainer, Lightning, PEFT."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import siamesenorm
from monitored_training import DIM, VOCABULARY, PlainModel, batches, cross_entropy, near, of_kind, rms, train
from siamesenorm import StreamMonitor

third_party = pytest.mark.filterwarnings("ignore")


def tiny_llama(depth: int = 2) -> Any:
    """Return a Llama that gets these batches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=24, num_hidden_layers=depth,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip


# --- the Trainer of transformers


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a maker of Hugging Face trainers of a tiny Llama, on whose batches and weights all agree."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    rows = [{"input_ids": batch[0], "labels": batch[0]} for batch in batches(64)]

    def make(path: Path, **arguments: Any) -> Any:
        defaults = {"max_steps": 6, "logging_steps": 1, "save_strategy": "no", "logging_nan_inf_filter": False}
        options = transformers.TrainingArguments(
            str(path), use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, dataloader_pin_memory=False, learning_rate=0.01, **{**defaults, **arguments},
        )  # fmt: skip
        return transformers.Trainer(tiny_llama(), options, train_dataset=rows)

    yield make


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
        loop.add_callback(
            StreamMonitorCallback(StreamMonitor(loop.model, every=2, path=tmp_path / name, resume=resume is not None))
        )
        loop.train(resume_from_checkpoint=resume)
        return (tmp_path / name).read_bytes()

    whole = run("whole")
    assert run("whole", resume=str(tmp_path / "out" / "checkpoint-3")) == whole
    assert run("recomputed", gradient_checkpointing=True) == whole


@third_party
def test_the_trainer_hides_broken_losses_by_default(trainer: Callable[..., Any], tmp_path: Path) -> None:
    from siamesenorm.interop.callbacks import StreamMonitorCallback

    def run(hidden: bool) -> StreamMonitor:
        loop = trainer(tmp_path, logging_nan_inf_filter=hidden, max_steps=30)
        monitor = StreamMonitor(loop.model, every=1)
        loop.add_callback(StreamMonitorCallback(monitor, stop_when_lost=True))
        with torch.no_grad():
            loop.model.lm_head.weight[0] = math.nan
        loop.train()
        return monitor

    with pytest.warns(UserWarning):
        assert run(hidden=True).verdict().label != "diverged"
    monitor = run(hidden=False)
    assert monitor.verdict().reasons[0] == "not finite"
    assert monitor.verdict().steps == 3, "a tenth of the run"


# --- models that were rewired, and adapted


@third_party
@pytest.mark.parametrize("topology", ["siamese", "residual"])
def test_a_rewired_models_streams_are_those_it_packs(topology: str) -> None:
    model = tiny_llama(depth=3)
    from siamesenorm.interop.rewire import record_streams

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


@third_party
@pytest.mark.parametrize(
    ("rewired", "saved", "outside"),
    [
        (False, None, []),
        (True, None, []),
        (True, ["attention_connection", "mlp_connection", "closing"], ["other"]),
        (True, ["gate", "post_norm", "identity_norm", "input_norm", "output_norm"], ["other"]),
    ],
)
def test_of_an_adapted_model_the_trained_weights_count(
    rewired: bool, saved: list[str] | None, outside: list[str]
) -> None:
    """PEFT keeps a copy of what it trains beside the frozen original: the streams are those of the copy."""
    peft = pytest.importorskip("peft")
    model = tiny_llama(depth=3)
    if rewired:
        siamesenorm.rewire(model, "siamese")
    blocks = [f"model.layers.{block}" for block in range(3)]
    sublayers = [f"{block}.{slot}" for block in blocks for slot in ("attention", "mlp")] if rewired else blocks
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=saved))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    first, *_, line = of_kind("streams", train(model, 3, every=1)[1])
    prefix = "base_model.model."
    assert list(line["sublayers"]) == [prefix + name for name in sublayers]
    assert list(line["blocks"]) == [*(prefix + name for name in blocks), *outside]
    weights = math.hypot(*(block["weight_norm"] for block in first["blocks"].values()))
    assert weights == near(math.sqrt(sum(float(w.double().pow(2).sum()) for w in before)))
    gates = [w for name, w in model.named_parameters() if name.endswith("gate.modules_to_save.default.gain")]
    assert all(gate.any() for gate in gates) and len(gates) == (3 if saved and "gate" in saved else 0)


# --- Lightning


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

    with pytest.raises(AttributeError):
        _ = callbacks.Nothing
