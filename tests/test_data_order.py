"""The stateless order: a permutation of every epoch, a pure function of seed and position."""

from __future__ import annotations

import numpy as np
import pytest

from siamesenorm.data import SampleOrder
from siamesenorm.errors import UserError


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 10, 16, 17, 1000, 65537])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_each_epoch_visits_every_sample_once(samples: int, epoch: int) -> None:
    visited = SampleOrder(samples, seed=3).indices(epoch * samples, samples)
    assert visited.dtype == np.int64
    assert np.array_equal(np.sort(visited), np.arange(samples))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    n = 1000
    orders = [SampleOrder(n, seed).indices(epoch * n, n) for seed in (0, 1, 2, 2**40) for epoch in range(3)]
    for i, first in enumerate(orders):
        # Two random permutations agree in one place on average; ten would be a one-in-a-million accident.
        assert all((first == second).sum() < 10 for second in orders[:i])
        assert (first == np.arange(n)).sum() < 10


def test_batches_of_any_size_read_the_same_order() -> None:
    order = SampleOrder(10, seed=5)
    whole = order.indices(0, 75)
    for size in (1, 3, 7, 40):
        pieces = [order.indices(start, min(size, 75 - start)) for start in range(0, 75, size)]
        assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(SampleOrder(10, seed=5).indices(31, 4), whole[31:35])
    assert order.indices(12, 0).shape == (0,)


@pytest.mark.parametrize(
    ("samples", "seed", "start", "expected"),
    [
        (1000, 3, 5, [425, 615, 234, 725, 140, 71]),
        (1797, 0, 3590, [1646, 1454, 1590, 363, 9, 339]),
        (10**9, 2**40, 10**12, [145158903, 858794072, 323853402, 977219527, 472061041, 918213622]),
    ],
)
def test_the_order_never_changes(samples: int, seed: int, start: int, expected: list[int]) -> None:
    """Committed runs were trained in this order."""
    assert SampleOrder(samples, seed).indices(start, 6).tolist() == expected


def test_far_positions_cost_no_more_than_near_ones() -> None:
    far = SampleOrder(1000, seed=0).indices(10**15 * 1000, 1000)
    assert np.array_equal(np.sort(far), np.arange(1000))


@pytest.mark.parametrize("samples", [6, 40, 64])
def test_samples_fall_uniformly(samples: int) -> None:
    """Chi-square of where sample 0 falls, and of which sample comes first, over many epochs."""
    epochs = 400 * samples
    order = SampleOrder(samples, seed=11).indices(0, epochs * samples).reshape(epochs, samples)
    first = np.bincount(order[:, 0], minlength=samples)
    place = np.bincount(np.argmin(order, axis=1), minlength=samples)
    for counts in (first, place):
        chi_square = ((counts - 400) ** 2 / 400).sum()
        freedom = samples - 1
        assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_scattered() -> None:
    order = SampleOrder(65537, seed=0).indices(0, 65537)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(65537))[0, 1]) < 0.02


@pytest.mark.parametrize(("samples", "seed", "value"), [(0, 0, "samples 0"), (5, -1, "seed -1")])
def test_bad_numbers_are_named(samples: int, seed: int, value: str) -> None:
    with pytest.raises(UserError, match=value):
        SampleOrder(samples, seed)


def test_bad_positions_are_named() -> None:
    with pytest.raises(UserError, match="-1"):
        SampleOrder(5, 0).indices(-1, 2)
