"""Nearest neighbours and linear probes on frozen features, against votes and classes that are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.evaluation.representations import LabelledFeatures, knn_accuracies, probe_accuracies, top_accuracies


def clusters(count: int, classes: int, seed: int, spread: float = 0.1) -> LabelledFeatures:
    """Return points around the axes of a space with as many dimensions as classes."""
    labels = torch.arange(count) % classes
    noise = torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))
    return LabelledFeatures(torch.eye(classes)[labels] + spread * noise, labels)


def test_top_accuracies_count_the_classes_before_the_right_one() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]] * 3)
    assert top_accuracies(scores, torch.tensor([0, 1, 6])) == {
        "top1": pytest.approx(1 / 3),
        "top5": pytest.approx(2 / 3),
    }
    assert set(top_accuracies(scores[:, :5], torch.tensor([0, 1, 2]))) == {"top1"}, "all of five classes are the first"


def test_equal_scores_do_not_make_every_class_the_first() -> None:
    """A model without a preference is right as often as a guess, not always."""
    assert top_accuracies(torch.zeros(10, 10), torch.arange(10)) == {"top1": 0.1, "top5": 0.5}


def test_separate_classes_are_read_from_features() -> None:
    train, held_out = clusters(120, 6, 0), clusters(60, 6, 1)
    assert knn_accuracies(train, held_out, 5) == {"top1": 1.0, "top5": 1.0}
    found = probe_accuracies(train, held_out)
    assert found["top1"] == 1.0 and found["converged"] is True and found["steps"] > 1


def test_features_without_classes_give_the_rate_of_a_guess() -> None:
    train, held_out = clusters(600, 6, 0, spread=50.0), clusters(600, 6, 1, spread=50.0)
    assert knn_accuracies(train, held_out, 20)["top1"] == pytest.approx(1 / 6, abs=0.06)
    assert probe_accuracies(train, held_out)["top1"] == pytest.approx(1 / 6, abs=0.06)


def at(*degrees: float) -> Tensor:
    return torch.tensor([[math.cos(math.radians(each)), math.sin(math.radians(each))] for each in degrees])


def test_votes_are_weighted_by_the_cosine_alone() -> None:
    """One near neighbour outweighs two far ones; lengths do not count; of all, the majority at equal distance wins."""
    train = LabelledFeatures(at(5, 60, 60) * torch.tensor([[100.0], [1.0], [0.1]]), torch.tensor([0, 1, 1]))
    assert knn_accuracies(train, LabelledFeatures(at(0), torch.tensor([0])), 3) == {"top1": 1.0}
    assert knn_accuracies(train, LabelledFeatures(at(40), torch.tensor([1])), 3) == {"top1": 1.0}


def test_small_features_are_probed_beside_large_ones() -> None:
    """Without standardisation the penalty would keep the weights of the small, informative ones at 0."""
    sides = []
    for seed in (0, 1):
        small, noise = clusters(120, 3, seed), 10 * torch.randn(120, 1, generator=torch.Generator().manual_seed(seed))
        sides.append(LabelledFeatures(torch.cat((1e-4 * small.features - 7, noise), dim=1).double(), small.labels))
    assert probe_accuracies(*sides)["top1"] > 0.95


def test_a_class_without_training_images_is_never_found() -> None:
    train = LabelledFeatures(at(0, 1, 90, 91), torch.tensor([0, 0, 2, 2]))
    held_out = LabelledFeatures(at(0, 90), torch.tensor([1, 2]))
    assert knn_accuracies(train, held_out, 1)["top1"] == 0.5
    assert probe_accuracies(train, held_out)["top1"] == 0.5


def test_features_that_are_not_finite_are_refused() -> None:
    good, bad = clusters(12, 3, 0), LabelledFeatures(torch.full((3, 3), math.nan), torch.arange(3))
    for evaluate in (lambda a, b: knn_accuracies(a, b, 2), probe_accuracies):
        with pytest.raises(UserError, match="not finite"):
            evaluate(good, bad)
