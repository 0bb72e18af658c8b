"""A second task, on which nothing of the loop depends: a vision Transformer on scikit-learn's digits."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from siamesenorm.cli import main
from siamesenorm.errors import UserError
from siamesenorm.models.vision import build_vision_transformer
from siamesenorm.tasks import available_tasks, task_from_json
from siamesenorm.tasks.classification import ClassificationTask
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import train
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.presets import presets
from siamesenorm.training.run_directory import RunDirectory
from training_runs import assert_resumes, losses, records, with_model

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=4)
EXECUTION = Execution(threads=1, checkpoint_every=4, compile="off", keep_states=True)


def digits(**changes: Any) -> RunConfig:
    config = dataclasses.replace(presets(Path())["digits"], optimizer=OPTIMIZER, execution=EXECUTION, **changes)
    return with_model(config, depth=2, dim=16, hidden=32).resolved()


def held_out(task: ClassificationTask) -> tuple[torch.Tensor, torch.Tensor]:
    ((batch, _),) = task.loader.held_out([(0, True)], 1000)
    return batch.images, batch.labels


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    assert train(digits(steps=60, validation_every=30), run).label == "stable"
    return run


def test_it_learns_the_digits(learned: Path) -> None:
    curve = losses(learned)
    assert curve[0] == pytest.approx(math.log(10), abs=0.8)
    last = records(learned, "validation")[-1]
    assert last["accuracy"] > 0.7 and last["loss"] < 1.0 and last["items"] == 360
    (model,) = records(learned, "model")
    assert model["floor"] == math.log(10) and model["unit"] == "nats/image" and model["train_items"] == 1437
    assert [metric["name"] for metric in model["metrics"]] == ["loss", "accuracy"]


def test_metrics_are_those_of_the_held_out_images(learned: Path) -> None:
    config = RunDirectory(learned).read_config()
    task = config.task.build(config.seed)
    assert isinstance(task, ClassificationTask)
    model = build_vision_transformer(config.task.model)
    model.load_state_dict(load_file(learned / "checkpoints/step-00000060/model.safetensors"))
    with torch.no_grad():
        images, labels = held_out(task)
        logits = model(images).logits
    last = records(learned, "validation")[-1]
    assert last["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert last["accuracy"] == float((logits.argmax(-1) == labels).double().mean())


def test_held_out_images_are_the_same_for_every_seed_and_never_trained_on() -> None:
    first, second = (digits().task.build(seed) for seed in (0, 1))
    assert isinstance(first, ClassificationTask) and isinstance(second, ClassificationTask)
    assert torch.equal(held_out(first)[0], held_out(second)[0])
    assert (np.sort(first.loader.order.indices(0, 1437)) == np.arange(1437)).all()
    train = first.loader.batch(0, 1437).images
    assert not torch.equal(train[:9], second.loader.batch(0, 9).images)
    seen = {image.numpy().tobytes() for image in train}
    assert len(held_out(first)[0]) == 360
    assert not any(image.numpy().tobytes() in seen for image in held_out(first)[0])
    images = torch.cat((train, held_out(first)[0]))
    assert images.mean() == pytest.approx(0, abs=1e-5) and images.std() == pytest.approx(1, abs=1e-5)


def test_interrupted_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = with_model(digits(steps=10, validation_every=5), dropout=0.1)
    assert_resumes(config, tmp_path, after=7)


def test_its_configuration_survives_json_and_is_identified_by_its_images() -> None:
    config = digits()
    assert config.task.tag in available_tasks()
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert task_from_json(config.task.to_json()) == config.task
    other = dataclasses.replace(config, task=dataclasses.replace(config.task, digest="0" * 64))
    assert other.identity != config.identity
    with pytest.raises(UserError):
        other.task.build(0)


@pytest.mark.parametrize("changes", [{"image_size": 16}, {"classes": 9}, {"channels": 3}])
def test_images_that_do_not_fit_the_model_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UserError):
        with_model(digits(), **changes).task.build(0)


def test_the_command_line_trains_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "2", "--optimizer.warmup-steps", "1", "--model.depth", "1", "--out", str(tmp_path / "run")]
    assert main(["train", "digits", "--model.topology", "siamese", "--batch", "8", *options]) == 0
    assert "accuracy" in capsys.readouterr().err
    assert main(["train", "digits", "--data", "letters", *options]) == 2
    start = ["--start", str(tmp_path / "run"), "--model.dim", "16"]
    assert main(["train", "digits", *start, *options[:2], "--out", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()
