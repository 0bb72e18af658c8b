"""Batches of augmented images, by their position in the order of the training data, prepared ahead by threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from siamesenorm.data.augmentation import Augmentation, Fit, augmented, draw_mix, erased, fitted, partner_of
from siamesenorm.data.images import ImageData
from siamesenorm.data.prepared import SampleOrder
from siamesenorm.data.randomness import generator_at
from siamesenorm.errors import UserError
from siamesenorm.world import to_device

THREADS = min(8, os.cpu_count() or 1)
WHITE = 255
PIECES = 2
"""Pieces of a batch for each thread: images take unequal times."""
Sample = tuple[Tensor, int]
Samples = list[Future[list[Sample]]]
"""The samples of a batch, in pieces that threads prepare."""
Job = TypeVar("Job")
T = TypeVar("T")


class ImageBatch(NamedTuple):
    """Normalised images [n, channels, height, width] in fp32 and their classes [n].

    Of mixed images, `others` [n] are the classes of the images they are mixed with, and `parts` [n] their own weights.
    """

    images: Tensor
    labels: Tensor
    others: Tensor | None = None
    parts: Tensor | None = None

    def to(self, device: torch.device) -> ImageBatch:
        """Return the batch on a device."""
        return ImageBatch(*(None if each is None else to_device(each, device) for each in self))  # type: ignore[arg-type]


class ImageLoader:
    """The images for a model that reads squares of `size` pixels: of training, augmented by a seed, and held out.

    The training image at a position is that of `SampleOrder` at position // repeats; its augmentation is drawn from
    (seed, epoch, image, repeat). Images of another size are refused when they are read, unless `fit` is "resize": then
    the shorter side is resized to size / `crop_fraction`, and the centre is used.
    """

    def __init__(
        self,
        data: ImageData,
        *,
        size: int,
        augmentation: Augmentation,
        fit: Fit = "exact",
        crop_fraction: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.data, self.size, self.fit, self.crop_fraction, self.seed = data, size, fit, crop_fraction, seed
        self.augmentation = augmentation
        if augmentation.magnitude and data.largest != WHITE:
            raise UserError(
                f"magnitude: white is {data.largest} in {data.name}, RandAugment needs {WHITE}: leave it out"
            )
        self.order = SampleOrder(len(data.train), seed)
        self._ahead: tuple[int, int, Samples] | None = None
        self._last = 0

    def batch(self, position: int, count: int) -> ImageBatch:
        """Return the samples at `count` positions, and begin to prepare those that follow.

        Batches are expected to be as far from each other as the last two were.
        """
        ahead, self._ahead = self._ahead, None
        samples = ahead[2] if ahead and ahead[:2] == (position, count) else self._submit(position, count)
        following = position + max(count, position - self._last)
        self._last, self._ahead = position, (following, count, self._submit(following, count))
        positions = range(position, position + count)
        found = dict(zip(self._needed(positions), _results(samples), strict=True))
        batch = _stacked([found[each] for each in positions])
        if not self.augmentation.mixes:
            return batch
        return self._mixed(batch, [found[partner_of(each)] for each in positions], position)

    def held_out(self, starts: Iterable[tuple[int, T]], count: int) -> Iterator[tuple[ImageBatch, T]]:
        """Yield up to `count` held-out images from each start, with what comes with it; the next are read meanwhile."""
        ahead: deque[tuple[Samples, T]] = deque()
        for start, beside in starts:
            indices = range(start, min(start + count, len(self.data.held_out)))
            ahead.append((_in_pieces(self._held_out, indices), beside))
            if len(ahead) > 1:
                yield _gathered(ahead)
        while ahead:
            yield _gathered(ahead)

    def require_size(self) -> None:
        """Raise UserError unless the first images have the model's size, where they must; the others are read later."""
        self._held_out(0)
        if self.augmentation.crop != "resized":
            self._fitted(self.data.train.image(0), "training image 0")

    def _held_out(self, index: int) -> Sample:
        split = self.data.held_out
        image = self._fitted(split.image(index), f"held-out image {index}")
        return self.data.normalised(image), int(split.labels[index])

    def _submit(self, position: int, count: int) -> Samples:
        """Begin to prepare the samples of a batch, and those they are mixed with."""
        positions, repeats = self._needed(range(position, position + count)), self.augmentation.repeats
        first = positions[0] // repeats
        indices = self.order.indices(first, positions[-1] // repeats - first + 1)
        jobs = [(each, int(indices[each // repeats - first])) for each in positions]
        return _in_pieces(lambda job: self._sample(*job), jobs)

    def _needed(self, positions: Sequence[int]) -> Sequence[int]:
        """Return the positions, and those that they are mixed with."""
        return sorted({*positions, *map(partner_of, positions)}) if self.augmentation.mixes else positions

    def _sample(self, position: int, index: int) -> Sample:
        """Return the training image at a position, normalised and not yet mixed, and its class."""
        augmentation, image = self.augmentation, self.data.train.image(index)
        label = int(self.data.train.labels[index])
        if augmentation.crop != "resized":
            image = self._fitted(image, f"training image {index}")
        if augmentation == Augmentation():
            return self.data.normalised(image), label
        repeats = augmentation.repeats
        epoch = position // repeats // self.order.samples
        generator = generator_at(self.seed, "augmentation", epoch, index, position % repeats)
        image = self.data.normalised(augmented(image, self.size, augmentation, generator))
        return erased(image, augmentation.erasing, generator), label

    def _fitted(self, image: Tensor, name: str) -> Tensor:
        if self.fit == "exact" and image.shape[1:] != (self.size, self.size):
            height, width = image.shape[1:]
            raise UserError(
                f"{self.data.name}: {name} is {height} x {width}, the model reads {self.size} x {self.size}: set "
                f"--model.image-size to it, or --fit resize"
            )
        return fitted(image, self.size, self.crop_fraction) if self.fit == "resize" else image

    def _mixed(self, batch: ImageBatch, partners: Sequence[Sample], position: int) -> ImageBatch:
        """Return a batch whose images are mixed with their partners."""
        images, parts = [], []
        for at, (image, (partner, _)) in enumerate(zip(batch.images, partners, strict=True), start=position):
            generator = generator_at(self.seed, "mix", min(at, partner_of(at)))
            mix = draw_mix(self.augmentation, self.size, generator)
            images.append(mix(image, partner))
            parts.append(mix.part)
        others = torch.tensor([label for _, label in partners])
        return ImageBatch(torch.stack(images), batch.labels, others, torch.tensor(parts))


def _in_pieces(function: Callable[[Job], Sample], jobs: Sequence[Job]) -> Samples:
    """Begin to call a function for each job, in threads."""
    length = max(1, -(-len(jobs) // (THREADS * PIECES)))
    pieces = (jobs[start : start + length] for start in range(0, len(jobs), length))
    return [_threads().submit(lambda piece: [function(job) for job in piece], piece) for piece in pieces]


def _results(samples: Samples) -> list[Sample]:
    return [sample for piece in samples for sample in piece.result()]


def _gathered(ahead: deque[tuple[Samples, T]]) -> tuple[ImageBatch, T]:
    samples, beside = ahead.popleft()
    return _stacked(_results(samples)), beside


def _stacked(samples: Sequence[Sample]) -> ImageBatch:
    return ImageBatch(torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples]))


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads of this process: most of decoding and resizing runs beside other Python code."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="images")
