"""Evaluations of models of images: nearest neighbours and a linear probe on features, Frechet distance of samples.

A model gives features if it has a method `features` of normalised images, and its task holds labelled images as `data`.
A task whose models generate images has a method `sample`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from siamesenorm.data import SampleOrder
from siamesenorm.data.augmentation import fitted
from siamesenorm.data.images import ImageData, ImageSplit, open_images
from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation import Subject, TrainedRun
from siamesenorm.evaluation.frechet import (
    WHITE,
    FeatureExtractor,
    FeatureStatistics,
    InceptionFeatures,
    PixelFeatures,
    frechet_distance,
    score_name,
)
from siamesenorm.evaluation.representations import LabelledFeatures, knn_accuracies, probe_accuracies
from siamesenorm.tasks.task import Task

AT_ONCE = 128
"""Images that go through a model at once."""
REAL = 50_000
"""At most so many training images are compared with, the first of a fixed order."""
NPZ_ARRAY = "arr_0"
"""Name of the array in a file of samples, as ADM's evaluator reads it."""


@runtime_checkable
class GeneratesImages(Protocol):
    """A task whose models generate images of classes."""

    def sample(self, model: nn.Module, classes: Sequence[int], guidance: float, seed: int, **options: Any) -> Tensor:
        """Return images of the classes, uint8 [count, channels, height, width]."""

    def require_sampling(self, guidance: float, **options: Any) -> None:
        """Raise UserError for what no images can be drawn with."""


# --- features of labelled images


@dataclass(frozen=True, slots=True)
class ImageEncoding:
    """The features of images by a model: what its head reads, or what it would read."""

    data: ImageData
    model: nn.Module
    size: int
    crop_fraction: float

    @classmethod
    def of(cls, task: Any, model: nn.Module | None = None, *, option: str) -> ImageEncoding:
        """Return those of a task's model, by default one without weights; raises UserError where there are none."""
        data, found = getattr(task, "data", None), model or task.build_model(torch.device("meta"))
        if not isinstance(data, ImageData) or not hasattr(found, "features"):
            raise UserError(f"{option}: the model gives no features of images: name a run of a model that does")
        return cls(data, found, task.config.model.image_size, getattr(task.config, "crop_fraction", 1.0))

    def encode(self, images: Tensor) -> Tensor:
        """Return features [count, dim] of images [count, channels, height, width] whose white is 255."""
        if images.shape[1] != self.data.channels:
            raise UserError(f"the images have {images.shape[1]} channels, the model reads {self.data.channels}")
        pixels = torch.stack([fitted(image, self.size) for image in images])
        return self.encode_pixels(pixels.to(torch.float32) * (self.data.largest / WHITE))

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Return features [count, dim] of images of the model's size in the units of its data."""
        device = next(self.model.parameters()).device
        features: Tensor = self.model.features(self.data.normalised(pixels).to(device))  # type: ignore[operator]
        return features.float().cpu()

    def labelled(self, split: ImageSplit) -> LabelledFeatures:
        """Return the features of all images of a split, scaled and cut as in the task's evaluation."""
        parts = []
        for numbers in batches(len(split)):
            images = (fitted(split.image(number), self.size, self.crop_fraction) for number in numbers)
            parts.append(self.encode_pixels(torch.stack(list(images))))
        return LabelledFeatures(torch.cat(parts), split.labels)


