r"""The Frechet distance between two sets of images, by the mean and the covariance of their features, in fp64.

\[ d = |\mu_1 - \mu_2|^2 + \mathrm{tr}\bigl(S_1 + S_2 - 2 (S_1 S_2)^{1/2}\bigr) \]

It is called FID (arXiv 1706.08500) with the features of the published Inception weights alone; with others it is named
by its features: such values compare with each other only.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.errors import UserError, reason

INCEPTION_DIGEST = "6726825d"
"""Beginning of the SHA-256 of weights-inception-2015-12-05-6726825d.pth, which torch-fidelity publishes."""
INCEPTION_FEATURES = 2048
WHITE = 255


class FeatureExtractor(Protocol):
    """Maps images, uint8 [count, channels, height, width], to features [count, dim]."""

    @property
    def name(self) -> str:
        """What the features are."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features; raises UserError for images that it does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelFeatures:
    """The pixels in units of white, as means over equal areas where an image is larger than `size` x `size`."""

    size: int = 8

    @property
    def name(self) -> str:
        """What the features are."""
        return f"pixels, at most {self.size} x {self.size}"

    def __call__(self, images: Tensor) -> Tensor:
        """Return [count, channels * height * width] in fp64."""
        values = images.double() / WHITE
        height, width = (min(self.size, side) for side in images.shape[-2:])
        return F.adaptive_avg_pool2d(values, (height, width)).flatten(1)


class InceptionFeatures:
    """The 2,048 pooled features of the Inception network of 2015, from torch-fidelity's file of its weights.

    Raises UserError where torch-fidelity is not installed, and for another file.
    """

    name = "Inception-v3 (2015), torch-fidelity"

    def __init__(self, weights: Path, device: torch.device) -> None:
        try:
            content = weights.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {weights}: {error.strerror or error}") from error
        digest = hashlib.sha256(content).hexdigest()
        if not digest.startswith(INCEPTION_DIGEST):
            raise UserError(
                f"{weights} is not weights-inception-2015-12-05-{INCEPTION_DIGEST}.pth of torch-fidelity (its SHA-256 "
                f"begins with {digest[:8]}): download that file"
            )
        try:
            torch.load(weights, weights_only=True, map_location="meta")  # torch-fidelity itself would run any pickle
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise UserError(f"FID needs torch-fidelity ({error}): pip install 'siamesenorm[fid]'") from error
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise UserError(f"{weights} cannot be read: {reason(error)}") from error
        layer = str(INCEPTION_FEATURES)
        network: Any = FeatureExtractorInceptionV3("inception", [layer], feature_extractor_weights_path=str(weights))
        self.network, self.device = network.to(device), device

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return [count, 2048] for images of one or three channels; grey ones are repeated."""
        if images.shape[1] not in (1, 3):
            raise UserError(f"FID reads grey and RGB images, these have {images.shape[1]} channels: use other features")
        features: Tensor = self.network(images.expand(-1, 3, -1, -1).to(self.device))[0]
        return features


class FeatureStatistics:
    """Mean [dim] and covariance [dim, dim] of features in fp64, of any number of them added part by part."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, 0, dtype=torch.float64)

    @classmethod
    def of(cls, images: Iterable[Tensor], features: FeatureExtractor) -> Self:
        """Return the statistics of the features of batches of images."""
        statistics = cls()
        for batch in images:
            statistics.update(features(batch))
        return statistics

    def update(self, features: Tensor) -> None:
        """Add features [count, dim]; raises UserError for numbers that are not finite."""
        values = features.detach().to("cpu", torch.float64)
        if not bool(values.isfinite().all()):
            raise UserError("the features of some images are not finite: their model is broken, or diverged")
        if not self.count:
            self.mean = torch.zeros(values.shape[1], dtype=torch.float64)
            self.scatter = torch.zeros(values.shape[1], values.shape[1], dtype=torch.float64)
        new, total = len(values), self.count + len(values)
        mean = values.mean(0)
        shift, centred = mean - self.mean, values - mean
        # The part between the groups is added exactly; sums of squares would cancel where a mean is large.
        self.scatter += centred.T @ centred + torch.outer(shift, shift) * (self.count * new / total)
        self.mean += shift * (new / total)
        self.count = total

    @property
    def covariance(self) -> Tensor:
        """The unbiased covariance; raises UserError for fewer than two images."""
        if self.count < 2:
            raise UserError(f"a Frechet distance of {self.count} images: give at least 2, better some thousands")
        return self.scatter / (self.count - 1)


def frechet_distance(first: FeatureStatistics, second: FeatureStatistics) -> float:
    """Return the distance of two sets of features; raises UserError where their widths differ.

    tr (S1 S2)^(1/2) is the sum of the singular values of S1^(1/2) S2^(1/2): exact to rounding where a covariance is
    singular, as it is with fewer images than features.
    """
    if first.mean.shape != second.mean.shape:
        raise UserError(f"features of widths {len(first.mean)} and {len(second.mean)} cannot be compared: use one kind")
    one, other = first.covariance, second.covariance
    product = torch.linalg.svdvals(_root(one) @ _root(other)).sum()
    distance = (first.mean - second.mean).square().sum() + one.trace() + other.trace() - 2 * product
    return max(0.0, float(distance))


def score_name(features: FeatureExtractor) -> str:
    """Return what the distance is called with these features."""
    if isinstance(features, InceptionFeatures):
        return "FID"
    return f"Frechet distance (features: {features.name})"


def _root(matrix: Tensor) -> Tensor:
    """Return the symmetric root of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root
