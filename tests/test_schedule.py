"""The schedule against closed forms worked out by hand."""

from __future__ import annotations

import math

import pytest

from siamesenorm.errors import UserError
from siamesenorm.training.optimizer import OptimizerConfig, Schedule


def schedule_of(total_steps: int, **options: object) -> Schedule:
    return OptimizerConfig(**options).schedule(total_steps)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant"])
def test_warmup_is_a_straight_line_from_zero_to_the_peak(shape):
    schedule = schedule_of(total_steps=100, warmup_steps=20, shape=shape)
    assert [schedule.factor(step) for step in (0, 1, 5, 10, 19)] == [0.0, 0.05, 0.25, 0.5, 0.95]
    assert schedule.factor(20) == pytest.approx(1.0, abs=1e-15)
    assert schedule.factor(21) <= 1.0


def test_cosine_at_quarters():
    schedule = schedule_of(total_steps=120, warmup_steps=20, final_fraction=0.1)
    assert schedule.factor(45) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, abs=1e-15)
    assert schedule.factor(70) == pytest.approx(0.55, abs=1e-15)
    assert schedule.factor(95) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2, abs=1e-15)
    assert schedule.factor(120) == 0.1


def test_linear_falls_by_the_same_amount_every_step():
    schedule = schedule_of(total_steps=100, shape="linear", final_fraction=0.0)
    assert [schedule.factor(step) for step in (25, 50, 75, 100)] == [0.75, 0.5, 0.25, 0.0]


def test_wsd_holds_then_falls_linearly():
    schedule = schedule_of(total_steps=200, warmup_steps=10, shape="wsd", final_fraction=0.2, decay_fraction=0.25)
    assert {schedule.factor(step) for step in range(10, 151)} == {1.0}
    assert schedule.factor(151) == pytest.approx(1 - 0.8 / 50, abs=1e-15)
    assert schedule.factor(175) == pytest.approx(0.6, abs=1e-15)
    assert schedule.factor(200) == pytest.approx(0.2, abs=1e-15)


def test_wsd_may_decay_right_after_the_warmup():
    schedule = schedule_of(total_steps=300, warmup_steps=90, shape="wsd", decay_fraction=0.7)
    assert schedule.factor(90) == pytest.approx(1.0, abs=1e-9)


def test_constant_stays_at_the_peak():
    schedule = schedule_of(total_steps=50, warmup_steps=5, shape="constant", final_fraction=0.1)
    assert {schedule.factor(step) for step in range(5, 60)} == {1.0}


def test_no_warmup_starts_at_the_peak():
    schedule = schedule_of(total_steps=10)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(1) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 10)) / 2, abs=1e-15)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_never_rises_after_the_warmup_and_holds_its_end(shape):
    schedule = schedule_of(total_steps=97, warmup_steps=7, shape=shape)
    factors = [schedule.factor(step) for step in range(7, 110)]
    assert all(later <= earlier for earlier, later in zip(factors, factors[1:], strict=False))
    assert factors[97 - 7 :] == pytest.approx([0.1] * 13, abs=1e-15)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"total_steps": 0}, "total_steps"),
        ({"total_steps": 10, "warmup_steps": 10}, "warmup_steps"),
        ({"total_steps": 10, "warmup_steps": -1}, "-1"),
        ({"total_steps": 10, "final_fraction": 1.5}, "1.5"),
        ({"total_steps": 10, "final_fraction": math.nan}, "nan"),
        ({"total_steps": 10, "shape": "cosin"}, "cosin"),
        ({"total_steps": 10, "shape": "wsd", "decay_fraction": 0.0}, "decay_fraction"),
        ({"total_steps": 10, "warmup_steps": 5, "shape": "wsd", "decay_fraction": 0.6}, "0.6"),
    ],
)
def test_nonsense_is_refused_in_one_line(values, message):
    with pytest.raises(UserError, match=message) as caught:
        schedule_of(**values)
    assert "\n" not in str(caught.value)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError):
        schedule_of(total_steps=10).factor(-1)
