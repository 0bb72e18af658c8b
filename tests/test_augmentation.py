"""Augmentation: what each operation does, that it is a function of its arguments, and that resuming changes nothing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.data.augmentation import (
    PAIR_DISTANCE,
    Augmentation,
    Mix,
    augmented,
    draw_mix,
    erased,
    fitted,
    padded_crop,
    partner_of,
    random_resized_crop,
    symmetric_beta,
    to_pil,
)
from siamesenorm.data.image_loader import ImageLoader
from siamesenorm.data.images import ImageData, ImageSplit, open_images
from siamesenorm.data.rand_augment import OPERATIONS, rand_augment
from siamesenorm.data.randomness import generator_at
from siamesenorm.errors import UserError
from siamesenorm.tasks.classification import ClassificationTask
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import train
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.presets import presets
from training_runs import assert_resumes, records, with_model, with_task

ALL = Augmentation(
    crop="pad", padding=2, flip=0.5, magnitude=9, erasing=0.5, mixup=0.8, cutmix=1.0, label_smoothing=0.1, repeats=3
)


def image_data(count: int = 40, size: int = 12, channels: int = 3) -> ImageData:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, channels, size, size), dtype=np.uint8))
    split = ImageSplit(torch.arange(count) % 4, pixels.__getitem__)
    return ImageData(
        name="noise", digest="0", classes=tuple("abcd"), train=split, held_out=split.part(range(10)), channels=channels,
        mean=torch.full((channels, 1, 1), 127.5), std=torch.full((channels, 1, 1), 70.0),
    )  # fmt: skip


def loader(augmentation: Augmentation = ALL, **changes: Any) -> ImageLoader:
    return ImageLoader(image_data(), **{"size": 12, "augmentation": augmentation, **changes})


def draw(*position: int) -> torch.Generator:
    return generator_at(0, "test", *position)


# --- a function of (seed, epoch, image, repeat) and of pairs of positions


@pytest.mark.parametrize("augmentation", [ALL, Augmentation(), Augmentation(crop="resized", mixup=1.0)])
def test_a_sample_depends_on_its_position_alone(augmentation: Augmentation) -> None:
    """Not on the size of the batch, on its start, on what was read before, nor on the process that reads it."""
    whole = loader(augmentation).batch(0, 48)
    other = loader(augmentation)
    for start, count in ((45, 3), (0, 16), (16, 16), (32, 1), (3, 9)):
        part = other.batch(start, count)
        for found, expected in zip(part, whole, strict=True):
            assert (found is None and expected is None) or torch.equal(found, expected[start : start + count])
    assert not torch.equal(loader(augmentation, seed=1).batch(0, 48).images, whole.images)


def test_every_epoch_augments_anew() -> None:
    batches = loader(Augmentation(crop="pad", flip=0.5))
    epochs = []
    for epoch in (0, 1):
        order = batches.order.indices(40 * epoch, 40).argsort()
        epochs.append(batches.batch(40 * epoch, 40).images[torch.from_numpy(order)])
    changed = (epochs[0] != epochs[1]).flatten(1).any(dim=1)
    assert changed.double().mean() > 0.9


def test_repeats_are_the_same_image_augmented_anew() -> None:
    batch = loader(Augmentation(crop="pad", repeats=3)).batch(0, 120)
    assert (batch.labels.view(40, 3) == batch.labels.view(40, 3)[:, :1]).all()
    images = batch.images.view(40, 3, -1)
    assert (images[:, 0] != images[:, 1]).any(dim=1).double().mean() > 0.9
    plain = loader(Augmentation(repeats=3)).batch(0, 120)
    assert torch.equal(plain.images[::3], plain.images[1::3])
    assert torch.equal(plain.images[::3], loader(Augmentation()).batch(0, 40).images)


def test_no_augmentation_is_the_image_itself() -> None:
    data, batch = image_data(), loader(Augmentation()).batch(0, 40)
    for index, image, label in zip(loader().order.indices(0, 40), batch.images, batch.labels, strict=True):
        assert torch.equal(image, data.normalised(data.train.image(int(index)))) and label == data.train.labels[index]


# --- one image


def test_a_padded_crop_is_the_image_shifted_by_at_most_the_padding() -> None:
    image = image_data().train.image(0)
    margin = F.pad(image, (2, 2, 2, 2))
    allowed = {(top, left): margin[:, top : top + 12, left : left + 12] for top in range(5) for left in range(5)}
    seen = set()
    for number in range(300):
        crop = padded_crop(image, 2, draw(number))
        seen |= {place for place, expected in allowed.items() if torch.equal(crop, expected)}
        assert any(torch.equal(crop, expected) for expected in allowed.values())
    assert seen == allowed.keys()


def test_flips_are_half_of_the_images_and_mirror_them() -> None:
    image = image_data().train.image(0)
    found = [augmented(image, 12, Augmentation(flip=0.5), draw(n)) for n in range(400)]
    flipped = [torch.equal(each, image.flip(-1)) for each in found]
    assert all(torch.equal(each, image) or mirrored for each, mirrored in zip(found, flipped, strict=True))
    assert 160 < sum(flipped) < 240


def test_a_resized_crop_shows_a_part_of_the_image() -> None:
    """Of a ramp of columns a crop is a ramp, whose rise is the width of the box."""
    ramp = (torch.arange(200, dtype=torch.uint8)).expand(1, 160, 200).contiguous()
    rises = []
    for number in range(100):
        crop = random_resized_crop(ramp, 32, 0.2, draw(number))[0].float()
        assert crop.shape == (32, 32) and (crop[0] - crop[-1]).abs().max() <= 1
        rises.append(float(crop[0, -1] - crop[0, 0]))
    assert min(rises) > 0.8 * math.sqrt(0.2 * 200 * 160 * 3 / 4) - 10 and max(rises) <= 199 and np.std(rises) > 10


def test_erasing_replaces_a_box_by_noise() -> None:
    image = torch.full((3, 24, 24), 9.0)
    areas = []
    for number in range(200):
        found = erased(image, 1.0, draw(number))
        box = (found != 9.0).all(dim=0)
        rows, columns = box.any(dim=1), box.any(dim=0)
        assert box.sum() == rows.sum() * columns.sum(), "one box"
        areas.append(float(box.double().mean()))
    assert 0.01 < min(areas) < 0.06 and 0.25 < max(areas) < 0.36
    assert found[:, box].std() == pytest.approx(1, abs=0.3)
    assert sum(torch.equal(erased(image, 0.25, draw(n)), image) for n in range(200)) == pytest.approx(150, abs=25)
    assert torch.equal(image, torch.full((3, 24, 24), 9.0)), "the image itself is unchanged"


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_operations_keep_the_size_and_grow_with_the_level(number: int, mode: str) -> None:
    waves = torch.sin(torch.arange(24) / 3)[:, None] * torch.cos(torch.arange(24) / 4)
    smooth = (127 + 80 * waves).to(torch.uint8)
    image = to_pil(torch.stack((smooth, 255 - smooth, smooth.T))[: len(mode) if mode == "RGB" else 1])
    before, changes = np.asarray(image).astype(float), []
    for level in (0.0, 0.3, 1.0):
        after = OPERATIONS[number](image, level)
        assert after.size == image.size and after.mode == image.mode
        changes.append(float(np.abs(np.asarray(after) - before).mean()))
    if number >= 3:
        assert changes[0] <= changes[1] <= changes[2] and changes[0] < 0.7
    assert changes[2] > 0 or (mode == "L" and number == 7), "colour alone has no effect on grey"


def test_rand_augment_applies_half_of_its_operations() -> None:
    image = to_pil(image_data().train.image(0))
    same = [np.array_equal(rand_augment(image, 9, 2, draw(n)), image) for n in range(300)]
    assert 0.2 < np.mean(same) < 0.4


def test_fitted_resizes_the_shorter_side_and_takes_the_centre() -> None:
    ramp = torch.arange(120, dtype=torch.uint8).expand(1, 60, 120).contiguous()
    found = fitted(ramp, 30)
    assert found.shape == (1, 30, 30) and float(found.float().mean()) == pytest.approx(59.5, abs=1)
    assert int(found.max()) - int(found.min()) == pytest.approx(58, abs=3)
    closer = fitted(ramp, 30, crop_fraction=0.5)
    assert int(closer.max()) - int(closer.min()) == pytest.approx(29, abs=2)
    assert fitted(ramp[:, :, :60], 60) is not None and torch.equal(fitted(ramp[:, :, :60], 60), ramp[:, :, :60])


# --- two images


def test_partners_are_pairs_within_groups_and_never_repeats_of_one_image() -> None:
    for position in range(64):
        other = partner_of(position)
        assert partner_of(other) == position and other // 8 == position // 8
        assert abs(other - position) == PAIR_DISTANCE >= 4


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.8, 1.0, 3.0])
def test_the_parts_are_of_a_beta_distribution(alpha: float) -> None:
    generator = draw()
    found = torch.tensor([symmetric_beta(alpha, generator) for _ in range(3000)])
    assert found.min() >= 0 and found.max() <= 1
    assert float(found.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(found.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)


def test_mixed_images_and_targets_have_the_same_parts() -> None:
    ones, zeros = torch.ones(1, 32, 32), torch.zeros(1, 32, 32)
    boxes = 0
    for number in range(200):
        mix = draw_mix(Augmentation(mixup=0.8, cutmix=1.0), 32, draw(number))
        assert float(mix(ones, zeros).mean()) == pytest.approx(mix.part, abs=1e-5)
        boxes += mix.box is not None
    assert 70 < boxes < 130
    assert torch.equal(Mix(0.75)(ones, zeros), torch.full((1, 32, 32), 0.75))


def test_a_mixed_batch_is_made_of_its_pairs() -> None:
    batch, plain = loader(Augmentation(mixup=1.0)).batch(0, 16), loader(Augmentation()).batch(0, 16)
    assert batch.others is not None and batch.parts is not None
    for position in range(16):
        other, part = partner_of(position), float(batch.parts[position])
        expected = part * plain.images[position] + (1 - part) * plain.images[other]
        assert torch.allclose(batch.images[position], expected, atol=1e-6)
        assert batch.parts[position] == batch.parts[other], "both of a pair have the same part"
        assert batch.others[position] == plain.labels[other] and batch.labels[position] == plain.labels[position]


# --- the task


def digits(**augmentation: Any) -> RunConfig:
    execution = Execution(threads=1, checkpoint_every=3, compile="off", keep_states=True)
    config = dataclasses.replace(
        presets(Path())["digits"], steps=8, batch=16, validation_every=8, stop_early=False,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2), execution=execution,
    )  # fmt: skip
    config = with_task(config, augmentation=Augmentation(**augmentation))
    return with_model(config, depth=1, dim=16, hidden=32, heads=2).resolved()


@torch.no_grad()
def test_the_loss_is_that_of_soft_targets() -> None:
    config = digits(mixup=0.8, label_smoothing=0.1)
    task = config.task.build(0)
    assert isinstance(task, ClassificationTask)
    model, batch = task.build_model(torch.device("cpu")), task.loader.batch(32, 16)
    assert batch.others is not None and batch.parts is not None
    hard = batch.parts[:, None] * F.one_hot(batch.labels, 10) + (1 - batch.parts[:, None]) * F.one_hot(batch.others, 10)
    log_probabilities = model(batch.images).logits.log_softmax(dim=-1)
    expected = -((0.9 * hard + 0.01) * log_probabilities).sum()
    assert float(task.loss(model, 32, 16).total) == pytest.approx(float(expected), rel=1e-5)


def test_interrupted_with_all_of_it_a_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = digits(**{**dataclasses.asdict(ALL), "padding": 1, "magnitude": 0})
    assert_resumes(config, tmp_path, after=5)
    accumulated = dataclasses.replace(config, micro_batch=4)
    train(accumulated, tmp_path / "accumulated")
    losses = [[r["loss"] for r in records(tmp_path / name, "train")] for name in ("whole", "accumulated")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_its_configuration_counts_and_survives_json() -> None:
    config, plain = digits(flip=0.5, mixup=0.8), digits()
    assert RunConfig.from_json(config.to_json()) == config
    assert config.identity != plain.identity
    record = plain.to_json()
    del record["task"]["augmentation"], record["task"]["fit"], record["task"]["crop_fraction"]
    assert RunConfig.from_json(record) == plain, "a configuration from before augmentation"


class Fixed(torch.nn.Module):
    """Logits by class number, and a parameter."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.arange(classes, 0, -1).float())

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.logits.expand(len(images), -1), {}


