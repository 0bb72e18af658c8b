"""Write the Frechet distances that torchmetrics and torch-fidelity compute, for the test of this library's.

    python benchmarks/frechet_agreement.py tests/golden/frechet.json

It needs both packages (`pip install torchmetrics torch-fidelity`). Images and features are deterministic: integers by a
formula, and means over areas of pixels.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.evaluation.frechet import PixelFeatures

FEATURES = PixelFeatures(size=4)
WIDTH = 48


def images_of(kind: str) -> Tensor:
    """Return images, uint8 [count, 3, 8, 8], without a random generator: "fine", "dark", "smooth" or "few" of them."""
    count = 20 if kind == "few" else 150
    places = torch.arange(count * 3 * 64, dtype=torch.float64)
    waves = torch.sin(places * 1.7) + torch.sin(places**1.5 * 0.013) + 0.5 * torch.sin(places.view(-1) // 64 * 0.9)
    levels = ((waves + 2.5) / 5 * 255).view(count, 3, 8, 8)
    if kind == "dark":
        levels = levels * 0.6
    if kind == "smooth":
        levels = nn.functional.avg_pool2d(levels, 5, stride=1, padding=2)
    return levels.clamp(0, 255).to(torch.uint8)


PAIRS = (("fine", "fine"), ("fine", "dark"), ("fine", "smooth"), ("dark", "few"))


class Module(nn.Module):
    """The features as torchmetrics takes them."""

    num_features = WIDTH

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of images in bytes."""
        return FEATURES(images)


def by_torchmetrics(real: Tensor, generated: Tensor) -> float:
    """Return torchmetrics' distance."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=Module(), input_img_size=(3, 8, 8))
    metric.set_dtype(torch.float64)
    metric.update(real, real=True)
    metric.update(generated, real=False)
    return float(metric.compute())


def by_torch_fidelity(real: Tensor, generated: Tensor) -> float:
    """Return torch-fidelity's distance of the same features."""
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    statistics = [fid_features_to_statistics(FEATURES(images)) for images in (real, generated)]
    return float(fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"])


def main() -> None:
    """Compute and write."""
    rows: list[dict[str, Any]] = []
    for first, second in PAIRS:
        real, generated = images_of(first), images_of(second)
        rows.append(
            {
                "images": [first, second],
                "torchmetrics": by_torchmetrics(real, generated),
                "torch_fidelity": by_torch_fidelity(real, generated),
            }
        )
    versions = {name: version(name) for name in ("torch", "torchmetrics", "torch-fidelity")}
    Path(sys.argv[1]).write_text(json.dumps({"versions": versions, "distances": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
