"""Evaluations of models of images: nearest neighbours and a linear probe on features, Frechet distance of samples.

A task whose models give features has `data` and `encode`; one whose models generate images has `sample`.
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
from siamesenorm.data.images import ImageData, ImageSplit, open_images
from siamesenorm.data.latents import scaled_pixels
from siamesenorm.errors import UserError, reason
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
class EncodesImages(Protocol):
    """A task whose models give features of images."""

    data: ImageData

    def encode(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return features [count, dim] of images [count, channels, height, width], of which 255 is white."""


@runtime_checkable
class GeneratesImages(Protocol):
    """A task whose models generate images of classes."""

    def sample(self, model: nn.Module, classes: Sequence[int], guidance: float, seed: int, **options: Any) -> Tensor:
        """Return images of the classes, uint8 [count, channels, height, width]."""


# --- features of labelled images


def labelled_features(task: EncodesImages, model: nn.Module, split: ImageSplit) -> LabelledFeatures:
    """Return the features of all images of a split."""
    white = WHITE / task.data.largest
    parts = [
        task.encode(model, torch.stack([split.image(index) for index in numbers]).to(torch.float32) * white)
        for numbers in batches(len(split))
    ]
    return LabelledFeatures(torch.cat(parts).float().cpu(), split.labels)


def batches(count: int) -> Iterator[range]:
    """Yield the numbers of `count` images, some at once."""
    for start in range(0, count, AT_ONCE):
        yield range(start, min(start + AT_ONCE, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNeighbours:
    """Accuracy of a vote of the nearest training images by the features of a frozen model; see `knn_accuracies`."""

    neighbours: int

    name = "knn"

    def options(self) -> Mapping[str, Any]:
        """Return the number of neighbours."""
        return {"neighbours": self.neighbours}

    def require(self, task: Task) -> None:
        """Raise UserError for a task without features of images, and for a number of neighbours there are not."""
        known = len(encoding(task, "--knn").data.train)
        if not 1 <= self.neighbours <= known:
            raise UserError(f"--knn {self.neighbours}: choose from 1 to {known:,}, the number of training images")

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the accuracies on the held-out images."""
        task = encoding(subject.task, "--knn")
        train, held_out = (
            labelled_features(task, subject.model, each) for each in (task.data.train, task.data.held_out)
        )
        return knn_accuracies(train, held_out, self.neighbours)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProbe:
    """Accuracy of logistic regression on the features of a frozen model; see `probe_accuracies`."""

    strength: float = 1.0

    name = "linear probe"

    def options(self) -> Mapping[str, Any]:
        """Return the weight of the data."""
        return {"strength": self.strength}

    def require(self, task: Task) -> None:
        """Raise UserError for a task without features of images."""
        encoding(task, "--linear-probe")

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the accuracies on the held-out images."""
        task = encoding(subject.task, "--linear-probe")
        train, held_out = (
            labelled_features(task, subject.model, each) for each in (task.data.train, task.data.held_out)
        )
        return probe_accuracies(train, held_out, strength=self.strength)


def encoding(task: Any, option: str) -> EncodesImages:
    """Return the task; raises UserError if its models give no features of images."""
    if not isinstance(task, EncodesImages):
        raise UserError(f"{option}: models of this run give no features of images: evaluate a classifier or an encoder")
    return task


# --- Frechet distance


@dataclass(frozen=True, slots=True)
class RunFeatures:
    """The features of another run's model."""

    run: TrainedRun
    task: EncodesImages
    model: nn.Module

    @classmethod
    def of(cls, path: Path, device: str) -> RunFeatures:
        """Return the features of a run's model; raises UserError where it gives none."""
        run = TrainedRun(path, device=device)
        return cls(run, encoding(run.task, f"--features {path}"), run.build_model())

    @property
    def name(self) -> str:
        """What the features are: those of a run by its identity."""
        return f"{self.run.config.label} of run {self.run.config.identity[:12]}, step {self.run.checkpoint.step}"

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features; raises UserError for images of other channels."""
        channels = self.task.data.channels
        if images.shape[1] != channels:
            raise UserError(f"the images have {images.shape[1]} channels, those of {self.name} {channels}")
        with self.run.computing():
            return self.task.encode(self.model, images)


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

    def options(self) -> Mapping[str, Any]:
        """Return what the distance depends on."""
        drawn = {"guidance": self.guidance, "seed": self.seed, **dict(self.sampling)}
        source = drawn if self.file is None else {"file": str(self.file)}
        return {"features": self.features.name, "samples": self.samples, **source}

    def require(self, task: Task) -> None:
        """Raise UserError for a task that generates no images, and for too few samples."""
        if not isinstance(task, GeneratesImages):
            raise UserError("--frechet: models of this run generate no images: evaluate a run that generates some")
        if self.samples < 2:
            raise UserError(f"--samples {self.samples}: choose at least 2, better some thousands")

    def run(self, subject: Subject) -> Mapping[str, Any]:
        """Return the distance by its name, and the numbers of images."""
        data = open_images(str(cast(Any, subject.config.task).data))
        if self.file is None:
            generated = list(self._draw(subject, len(data.classes)))
        else:
            generated = read_samples(self.file, self.samples)
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
    """Yield training images, uint8 [count, channels, size, size], scaled and cut as those a model is trained on."""
    count = min(REAL, len(data.train))
    order = SampleOrder(len(data.train), 0).indices(0, count).tolist()
    for numbers in batches(count):
        images = [scaled_pixels(data.train.image(order[number]), size, data.largest) for number in numbers]
        yield ((torch.stack(images) + 1) * (WHITE / 2)).round().to(torch.uint8)


def read_samples(file: Path, count: int) -> list[Tensor]:
    """Return the first samples of an .npz, uint8 `arr_0` [count, height, width, channels], in batches.

    Raises UserError for another file, and for too few samples.
    """
    try:
        with np.load(file, allow_pickle=False) as content:
            images = content[NPZ_ARRAY]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: no {NPZ_ARRAY} can be read ({reason(error)}): give samples as .npz") from error
    if images.dtype != np.uint8 or images.ndim != 4:
        shape = f"{images.dtype} {list(images.shape)}"
        raise UserError(f"{file}: {NPZ_ARRAY} is {shape}, not uint8 [count, height, width, channels]: write it so")
    if len(images) < count:
        raise UserError(f"{file} has {len(images):,} samples, not {count:,}: give --samples {len(images)}, or more")
    return [torch.from_numpy(images[numbers.start : numbers.stop]).permute(0, 3, 1, 2) for numbers in batches(count)]


def choose_features(features: str, inception: Path | None, device: str) -> FeatureExtractor:
    """Return the features that are asked for: "pixels", those of a run's model, or Inception's from a file."""
    if inception is not None:
        return InceptionFeatures(inception, torch.device(device))
    return PixelFeatures() if features == "pixels" else RunFeatures.of(Path(features), device)
