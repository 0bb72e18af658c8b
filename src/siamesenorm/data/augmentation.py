"""Augmentation of images: crop, flip, RandAugment and erasing of one; mixup and CutMix of two.

Every draw is a function of (seed, epoch, image, repeat), or of (seed, pair of positions): batch size, resuming and the
number of processes change no sample. Only torch and PIL are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.data.rand_augment import rand_augment
from siamesenorm.errors import UserError, unknown

Crop = Literal["none", "pad", "resized"]
Fit = Literal["exact", "resize"]
PAIR_DISTANCE = 4
"""Distance of the two positions of a pair: more than repeats of an image, so that none is mixed with itself."""
ASPECTS = (3 / 4, 4 / 3)
"""Aspect ratios of a resized crop."""
ERASED_AREA, ERASED_ASPECTS = (0.02, 1 / 3), (0.3, 1 / 0.3)
"""Part of an image that is erased, and the aspect ratios of the box."""
TRIES = 10
"""How often a box that does not fit is drawn again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """How training images are changed; nothing by default. Raises UserError for numbers out of range."""

    crop: Crop = "none"
    """pad: a random crop of the image with a margin; resized: a random part of it, resized to the model's size."""
    padding: int = 4
    """Margin of black pixels on every side, for the crop pad."""
    least_area: float = 0.08
    """The smallest part of an image that the crop resized keeps."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    magnitude: float = 0.0
    """Mean strength of RandAugment's operations, from 0 (none) to 10; DeiT's is 9."""
    operations: int = 2
    """Operations of RandAugment, each applied to half of the images."""
    erasing: float = 0.0
    """Probability that a box is replaced by noise; DeiT's is 0.25."""
    mixup: float = 0.0
    """Parameter of mixup's Beta distribution; DeiT's is 0.8."""
    cutmix: float = 0.0
    """Parameter of CutMix's Beta distribution; DeiT's is 1. With mixup, each is used for half of the pairs."""
    repeats: int = 1
    """How often an image is in a batch, each time augmented anew; DeiT's is 3."""
    label_smoothing: float = 0.0
    """Part of the target that is spread over all classes."""

    def __post_init__(self) -> None:
        if self.crop not in get_args(Crop):
            raise unknown("crop", str(self.crop), get_args(Crop))
        for name, least, most in (
            ("padding", 0, 2**15),
            ("flip", 0, 1),
            ("magnitude", 0, 10),
            ("operations", 1, 16),
            ("erasing", 0, 1),
            ("mixup", 0, 100),
            ("cutmix", 0, 100),
            ("repeats", 1, PAIR_DISTANCE),
        ):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name} is {getattr(self, name)}: choose from {least} to {most}")
        if not 0 < self.least_area <= 1:
            raise UserError(f"least_area is {self.least_area}: choose a number above 0, at most 1")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing is {self.label_smoothing}: choose a number from 0 to below 1")

    @property
    def mixes(self) -> bool:
        """Whether two images are mixed."""
        return bool(self.mixup or self.cutmix)


def fitted(image: Tensor, size: int, crop_fraction: float = 1.0) -> Tensor:
    """Return uint8 [channels, size, size]: the shorter side resized to size / crop_fraction, then the centre.

    An image of that size is returned as it is. PIL resizes, bicubic.
    """
    height, width = image.shape[1:]
    target = round(size / crop_fraction)
    scale = target / min(height, width)
    if scale != 1:
        image = resized(image, max(target, round(height * scale)), max(target, round(width * scale)))
        height, width = image.shape[1:]
    top, left = (height - size) // 2, (width - size) // 2
    return image[:, top : top + size, left : left + size]


def resized(image: Tensor, height: int, width: int, box: tuple[float, float, float, float] | None = None) -> Tensor:
    """Return an image, or the box (left, top, right, bottom) of it, uint8 [channels, height, width], resized by PIL."""
    return from_pil(to_pil(image).resize((width, height), Image.Resampling.BICUBIC, box=box))


def augmented(
    image: Tensor,
    size: int,
    augmentation: Augmentation,
    generator: torch.Generator,
) -> Tensor:
    """Return a changed image, uint8 [channels, size, size]: crop, flip, RandAugment.

    An image that is not cropped at random has the size already.
    """
    if augmentation.crop == "resized":
        image = random_resized_crop(image, size, augmentation.least_area, generator)
    elif augmentation.crop == "pad":
        image = padded_crop(image, augmentation.padding, generator)
    if augmentation.flip and _uniform(generator) < augmentation.flip:
        image = image.flip(-1)
    if augmentation.magnitude:
        changed = rand_augment(to_pil(image), augmentation.magnitude, augmentation.operations, generator)
        image = from_pil(changed)
    return image


