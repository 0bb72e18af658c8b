"""How much classes can be read from frozen features: nearest neighbours and a linear probe, by scikit-learn."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from siamesenorm.errors import UserError

TEMPERATURE = 0.07
"""Of the votes of neighbours, as in arXiv 1805.01978."""
STEPS = 2000
"""At most so many steps of L-BFGS."""
TOP = (1, 5)


class LabelledFeatures(NamedTuple):
    """Features [count, dim] of frozen images, and their classes [count]."""

    features: Tensor
    labels: Tensor


def top_accuracies(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Return top-1, and with more than five classes top-5, of scores [count, classes]: parts of the images.

    An image counts if fewer than k classes have a higher score than its own, and those before it an equal one.
    """
    own = scores.gather(1, labels[:, None])
    numbers = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (numbers < labels[:, None]))
    rank = before.sum(1)
    return {f"top{k}": float((rank < k).double().mean()) for k in TOP if k == 1 or scores.shape[1] > k}


def knn_accuracies(train: LabelledFeatures, held_out: LabelledFeatures, neighbours: int) -> dict[str, float]:
    """Return the accuracies of a vote of the nearest training images by cosine, weighted by exp(cosine / 0.07)."""
    from sklearn.neighbors import KNeighborsClassifier

    def votes(distances: np.ndarray) -> np.ndarray:
        return np.exp((1.0 - distances) / TEMPERATURE)

    classifier = KNeighborsClassifier(neighbours, metric="cosine", algorithm="brute", weights=votes)
    classifier.fit(_array(train.features), train.labels.numpy())
    return top_accuracies(_scores(classifier, held_out, train), held_out.labels)


def probe_accuracies(train: LabelledFeatures, held_out: LabelledFeatures, *, strength: float = 1.0) -> dict[str, float]:
    """Return the accuracies of logistic regression on standardised features, and whether it converged.

    `strength` is the factor C on the data's term beside half the squared norm of the weights.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=STEPS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of steps says so
        probe.fit(_array(train.features), train.labels.numpy())
    found = top_accuracies(_scores(probe, held_out, train), held_out.labels)
    return {**found, "steps": int(probe[-1].n_iter_.max()), "converged": bool(probe[-1].n_iter_.max() < STEPS)}


def _array(features: Tensor) -> np.ndarray:
    """Return finite features in fp64; raises UserError for others."""
    if not bool(features.isfinite().all()):
        raise UserError("the features of some images are not finite: the model is broken, or diverged")
    return features.detach().cpu().double().numpy()


def _scores(classifier: Any, held_out: LabelledFeatures, train: LabelledFeatures) -> Tensor:
    """Return the probabilities of all classes up to the largest label; one without a training image has 0."""
    scores = torch.zeros(len(held_out.labels), int(train.labels.max()) + 1, dtype=torch.float64)
    scores[:, torch.as_tensor(classifier.classes_)] = torch.from_numpy(
        classifier.predict_proba(_array(held_out.features))
    )
    return scores