@torch.no_grad()
def test_the_five_most_likely_classes_count_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataclasses.replace(image_data(48, 8, 1), classes=tuple(map(str, range(24))))
    labels = torch.arange(48) % 24
    split = ImageSplit(labels, lambda index: torch.zeros(1, 8, 8, dtype=torch.uint8))
    data = dataclasses.replace(data, train=split, held_out=split)
    monkeypatch.setattr("siamesenorm.tasks.image_task.open_images", lambda name: data)
    config = with_model(with_task(digits(), digest=data.digest), classes=24)
    task = config.task.build(0)
    from siamesenorm.world import World

    result = task.evaluate(Fixed(24), 7, World())
    assert [metric.name for metric in task.metrics] == ["loss", "accuracy", "top5_accuracy"]
    assert result["accuracy"] == 2 / 48 and result["top5_accuracy"] == 10 / 48 and result["items"] == 48


def test_images_of_another_size_are_refused_or_resized() -> None:
    with pytest.raises(UserError, match="12 x 12"):
        loader(size=8).batch(0, 4)
    with pytest.raises(UserError, match="12 x 12"):
        loader(size=8).require_size()
    resizing = loader(size=8, fit="resize")
    resizing.require_size()
    assert resizing.batch(0, 4).images.shape == (4, 3, 8, 8)
    ((batch, _),) = resizing.held_out([(0, True)], 10)
    assert batch.images.shape == (10, 3, 8, 8)


