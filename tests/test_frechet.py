"""The Frechet distance: closed forms, other implementations, streams of parts, and its name."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from frechet_agreement import FEATURES, PAIRS, images_of
from siamesenorm.errors import UserError
from siamesenorm.evaluation import frechet
from siamesenorm.evaluation.frechet import (
    FeatureStatistics,
    InceptionFeatures,
    PixelFeatures,
    frechet_distance,
    score_name,
)

GOLDEN = json.loads((Path(__file__).parent / "golden/frechet.json").read_text())["distances"]


def statistics(features: Tensor, part: int = 0) -> FeatureStatistics:
    """Return the statistics of features, added in parts of this length."""
    found = FeatureStatistics()
    for each in features.split(part or len(features)):
        found.update(each)
    return found


def normal(count: int, dim: int, seed: int) -> Tensor:
    return torch.randn(count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: " ".join(row["images"]))
def test_it_is_that_of_torchmetrics_and_torch_fidelity(row: dict[str, Any]) -> None:
    """Where a covariance is singular ("few" images), theirs are roots of rounding errors: less exact."""
    first, second = (FeatureStatistics.of(images_of(kind).split(64), FEATURES) for kind in row["images"])
    tolerance = 1e-7 if "few" in row["images"] else 1e-12
    for other in ("torchmetrics", "torch_fidelity"):
        assert frechet_distance(first, second) == pytest.approx(row[other], rel=tolerance, abs=1e-12)
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first), abs=1e-12)


def test_the_golden_values_are_of_these_pairs() -> None:
    assert [tuple(row["images"]) for row in GOLDEN] == list(PAIRS)


def test_two_normal_distributions_have_the_closed_form() -> None:
    """Features x and a x + b: |b|^2 + sum (sd (a - 1))^2 along the axes of the covariance."""
    x = statistics(normal(50, 3, 0))
    scale, shift = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64), torch.tensor([1.0, 0.0, -2.0])
    axes, sd = torch.eye(3, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    first, second = FeatureStatistics(), FeatureStatistics()
    for each, factor, mean in ((first, 1.0, 0.0), (second, scale, shift)):
        each.update(normal(50, 3, 0))
        each.mean = x.mean * 0 + mean
        each.scatter = axes * (sd * factor).square() * (each.count - 1)
    expected = 5.0 + float((sd * (scale - 1)).square().sum())
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-14)


def test_the_distance_to_itself_is_zero_with_fewer_images_than_features() -> None:
    few = statistics(normal(5, 40, 1))
    assert frechet_distance(few, few) < 1e-12


def test_it_grows_with_blur_and_with_darkness() -> None:
    fine = images_of("fine")
    distances = []
    for width in (1, 3, 5, 7):
        blurred = torch.nn.functional.avg_pool2d(fine.double(), width, 1, width // 2).to(torch.uint8)
        distances.append(frechet_distance(*(FeatureStatistics.of([each], FEATURES) for each in (fine, blurred))))
    assert distances[0] < 1e-12 and distances == sorted(distances) and distances[1] > 0.1


@pytest.mark.parametrize("part", [1, 7, 64])
def test_parts_have_the_statistics_of_the_whole_even_far_from_zero(part: int) -> None:
    features = normal(100, 6, 2) * 1e-3 + 1e6
    found = statistics(features, part)
    torch.testing.assert_close(found.mean, features.mean(0), rtol=1e-15, atol=0)
    torch.testing.assert_close(found.covariance, torch.cov(features.T), rtol=1e-6, atol=1e-12)


def test_pixels_are_means_over_areas_in_units_of_white() -> None:
    image = torch.tensor([[[[0, 255], [255, 255]]]], dtype=torch.uint8)
    assert PixelFeatures(size=1)(image).tolist() == [[0.75]]
    assert PixelFeatures(size=8)(image).tolist() == [[0.0, 1.0, 1.0, 1.0]]
    assert score_name(PixelFeatures()) == "Frechet distance (features: pixels, at most 8 x 8)"


def test_what_has_no_distance_is_refused() -> None:
    with pytest.raises(UserError, match="at least 2"):
        frechet_distance(statistics(normal(1, 3, 0)), statistics(normal(4, 3, 0)))
    with pytest.raises(UserError, match="widths 3 and 4"):
        frechet_distance(statistics(normal(5, 3, 0)), statistics(normal(5, 4, 0)))
    with pytest.raises(UserError, match="not finite"):
        statistics(torch.tensor([[float("nan")], [0.0]]))


class Network:
    """Stands for torch-fidelity's network: the mean of each channel, repeated."""

    def __init__(self, name: str, layers: list[str], feature_extractor_weights_path: str) -> None:
        self.layers, self.path = layers, feature_extractor_weights_path

    def to(self, device: torch.device) -> Network:
        return self

    def __call__(self, images: Tensor) -> tuple[Tensor]:
        assert images.dtype == torch.uint8 and images.shape[1] == 3
        return (images.double().mean((2, 3)),)


def test_fid_is_the_name_with_the_published_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, device = tmp_path / "weights.pth", torch.device("cpu")
    with pytest.raises(UserError, match="cannot read"):
        InceptionFeatures(weights, device)
    torch.save({"layer": torch.zeros(2)}, weights)
    with pytest.raises(UserError, match="6726825d"):
        InceptionFeatures(weights, device)
    monkeypatch.setattr(frechet, "INCEPTION_DIGEST", hashlib.sha256(weights.read_bytes()).hexdigest()[:8])
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(UserError, match="torch-fidelity"):
        InceptionFeatures(weights, device)
    package, module = ModuleType("torch_fidelity"), ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    module.FeatureExtractorInceptionV3 = Network
    monkeypatch.setitem(sys.modules, "torch_fidelity", package)
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", module)
    features = InceptionFeatures(weights, device)
    assert score_name(features) == "FID"
    assert (features.network.layers, features.network.path) == (["2048"], str(weights))
    grey = torch.full((2, 1, 4, 4), 51, dtype=torch.uint8)
    assert features(grey).tolist() == [[51.0] * 3] * 2
    with pytest.raises(UserError, match="4 channels"):
        features(torch.zeros(2, 4, 4, 4, dtype=torch.uint8))


def test_a_file_that_would_run_code_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights.pth"
    torch.save({"hook": print}, weights)
    monkeypatch.setattr(frechet, "INCEPTION_DIGEST", hashlib.sha256(weights.read_bytes()).hexdigest()[:8])
    with pytest.raises(UserError, match="cannot be read"):
        InceptionFeatures(weights, torch.device("cpu"))
