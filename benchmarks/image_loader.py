"""Images per second of loader and model, side by side, on one core: does preparing images hold up training?

    python benchmarks/image_loader.py --out benchmarks/image_loader.json

Random smooth images are written as JPEG. The loader prepares batches alone, the model trains alone on one batch, then
both run as in training, each in turn, several times; the median counts. Numbers are images per second of processor time
of one core, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from siamesenorm.data import images
from siamesenorm.data.augmentation import Augmentation
from siamesenorm.data.image_loader import ImageLoader
from siamesenorm.data.images import ImageData, open_images
from siamesenorm.models.vision import VisionTransformerConfig
from siamesenorm.training.presets import presets

RECIPES = {
    "none": Augmentation(),
    "crop and flip": Augmentation(crop="pad", flip=0.5),
    "resized crop and flip": Augmentation(crop="resized", flip=0.5),
    "DeiT": Augmentation(
        crop="resized", flip=0.5, magnitude=9, erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3, label_smoothing=0.1
    ),
}
SMALL = presets(".")["cifar"].task.model
LARGE = VisionTransformerConfig(
    depth=12, dim=384, heads=6, hidden=1536, activation="gelu", bias=True, image_size=224, patch_size=16, classes=2
)
CASES: dict[str, tuple[VisionTransformerConfig, tuple[int, int], tuple[str, ...], int]] = {
    "ViT of the preset cifar, images of 32 x 32": (SMALL, (32, 32), ("none", "crop and flip", "DeiT"), 64),
    "ViT-S/16, images of 500 x 375": (LARGE, (500, 375), ("resized crop and flip", "DeiT"), 8),
}
ROUNDS = 3


def write_images(path: Path, size: tuple[int, int], count: int) -> Path:
    """Write smooth random images as JPEG in two class folders."""
    generator = np.random.default_rng(0)
    for index in range(count):
        coarse = generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        file = path / f"class{index % 2}" / f"{index}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(content, "jpeg", quality=90)
        file.write_bytes(content.getvalue())
    return path


def rate(work: Callable[[int], Any], batch: int, batches: int) -> float:
    """Return images per second of processor time, of all threads, after one batch that is not timed."""
    work(0)
    begin = time.process_time()
    for number in range(1, batches + 1):
        work(number)
    return batch * batches / (time.process_time() - begin)


def measured(data: ImageData, config: VisionTransformerConfig, recipe: Augmentation, batch: int) -> dict[str, float]:
    """Return the rates of a loader that decodes every image anew, of the model, and of both in turn."""
    model = config.build(seed=0, device=torch.device("cpu"))
    fixed = ImageLoader(data, size=config.image_size, augmentation=recipe, fit="resize").batch(0, batch)

    def train(pixels: torch.Tensor, labels: torch.Tensor) -> None:
        F.cross_entropy(model(pixels).logits, labels).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    loader = ImageLoader(data, size=config.image_size, augmentation=recipe, fit="resize")

    def both(number: int) -> None:
        train(*loader.batch(number * batch, batch)[:2])

    alone = ImageLoader(data, size=config.image_size, augmentation=recipe, fit="resize")
    found: dict[str, list[float]] = {"loader": [], "model": [], "both": []}
    for _ in range(ROUNDS):
        found["loader"].append(rate(lambda number: alone.batch(number * batch, batch), batch, 4))
        found["model"].append(rate(lambda number: train(*fixed[:2]), batch, 2))
        found["both"].append(rate(both, batch, 2))
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def main() -> None:
    """Measure all cases, print them, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images.KEPT_BYTES = 0
    rows = []
    for name, (config, size, recipes, batch) in CASES.items():
        config = VisionTransformerConfig(**{**vars(config), "classes": 2})
        with tempfile.TemporaryDirectory() as directory:
            path = write_images(Path(directory), size, 160)
            for recipe in recipes:
                data = open_images(str(path))
                row = {"case": name, "augmentation": recipe, **measured(data, config, RECIPES[recipe], batch)}
                print(row, flush=True)
                rows.append(row)
    record = {"torch": torch.__version__, "cores": os.cpu_count(), "unit": "images / s of one core", "rows": rows}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
