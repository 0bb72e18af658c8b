"""Masked autoencoding: its loss, its masks, its floor, and what a run of it shows; classifiers that start from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.models.block import TransformerOutput
from siamesenorm.models.masked_autoencoder import build_masked_autoencoder
from siamesenorm.tasks.autoencoding import AutoencodingTask
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import train
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.presets import presets
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.world import World
from training_runs import assert_resumes, losses, records, with_model, with_task

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=4)
EXECUTION = Execution(threads=1, checkpoint_every=4, compile="off", keep_states=True)
TINY = {"depth": 1, "dim": 16, "hidden": 32, "decoder_depth": 1, "decoder_dim": 16, "decoder_hidden": 32}


def digits(**changes: Any) -> RunConfig:
    config = dataclasses.replace(presets(Path())["digits-mae"], optimizer=OPTIMIZER, execution=EXECUTION, **changes)
    return with_model(config, **TINY).resolved()


def task_of(config: RunConfig | None = None, seed: int = 0) -> AutoencodingTask:
    task = (config or digits()).task.build(seed)
    assert isinstance(task, AutoencodingTask)
    return task


class Constant(nn.Module):
    """Predict one number for every pixel; remember the visible patches."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value), requires_grad=False)
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor, visible: Tensor) -> TransformerOutput:
        self.seen.append(visible)
        return TransformerOutput(self.value.expand(len(images), 16, 4), {})


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "mae"
    assert train(digits(steps=60, validation_every=30), run).label == "stable"
    return run


def test_it_learns_to_reconstruct(learned: Path) -> None:
    (model,) = records(learned, "model")
    last = records(learned, "validation")[-1]
    assert last["loss"] < 0.95 * model["floor"] < losses(learned)[0] and last["items"] == 360
    assert model["item"] == "image" and model["unit"] == "mean squared error" and model["train_items"] == 1437


def test_the_loss_is_the_squared_error_of_the_hidden_patches_alone() -> None:
    """Written out with plain loops over images, patches and pixels."""
    task = task_of()
    model = build_masked_autoencoder(digits().task.model)
    found = task.loss(model, 5, 3)
    indices = task.loader.order.indices(5, 3).tolist()
    expected = 0.0
    for row, index in enumerate(indices):
        image = task.data.normalised(task.data.train.image(index)[None])
        visible = task.visible_patches("mask", 0, range(5 + row, 6 + row))
        predicted = model(image, visible).logits[0].double()
        for patch in set(range(16)) - set(visible[0].tolist()):
            top, left = 2 * (patch // 4), 2 * (patch % 4)
            pixels = image[0, 0, top : top + 2, left : left + 2].flatten().double()
            variance = (pixels - pixels.mean()).square().sum() / 3
            target = (pixels - pixels.mean()) / (variance + 1e-6).sqrt()
            expected += float((predicted[patch].detach() - target).square().mean()) / 12
    assert found.count == 3 and float(found.total.detach()) == pytest.approx(expected, rel=1e-5)


def test_masks_follow_from_seed_and_position_and_hide_every_patch_equally_often() -> None:
    task = task_of()
    first = task.visible_patches("mask", 0, range(400))
    assert first.shape == (400, 4) and all(len(set(row.tolist())) == 4 for row in first)
    assert torch.equal(first[7:9], task.visible_patches("mask", 0, range(7, 9)))
    assert not torch.equal(first, task.visible_patches("mask", 1, range(400)))
    shares = torch.bincount(first.flatten(), minlength=16) / 400
    assert shares.min() > 0.17 and shares.max() < 0.33  # 1/4 each, four standard deviations of 0.022


def test_held_out_masks_are_the_same_for_every_seed_and_batch() -> None:
    first, second = Constant(0.0), Constant(0.0)
    found = task_of(seed=0).evaluate(first, 100, World()), task_of(seed=1).evaluate(second, 64, World())
    assert torch.equal(torch.cat(first.seen), torch.cat(second.seen))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_floor_is_the_loss_of_the_best_constant(normalised: bool) -> None:
    task = task_of(with_task(digits(), normalised_pixels=normalised))
    assert task.floor is not None
    targets = task.targets(task.data.normalised(torch.stack([task.data.held_out.image(i) for i in range(256)])))
    assert task.floor == pytest.approx(float(targets.flatten(0, 1).var(dim=0, correction=0).mean()), rel=1e-5)
    held_out = task.evaluate(Constant(float(targets.mean())), 60, World())["loss"]
    assert held_out == pytest.approx(task.floor, rel=0.1)
    assert task.evaluate(Constant(float(targets.mean()) + 0.5), 60, World())["loss"] > held_out + 0.2


def test_interrupted_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = with_model(digits(steps=10, validation_every=5, ema=0.9), dropout=0.1, drop_path=0.2)
    assert_resumes(config, tmp_path, after=7)


def test_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    for name, micro_batch in (("whole", 0), ("parts", 16)):
        train(digits(steps=5, micro_batch=micro_batch), tmp_path / name)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_its_configuration_survives_json_and_is_identified_by_its_images() -> None:
    config = digits()
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.task.build(0).floor != with_task(config, normalised_pixels=False).task.build(0).floor
    other = with_task(config, digest="0" * 64)
    assert other.identity != config.identity
    with pytest.raises(UserError, match="0000"):
        other.task.build(0)


@pytest.mark.parametrize(
    ("changes", "value"), [({"image_size": 16}, "16"), ({"channels": 3}, "3"), ({"patch_size": 1}, "patch")]
)
def test_what_does_not_fit_is_refused(changes: dict[str, int], value: str) -> None:
    with pytest.raises(UserError, match=value):
        with_model(digits(), **changes).task.build(0)


def test_training_leaves_fixed_positions_alone(learned: Path) -> None:
    model = build_masked_autoencoder(RunDirectory(learned).read_config().task.model)
    trained = load_file(learned / "checkpoints/step-00000060/model.safetensors")
    for name in ("position.weight", "decoder.position.weight"):
        assert torch.equal(trained[name], model.get_parameter(name))
    assert not torch.equal(trained["patch.weight"], model.patch.weight)