def batches(count: int) -> Iterator[range]:
    """Yield the numbers of `count` images, some at once."""
    for start in range(0, count, AT_ONCE):
        yield range(start, min(start + AT_ONCE, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNeighbours:
    """Accuracy of a vote of the nearest training images by the features of a frozen model; see `knn_accuracies`."""

    neighbours: int

    name = "knn"
    uses_model = True

    def options(self) -> Mapping[str, Any]:
        """Return the number of neighbours."""
        return {"neighbours": self.neighbours}

    def require(self, task: Task) -> None:
        """Raise UserError for a task without features of images, and for a number of neighbours there are not."""
        known = len(ImageEncoding.of(task, option="--knn").data.train)
        if not 1 <= self.neighbours <= known:
            raise UserError(f"--knn {self.neighbours}: choose from 1 to {known:,}, the number of training images")

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the accuracies on the held-out images."""
        encoding = ImageEncoding.of(subject.task, subject.model, option="--knn")
        train, held_out = map(encoding.labelled, (encoding.data.train, encoding.data.held_out))
        return knn_accuracies(train, held_out, self.neighbours)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProbe:
    """Accuracy of logistic regression on the features of a frozen model; see `probe_accuracies`."""

    strength: float = 1.0

    name = "linear probe"
    uses_model = True

    def options(self) -> Mapping[str, Any]:
        """Return the weight of the data."""
        return {"strength": self.strength}

    def require(self, task: Task) -> None:
        """Raise UserError for a task without features of images."""
        ImageEncoding.of(task, option="--linear-probe")

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the accuracies on the held-out images."""
        encoding = ImageEncoding.of(subject.task, subject.model, option="--linear-probe")
        train, held_out = map(encoding.labelled, (encoding.data.train, encoding.data.held_out))
        return probe_accuracies(train, held_out, strength=self.strength)


# --- Frechet distance


@dataclass(frozen=True, slots=True)
class RunFeatures:
    """The features of another run's model."""

    run: TrainedRun
    encoding: ImageEncoding

    @classmethod
    def of(cls, path: Path, device: str) -> RunFeatures:
        """Return the features of a run's model; raises UserError where it gives none."""
        run = TrainedRun(path, device=device)
        return cls(run, ImageEncoding.of(run.task, run.build_model(), option=f"--features {path}"))

    @property
    def name(self) -> str:
        """What the features are: those of a run by its identity."""
        return f"{self.run.config.label}, run {self.run.config.identity[:12]}, step {self.run.checkpoint.step}"

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features; raises UserError for images of other channels."""
        with self.run.computing():
            return self.encoding.encode(images)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrechetEvaluation:
    """The Frechet distance of samples, drawn from the run's model or read from a file, to its training images.

    Samples are drawn with the classes in turn.
    """

    features: FeatureExtractor
    samples: int
    file: Path | None = None
    guidance: float = 1.0
    seed: int = 0
    sampling: tuple[tuple[str, Any], ...] = ()
    """Further options of the task's `sample`."""

    name = "frechet"

    @property
    def uses_model(self) -> bool:
        """Whether the samples are drawn from it."""
        return self.file is None

    def options(self) -> Mapping[str, Any]:
        """Return what the distance depends on."""
        drawn = {"guidance": self.guidance, "seed": self.seed, **dict(self.sampling)}
        source = drawn if self.file is None else {"file": str(self.file)}
        return {"features": self.features.name, "samples": self.samples, **source}

    def require(self, task: Task) -> None:
        """Raise UserError for a task that generates no images, and for samples that are too few or not there."""
        if not isinstance(task, GeneratesImages):
            raise UserError("--frechet: models of this run generate no images: evaluate a run that generates some")
        if self.samples < 2:
            raise UserError(f"--samples {self.samples}: choose at least 2, better some thousands")
        if self.file is None:
            task.require_sampling(self.guidance, **dict(self.sampling))
        else:
            read_samples(self.file, self.samples, open_images(str(cast(Any, task).config.data)).channels)

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the distance by its name, and the numbers of images."""
        data = open_images(str(cast(Any, subject.config.task).data))
        if self.file is None:
            generated = list(self._draw(subject, len(data.classes)))
        else:
            generated = read_samples(self.file, self.samples, data.channels)
        real = FeatureStatistics.of(real_images(data, int(generated[0].shape[-1])), self.features)
        drawn = FeatureStatistics.of(generated, self.features)
        return {score_name(self.features): frechet_distance(real, drawn), "real": real.count, "samples": drawn.count}

    def _draw(self, subject: Subject, classes: int) -> Iterator[Tensor]:
        task = cast(GeneratesImages, subject.task)
        for numbers in batches(self.samples):
            labels = [number % classes for number in numbers]
            options = {"first": numbers.start, **dict(self.sampling)}
            yield task.sample(subject.model, labels, self.guidance, self.seed, **options)


def real_images(data: ImageData, size: int) -> Iterator[Tensor]:
    """Yield training images, uint8 [count, channels, size, size], whose white is 255."""
    count = min(REAL, len(data.train))
    order = SampleOrder(len(data.train), 0).indices(0, count).tolist()
    for numbers in batches(count):
        images = torch.stack([fitted(data.train.image(order[number]), size) for number in numbers])
        yield (images.to(torch.float32) * (WHITE / data.largest)).round().to(torch.uint8)


def read_samples(file: Path, count: int, channels: int) -> list[Tensor]:
    """Return the first samples of an .npz, uint8 `arr_0` [count, height, width, channels], in batches.

    Grey images that are written as RGB become grey again. Raises UserError for another file, for images of other
    channels, and for too few samples.
    """
    try:
        with np.load(file, allow_pickle=False) as content:
            images = content[NPZ_ARRAY]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: no array {NPZ_ARRAY} can be read: give samples as .npz") from error
    if images.dtype != np.uint8 or images.ndim != 4:
        shape = f"{images.dtype} {list(images.shape)}"
        raise UserError(f"{file}: {NPZ_ARRAY} is {shape}, not uint8 [count, height, width, channels]: write it so")
    if len(images) < count:
        raise UserError(f"{file} has {len(images):,} samples, not {count:,}: give --samples {len(images)}, or more")
    if channels == 1 and (images == images[..., :1]).all():
        images = images[..., :1]
    if images.shape[-1] != channels:
        raise UserError(f"{file} has images of {images.shape[-1]} channels, the training images {channels}")
    return [torch.from_numpy(images[numbers.start : numbers.stop]).permute(0, 3, 1, 2) for numbers in batches(count)]


def choose_features(features: str, inception: Path | None, device: str) -> FeatureExtractor:
    """Return the chosen features: "pixels", those of a run's model, or Inception's from a file."""
    if inception is not None:
        return InceptionFeatures(inception, torch.device(device))
    return PixelFeatures() if features == "pixels" else RunFeatures.of(Path(features), device)
