"""Classifiers that start from another run: fine-tuning with decayed rates, linear probes, heads of other classes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from siamesenorm.cli import main
from siamesenorm.errors import UserError
from siamesenorm.models.encoder_transfer import classifier_weights, layer_decay_factors
from siamesenorm.models.vision import build_vision_transformer
from siamesenorm.topologies import build_topology
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import TrainingLoop, train
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.presets import presets
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.warm_start import continue_run, start_defaults
from siamesenorm.world import World
from training_runs import records, tiny_run, with_model, with_task, write_data

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
EXECUTION = Execution(threads=1, compile="off")
ENCODER = {"depth": 2, "dim": 16, "hidden": 32}


def run_of(preset: str, **changes: Any) -> RunConfig:
    fields = {"optimizer": OPTIMIZER, "execution": EXECUTION, "batch": 16, "steps": 3, **changes}
    return dataclasses.replace(presets(Path())[preset], **fields)


def weights_of(run: Path, step: int = 3) -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/step-{step:08}/model.safetensors")


def is_head(name: str) -> bool:
    return name.startswith("head.")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "mae"
    decoder = {"decoder_depth": 1, "decoder_dim": 16, "decoder_hidden": 32}
    train(with_model(run_of("digits-mae"), **ENCODER, **decoder).resolved(), run)
    return run


def test_fine_tuning_copies_the_encoder_and_draws_a_head(source: Path, tmp_path: Path) -> None:
    config = continue_run(start_defaults(run_of("digits", steps=2, seed=5), source), source)
    assert config.task.model.positions == "learned" and config.task.model.classes == 10
    train(config, tmp_path / "run")
    (model,) = records(tmp_path / "run", "model")
    assert model["start"]["differences"] == ["the head of 10 classes is new"]
    before = weights_of(source)
    task = config.task.build(5)
    started, _ = task.convert_weights(RunDirectory(source).read_config().task, before)
    fresh = build_vision_transformer(config.task.model, seed=5).state_dict()
    assert started.keys() == fresh.keys()
    assert all(torch.equal(each, (fresh if is_head(name) else before)[name]) for name, each in started.items())
    after = weights_of(tmp_path / "run", 2)
    assert not any(torch.equal(after[name], started[name]) for name in ("position.weight", "patch.weight"))


def test_a_linear_probe_trains_the_head_alone(source: Path, tmp_path: Path) -> None:
    config = with_task(run_of("digits"), trainable="head")
    train(continue_run(start_defaults(config, source), source), tmp_path / "run")
    before, after = weights_of(source), weights_of(tmp_path / "run")
    changed = {name for name in after if is_head(name) or not torch.equal(after[name], before[name])}
    assert changed == {"head.weight", "head.bias"}
    assert float(after["head.bias"].abs().max()) > 1e-3
    steps = records(tmp_path / "run", "train")
    assert steps[0]["gradient_norm"] > 0


def test_rates_decay_from_the_head_to_the_patches(tmp_path: Path) -> None:
    """depth 4: the head and the closing are above 4 blocks and the patches."""
    config = with_task(run_of("digits"), layer_decay=0.5).resolved()
    loop = TrainingLoop(config, RunDirectory(tmp_path), World())
    factors = {
        name: group["rate_factor"]
        for group in loop.optimizers[0].param_groups
        for name, each in loop.model.named_parameters()
        if any(each is other for other in group["params"])
    }
    assert factors.keys() == {name for name, _ in loop.model.named_parameters()}
    assert factors["head.weight"] == factors["head.bias"] == 1
    assert {factor for name, factor in factors.items() if name.startswith("closing.")} == {1}
    for block in range(4):
        assert {f for name, f in factors.items() if name.startswith(f"blocks.{block}.")} == {0.5 ** (4 - block)}
    assert {factors[name] for name in ("patch.weight", "position.weight", "token.weight")} == {0.5**5}
    assert set(layer_decay_factors(loop.model, 4, 1.0).values()) == {1.0}


def test_the_head_is_copied_where_the_classes_are_as_many() -> None:
    config = presets(Path())["digits"].task.model
    weights = build_vision_transformer(config, seed=1).state_dict()
    same, differences = classifier_weights(config, weights, config, seed=2)
    assert differences == () and all(torch.equal(same[name], each) for name, each in weights.items())
    other, differences = classifier_weights(config, weights, dataclasses.replace(config, classes=7), seed=2)
    assert differences == ("the head of 7 classes is new",) and other["head.weight"].shape == (7, 48)
    assert all(torch.equal(other[name], each) for name, each in weights.items() if not is_head(name))


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"dim": 32}, "dim"),
        ({"depth": 3}, "depth"),
        ({"topology": build_topology("post")}, "topology"),
        ({"activation": "gelu"}, "activation"),
        ({"patch_size": 4}, "patch_size"),
        ({"pooling": "mean"}, "pooling"),
        ({"distillation": True}, "distillation"),
        ({"attention_norm": "none", "topology": build_topology("pre")}, "attention_norm|topology"),
    ],
)
def test_an_encoder_with_another_form_is_refused(source: Path, changes: dict[str, Any], value: str) -> None:
    config = with_model(start_defaults(run_of("digits"), source), **changes)
    with pytest.raises(UserError, match=value):
        continue_run(config, source)


def test_only_runs_on_images_are_started_from(source: Path, tmp_path: Path) -> None:
    language = tmp_path / "language"
    train(tiny_run(write_data(tmp_path / "data"), steps=2), language)
    for start in (start_defaults, continue_run):
        with pytest.raises(UserError, match="language"):
            start(run_of("digits"), language)
        with pytest.raises(UserError, match="autoencoding"):
            start(run_of("digits-mae"), source) if start is continue_run else start(run_of("mini"), source)


@pytest.mark.parametrize(("option", "value"), [("layer_decay", 0.0), ("layer_decay", 1.5), ("trainable", "tail")])
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(UserError, match=str(value)):
        with_task(run_of("digits"), **{option: value})


def test_the_command_line_fine_tunes(source: Path, tmp_path: Path) -> None:
    options = ["--steps", "2", "--optimizer.warmup-steps", "1", "--batch", "8", "--execution.compile", "off"]
    start = ["train", "digits", "--start", str(source), *options]
    assert main([*start, "--layer-decay", "0.75", "--out", str(tmp_path / "run")]) == 0
    config = RunDirectory(tmp_path / "run").read_config()
    assert (config.task.model.dim, config.task.model.depth, config.task.tag) == (16, 2, "classification")
    assert main([*start, "--model.dim", "32", "--out", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()
