"""Student's t against published tables and closed forms, Holm's correction against a worked example."""

from __future__ import annotations

import math

import numpy as np
import pytest

from siamesenorm.comparison.statistics import (
    PairedDifference,
    holm,
    paired_difference,
    t_interval,
)

# Fisher and Yates, Statistical Tables, table III: two-sided quantiles.
PUBLISHED_QUANTILES = [
    (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 4, 2.776), (0.95, 10, 2.228), (0.95, 30, 2.042),
    (0.95, 120, 1.980), (0.90, 5, 2.015), (0.99, 1, 63.657), (0.99, 4, 4.604), (0.999, 4, 8.610), (0.999, 30, 3.646),
]  # fmt: skip

# "Student" (1908): additional hours of sleep of ten patients, one drug against the other.
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


@pytest.mark.parametrize(("confidence", "degrees", "published"), PUBLISHED_QUANTILES)
def test_quantiles_equal_the_published_tables(confidence: float, degrees: int, published: float) -> None:
    values = [float(index % 2) for index in range(degrees + 1)]
    half_width = t_interval(values, confidence).half_width
    assert half_width is not None
    assert round(half_width / (np.std(values, ddof=1) / math.sqrt(len(values))), 3) == published


@pytest.mark.parametrize("t", [1e-3, 0.5, 1.0, 3.0, 40.0, 1e4])
def test_the_tail_equals_its_closed_forms(t: float) -> None:
    two, three = {0: t - 1, 1: t + 1}, {0: t - math.sqrt(3), 1: t, 2: t + math.sqrt(3)}
    assert PairedDifference(by_seed=two).p_value == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-9)
    negative = {seed: -value for seed, value in three.items()}
    assert PairedDifference(by_seed=negative).p_value == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6)


def test_an_interval_equals_the_published_analysis_of_students_sleep_data() -> None:
    estimate = t_interval(SLEEP)
    assert estimate.mean == pytest.approx(1.58)
    assert estimate.ends == (pytest.approx(0.7001142), pytest.approx(2.4598858))
    assert PairedDifference(by_seed=dict(enumerate(SLEEP))).p_value == pytest.approx(0.00283289, rel=1e-5)


def test_a_single_value_has_no_interval() -> None:
    estimate = t_interval([1.5])
    assert (estimate.mean, estimate.half_width, estimate.ends) == (1.5, None, None)
    assert PairedDifference(by_seed={3: 1.5}).p_value is None


def test_differences_pair_the_seeds_that_both_have() -> None:
    paired = paired_difference({1: 2.0, 2: 3.0, 4: 9.0}, {2: 2.5, 1: 1.75, 3: 0.0})
    assert paired.by_seed == {1: 0.25, 2: 0.5}


def test_differences_without_spread_are_decided_by_their_mean() -> None:
    assert PairedDifference(by_seed={1: 0.5, 2: 0.5}).p_value == 0.0
    assert PairedDifference(by_seed={1: 0.0, 2: 0.0}).p_value == 1.0


def test_holm_equals_the_worked_example() -> None:
    decisions = holm([0.01, 0.04, 0.03, 0.005])
    assert [decision.adjusted_p for decision in decisions] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [decision.rejected for decision in decisions] == [True, False, False, True]


def test_holm_of_one_is_no_correction_and_of_none_is_empty() -> None:
    assert holm([0.049])[0].rejected and not holm([0.051])[0].rejected
    assert holm([]) == []


def test_holms_intervals_exclude_zero_exactly_for_the_rejected() -> None:
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(60):
        effects = generator.choice([0.0, 1.0, 3.0], size=4)
        pairs = [PairedDifference(by_seed=dict(enumerate(generator.normal(effect, 1.0, size=5)))) for effect in effects]
        decisions = holm([pair.p_value or 0.0 for pair in pairs])
        for pair, decision in zip(pairs, decisions, strict=True):
            low, high = pair.interval(decision.confidence).ends or (0.0, 0.0)
            assert (low * high > 0) == decision.rejected
            assert decision.rejected == (decision.adjusted_p < 0.05)
            seen.add(decision.rejected)
    assert seen == {True, False}
