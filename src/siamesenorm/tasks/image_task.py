"""What tasks on images have in common: the images of a configuration, how they are fitted and augmented."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from siamesenorm.data.augmentation import Augmentation, Fit
from siamesenorm.data.image_loader import ImageLoader
from siamesenorm.data.images import ImageData, open_images
from siamesenorm.errors import UserError, unknown
from siamesenorm.tasks.task import TaskConfig


@dataclass(frozen=True, kw_only=True)
class ImageTaskConfig(TaskConfig):
    """A model of images, and its images."""

    data: str = field(default="digits", metadata={"hashed": False})
    """Images: digits, or the path of a folder, a zip, idx or parquet files, or a saved dataset."""
    fit: Fit = "exact"
    """Images of another size than the model's: exact refuses them, resize resizes them and uses their centre."""
    crop_fraction: float = 1.0
    """Part of the resized shorter side that the centre has; 0.875 is usual for 224 of 256 pixels."""
    augmentation: Augmentation = Augmentation()
    """Changes of the training images."""

    def __post_init__(self) -> None:
        if self.fit not in get_args(Fit):
            raise unknown("fit", str(self.fit), get_args(Fit))
        if not 0 < self.crop_fraction <= 1:
            raise UserError(f"crop_fraction is {self.crop_fraction}: choose a number above 0, at most 1")

    def resolved(self, precision: Literal["float32", "bfloat16"]) -> Self:
        """Return the configuration with the digest of the images; see `TaskConfig`."""
        digest = self.digest or open_images(self.data).digest
        return dataclasses.replace(self, digest=digest, model=self.model.resolved(precision))

    def open(self, seed: int) -> tuple[ImageData, ImageLoader]:
        """Return the images, and the batches of them in the order and with the augmentation of a seed.

        Raises UserError for other images than configured, and for images that the model does not read.
        """
        data, model = open_images(self.data), self.model
        if data.digest != self.digest:
            raise UserError(
                f"{self.data} holds other images than the run was configured for (digest {data.digest[:12]}, not "
                f"{self.digest[:12]}): use those images, or start a new run"
            )
        if data.channels != model.channels:
            raise UserError(
                f"{self.data} has images of {data.channels} channels, the model reads {model.channels}: set "
                "--model.channels"
            )
        loader = ImageLoader(
            data,
            size=model.image_size,
            augmentation=self.augmentation,
            fit=self.fit,
            crop_fraction=self.crop_fraction,
            seed=seed,
        )
        loader.require_size()
        return data, loader

    def describe_data(self) -> dict[str, str]:
        """Return the name of the images, their number and their classes."""
        data = open_images(self.data)
        name = "scikit-learn's digits" if self.data == "digits" else data.name
        count, (height, width) = len(data.train) + len(data.held_out), data.train.image(0).shape[1:]
        return {
            "name": name,
            "details": f"{count:,} images of {height} x {width} pixels, {len(data.classes)} classes",
        }

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON values, with the tag."""
        return {**super().to_json(), "augmentation": dataclasses.asdict(self.augmentation)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; raises UserError for a field of the model that does not exist."""
        return super().from_json({**record, "augmentation": Augmentation(**record.get("augmentation", {}))})


def part_of(data: ImageData, loader: ImageLoader, samples: int) -> tuple[ImageData, ImageLoader]:
    """Return images and loader with at most `samples` of the held-out images, at equal distances in their order."""
    count, held_out = min(samples, len(data.held_out)), data.held_out
    part = dataclasses.replace(data, held_out=held_out.part([i * len(held_out) // count for i in range(count)]))
    fewer = copy.copy(loader)
    fewer.data = part
    return part, fewer
