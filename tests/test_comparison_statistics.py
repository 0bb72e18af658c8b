"""Student's t against published tables and closed forms, Holm's correction against a worked example, curves by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from siamesenorm.comparison.statistics import (
    Bound,
    PairedDifference,
    effective_speedup,
    holm,
    noise_band,
    paired_difference,
    rate_sensitivity,
    t_interval,
    time_to_target,
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


def test_what_is_not_finite_is_not_tested() -> None:
    assert PairedDifference(by_seed={0: math.inf, 1: 1.0}).p_value is None
    with pytest.raises(ValueError, match="finite"):
        holm([0.01, math.nan])


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


def test_a_noise_band_is_the_prediction_interval_of_one_more_value() -> None:
    low, high = noise_band([3.0, 3.2, 3.4]) or (0.0, 0.0)  # t = 4.30265, s = 0.2, sqrt(4 / 3)
    assert (low, high) == (pytest.approx(3.2 - 0.993654, abs=1e-5), pytest.approx(3.2 + 0.993654, abs=1e-5))
    assert noise_band([3.0]) is None
    generator = np.random.default_rng(1)
    inside = 0
    for row in generator.normal(2.0, 0.1, size=(2000, 5)).tolist():
        low, high = noise_band(row[:4]) or (0.0, 0.0)
        inside += low <= row[4] <= high
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_rate_sensitivity_is_the_mean_excess_over_the_best_rate() -> None:
    assert rate_sensitivity({1e-3: 2.5, 1e-2: 2.0, 1e-1: 2.75}, floor=5.5) == pytest.approx(1.25 / 3)
    assert rate_sensitivity({1e-3: 2.5, 1e-2: 2.0}, floor=None) == pytest.approx(0.25)


def test_a_rate_that_did_not_survive_counts_at_the_floor() -> None:
    for lost in (math.nan, math.inf):
        assert rate_sensitivity({1e-3: 2.0, 1e-2: lost, 1e-1: 9.0}, floor=5.0) == pytest.approx(2.0)
        assert rate_sensitivity({1e-3: 2.0, 1e-2: lost}, floor=None) is None


def test_there_is_no_sensitivity_of_one_rate_or_of_none_that_survived() -> None:
    for losses in (
        {1e-3: 2.0},
        {},
        {1e-3: math.nan, 1e-2: math.inf},
        {1e-3: 5.01, 1e-2: 5.02},
        {1e-3: 5.01, 1e-2: math.inf},
    ):
        assert rate_sensitivity(losses, floor=5.0) is None


def test_a_target_is_reached_at_the_first_step_at_or_below_it() -> None:
    losses = {300: 2.0, 100: 3.0, 200: 2.5, 400: math.nan, 500: 2.4}
    assert time_to_target(losses, 2.5) == 200
    assert time_to_target(losses, 1.9) == time_to_target({1: math.nan}, 9.0) == math.inf


def power_law(compute: float) -> float:
    return 1.6 + 8.0 * compute**-0.1


def test_effective_speedup_is_exact_on_a_power_law() -> None:
    curve = {compute: power_law(compute) for compute in (1e2, 1e3, 1e4, 1e5)}
    speedup = effective_speedup(curve, power_law(3e3), 1.25, compute=1e3, irreducible=1.6)
    assert speedup is not None and speedup.bound is Bound.EXACT
    assert (speedup.at_equal_step_cost, speedup.ratio) == (pytest.approx(3.0), pytest.approx(2.4))
    for compute in curve:
        own = effective_speedup(curve, curve[compute], 1.0, compute=compute)
        assert own is not None and own.ratio == pytest.approx(1.0) and own.bound is Bound.EXACT


def test_effective_speedup_interpolates_over_log_compute() -> None:
    curve = {100.0: math.e**2, 400.0: math.e, 1600.0: 1.0}  # equal steps of log loss over equal steps of log compute
    speedup = effective_speedup(curve, math.e**1.5, 1.0, compute=100.0)
    assert speedup is not None and speedup.ratio == pytest.approx(2.0)


def test_a_loss_outside_of_the_curve_gives_a_bound() -> None:
    curve = {1.0: 4.0, 2.0: 3.5, 4.0: 3.2}
    better = effective_speedup(curve, 3.0, 2.0, compute=1.0)
    worse = effective_speedup(curve, 4.5, 2.0, compute=2.0)
    assert better is not None and (better.bound, better.ratio) == (Bound.AT_LEAST, pytest.approx(2.0))
    assert worse is not None and (worse.bound, worse.ratio) == (Bound.AT_MOST, pytest.approx(0.25))


def test_a_budget_that_is_no_better_than_a_smaller_one_is_left_out() -> None:
    curve = {1.0: 4.0, 2.0: 4.1, 4.0: 3.5, 8.0: 3.0}
    without = {compute: loss for compute, loss in curve.items() if compute != 2.0}
    assert effective_speedup(curve, 3.7, 1.0, compute=1.0) == effective_speedup(without, 3.7, 1.0, compute=1.0)
    assert effective_speedup({1.0: 4.0, 2.0: 4.1, 4.0: 3.5}, 3.7, 1.0, compute=1.0) is None


@pytest.mark.parametrize(
    "changes", [{"step_cost": 0.0}, {"compute": -1.0}, {"curve": {0.0: 4.0}}, {"irreducible": 3.2}, {"loss": 0.0}]
)
def test_impossible_costs_and_losses_are_refused(changes: dict[str, Any]) -> None:
    given = {"curve": {1.0: 4.0, 2.0: 3.5, 4.0: 3.2}, "loss": 3.3, "step_cost": 1.0, "compute": 1.0}
    with pytest.raises(ValueError, match=r"\d"):
        effective_speedup(**{**given, **changes})
