"""RandAugment (arXiv 1909.13719) as DeiT uses it: 15 operations of PIL, chosen at random, with a random strength."""

from __future__ import annotations

from collections.abc import Callable

import torch
from PIL import Image, ImageEnhance, ImageOps

APPLIED = 0.5
"""Probability of each chosen operation."""
DEVIATION = 0.5
"""Standard deviation of the strength, which is limited to 0 and 10."""
STRONGEST = 10.0
ROTATION, SHEAR, SHIFT, ENHANCEMENT = 30.0, 0.3, 0.45, 0.9
"""At the greatest strength: degrees, tangent, part of the side, and change of the factor of an enhancement."""
BRIGHTENED, BITS = 110, 4
"""At the greatest strength: what is added to dark pixels, and the bits of a channel that are removed."""
GREY = 128
"""Value of pixels that are moved in from outside."""
Operation = Callable[[Image.Image, float], Image.Image]


def rand_augment(image: Image.Image, magnitude: float, operations: int, generator: torch.Generator) -> Image.Image:
    """Return an image after some of `operations` random operations, of mean strength `magnitude` of 10."""
    for _ in range(operations):
        chosen = int(torch.randint(len(OPERATIONS), (), generator=generator).item())
        applied, sign = torch.rand(2, generator=generator).tolist()
        strength = magnitude + DEVIATION * torch.randn((), generator=generator).item()
        level = min(max(strength, 0.0), STRONGEST) / STRONGEST
        if applied < APPLIED:
            image = OPERATIONS[chosen](image, -level if sign < 0.5 else level)
    return image


def _moved(image: Image.Image, *matrix: float) -> Image.Image:
    """Return an image whose pixel at (x, y) is that at matrix (x, y, 1)."""
    fill = GREY if image.mode == "L" else (GREY,) * 3
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)


def _rotated(image: Image.Image, level: float) -> Image.Image:
    fill = GREY if image.mode == "L" else (GREY,) * 3
    return image.rotate(ROTATION * level, Image.Resampling.BILINEAR, fillcolor=fill)


def _posterized(image: Image.Image, level: float) -> Image.Image:
    return ImageOps.posterize(image, 8 - round(BITS * abs(level)))


def _solarized(image: Image.Image, level: float) -> Image.Image:
    return ImageOps.solarize(image, threshold=round(256 * (1 - abs(level))))


def _brightened_dark(image: Image.Image, level: float) -> Image.Image:
    """Add to the pixels below the middle."""
    added = round(BRIGHTENED * abs(level))
    table = [min(255, value + added) if value < GREY else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _enhanced(enhancement: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, level: enhancement(image).enhance(1 + ENHANCEMENT * level)


OPERATIONS: tuple[Operation, ...] = (
    lambda image, level: ImageOps.autocontrast(image),
    lambda image, level: ImageOps.equalize(image),
    lambda image, level: ImageOps.invert(image),
    _rotated,
    _posterized,
    _solarized,
    _brightened_dark,
    _enhanced(ImageEnhance.Color),
    _enhanced(ImageEnhance.Contrast),
    _enhanced(ImageEnhance.Brightness),
    _enhanced(ImageEnhance.Sharpness),
    lambda image, level: _moved(image, 1, SHEAR * level, 0, 0, 1, 0),
    lambda image, level: _moved(image, 1, 0, 0, SHEAR * level, 1, 0),
    lambda image, level: _moved(image, 1, 0, SHIFT * level * image.width, 0, 1, 0),
    lambda image, level: _moved(image, 1, 0, 0, 0, 1, SHIFT * level * image.height),
)
"""Operations with a signed level from -1 to 1; those without a direction use its size, three of them nothing of it."""