def padded_crop(image: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Return a crop, of the image's size, of the image with a margin of zeros; [channels, height, width]."""
    height, width = image.shape[1:]
    top, left = torch.randint(2 * padding + 1, (2,), generator=generator).tolist()
    return F.pad(image, (padding,) * 4)[:, top : top + height, left : left + width]


def random_resized_crop(image: Tensor, size: int, least_area: float, generator: torch.Generator) -> Tensor:
    """Return a random part of an image, of `least_area` to 1 and an aspect of 3/4 to 4/3, resized to a square.

    Where `TRIES` boxes are too large, the largest one in the centre whose aspect is allowed (arXiv 1409.4842).
    """
    height, width = image.shape[1:]
    for _ in range(TRIES):
        area = height * width * _uniform(generator, least_area, 1.0)
        aspect = math.exp(_uniform(generator, *map(math.log, ASPECTS)))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = _whole(generator, height - box_height), _whole(generator, width - box_width)
            break
    else:
        box_width, box_height = min(width, round(height * ASPECTS[1])), min(height, round(width / ASPECTS[0]))
        top, left = (height - box_height) // 2, (width - box_width) // 2
    return resized(image, size, size, (left, top, left + box_width, top + box_height))


def erased(image: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Return a normalised image [channels, height, width], maybe with a box of noise N(0, 1) (arXiv 1708.04896)."""
    if not probability or _uniform(generator) >= probability:
        return image
    channels, height, width = image.shape
    for _ in range(TRIES):
        area = height * width * _uniform(generator, *ERASED_AREA)
        aspect = math.exp(_uniform(generator, *map(math.log, ERASED_ASPECTS)))
        box_height, box_width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width < width and 0 < box_height < height:
            top, left = _whole(generator, height - box_height), _whole(generator, width - box_width)
            image = image.clone()
            noise = torch.randn(channels, box_height, box_width, generator=generator)
            image[:, top : top + box_height, left : left + box_width] = noise
            break
    return image


# --- two images


class Mix(NamedTuple):
    """How two images are mixed: the part of the first, and the box (top, bottom, left, right) that the second fills.

    Without a box, pixels are weighted (mixup, arXiv 1710.09412); with one they are replaced (CutMix, arXiv 1905.04899).
    """

    part: float
    box: tuple[int, int, int, int] | None = None

    def __call__(self, image: Tensor, partner: Tensor) -> Tensor:
        """Return a mixed image; targets are mixed by `part`."""
        if self.box is None:
            return self.part * image + (1 - self.part) * partner
        top, bottom, left, right = self.box
        mixed = image.clone()
        mixed[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
        return mixed


def partner_of(position: int) -> int:
    """Return the other position of a pair; pairs are within groups of eight positions."""
    return position ^ PAIR_DISTANCE


def draw_mix(augmentation: Augmentation, size: int, generator: torch.Generator) -> Mix:
    """Return how both images of a pair are mixed with the other one."""
    cuts = bool(augmentation.cutmix) and (not augmentation.mixup or _uniform(generator) < 0.5)
    part = symmetric_beta(augmentation.cutmix if cuts else augmentation.mixup, generator)
    if not cuts:
        return Mix(part)
    half = size * math.sqrt(1 - part) / 2
    centre = [_uniform(generator, 0, size) for _ in range(2)]
    top, left = (max(0, round(each - half)) for each in centre)
    bottom, right = (min(size, round(each + half)) for each in centre)
    return Mix(1 - (bottom - top) * (right - left) / size**2, (top, bottom, left, right))


def symmetric_beta(alpha: float, generator: torch.Generator) -> float:
    """Return a draw from Beta(alpha, alpha): by Ulrich's method above alpha = 1/2, else by Joehnk's."""
    if alpha > 0.5:
        u, v = _uniform(generator), _uniform(generator)
        return (1 + math.sqrt(1 - u ** (2 / (2 * alpha - 1))) * math.cos(2 * math.pi * v)) / 2
    while True:
        # In logarithms: u^(1/alpha) has no floating point number for a small alpha.
        u, v = (math.log(1 - _uniform(generator)) / alpha for _ in range(2))
        if math.exp(u) + math.exp(v) <= 1:
            return 1 / (1 + math.exp(min(v - u, 700.0)))


# --- conversions and draws


def to_pil(image: Tensor) -> Image.Image:
    """Return a uint8 image [channels, height, width] as PIL's; of 1 or 3 channels."""
    pixels = image.permute(1, 2, 0).numpy()
    return Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels)


def from_pil(image: Image.Image) -> Tensor:
    """Return PIL's image as uint8 [channels, height, width]."""
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def _uniform(generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def _whole(generator: torch.Generator, largest: int) -> int:
    return int(torch.randint(largest + 1, (), generator=generator).item())