def test_rand_augment_of_images_with_few_greys_is_refused() -> None:
    with pytest.raises(UserError, match="magnitude"):
        digits(magnitude=9).task.build(0)


@pytest.mark.parametrize(
    "changes",
    [{"crop": "round"}, {"flip": 1.5}, {"magnitude": 11}, {"repeats": 0}, {"repeats": 5}, {"mixup": -1},
     {"least_area": 0}, {"label_smoothing": 1}, {"operations": 0}, {"padding": -1}, {"erasing": math.nan}],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        Augmentation(**changes)
    assert next(iter(changes)) in str(raised.value)


def test_a_batch_that_nobody_reads_raises_nothing() -> None:
    """The next batch is prepared ahead: an image that cannot be read fails the batch it is in, not the one before."""

    def read(index: int) -> Tensor:
        if index == bad:
            raise UserError("image 7: not readable")
        return torch.zeros(1, 8, 8, dtype=torch.uint8)

    data = open_images("digits")
    split = ImageSplit(torch.zeros(40, dtype=torch.int64), read, keeps=False)
    batches = ImageLoader(dataclasses.replace(data, train=split), size=8, augmentation=Augmentation())
    bad = int(batches.order.indices(9, 1)[0])
    assert batches.batch(0, 8).images.shape == (8, 1, 8, 8)
    with pytest.raises(UserError):
        batches.batch(8, 8)
