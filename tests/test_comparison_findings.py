"""What is concluded from known results: choice of the rate, pairing, correction, edges, controls, sensitivity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from siamesenorm.comparison.findings import (
    CONFIRMED_HIGHER,
    CONFIRMED_LOWER,
    HIGH_EDGE,
    LOW_EDGE,
    NOT_COMPARABLE,
    NOT_CONFIRMED,
    ONE_SEED,
    ONLY_RATE,
    SOME_DIVERGED,
    Findings,
    baseline_of,
    control_of,
    find,
    lacks_control,
)
from siamesenorm.comparison.results import Curve, Method, RunResult, SweepResults
from siamesenorm.comparison.statistics import student_t_quantile
from siamesenorm.comparison.summary import conclusions, footnotes
from siamesenorm.training.curves import LossCurve
from siamesenorm.training.verdict import judge

Losses = Mapping[float, Sequence[float | None]]
"""Held-out loss by rate and seed 0, 1, ...: None is not run, NaN diverged."""


def method(name: str, attention_norm: str = "qk", norm: str = "rmsnorm", **specification: str) -> Method:
    return Method(
        name=name,
        topology=name.partition(" ")[0],
        norm=norm,
        attention_norm=attention_norm,
        specification=tuple(sorted({"topology.name": name, **specification}.items())),
    )


def result(of: Method, rate: float, seed: int, loss: float) -> RunResult:
    trace = Curve(steps=np.arange(1.0, 41.0), values=np.full(40, 2.5 if math.isnan(loss) else loss))
    finished = 40 if not math.isnan(loss) else 39
    training = trace.values.tolist() + ([] if finished == 40 else [math.nan])
    return RunResult(
        path=Path(f"{of.name}-{rate}-{seed}"), method=of, learning_rate=rate, seed=seed, status="finished",
        verdict=judge(LossCurve.of(training, floor=3.0)),
        train_loss=loss, held_out_loss=loss, held_out_step=40, steps=40,
        steps_done=40, batch_tokens=64, train_tokens_available=64 * 40, parameters=1000, flops_per_token=6000.0,
        step_seconds=0.1, peak_memory_bytes=2**20, unigram_entropy=3.0, losses=trace, gradient_norms=trace,
        config={"model": {}, "data": {"digest": "d"}}, environment={},
    )  # fmt: skip


def findings(results: Mapping[Method, Losses]) -> Findings:
    runs = [
        result(of, rate, seed, loss)
        for of, by_rate in results.items()
        for rate, losses in by_rate.items()
        for seed, loss in enumerate(losses)
        if loss is not None
    ]
    return find(SweepResults(path=Path("s"), runs=tuple(runs), missing=(), data={}, command=None, selection_seed=0))


PRE, CONTROL, POST, SIAMESE = (
    method("pre"),
    method("pre + qkv", "qkv-head"),
    method("post"),
    method("siamese", "qkv-head"),
)
NAN = math.nan


def told(of: Findings, topic: str) -> str:
    return " ".join(each.text for each in [*conclusions(of), *footnotes(of)] if each.topic == topic)


def test_the_rate_is_chosen_on_the_selection_seed_and_reported_on_the_others() -> None:
    found = findings({PRE: {1e-3: [1.50, 1.40, 1.42], 2e-3: [1.45, 1.60, 1.64], 4e-3: [1.55, 1.30, 1.30]}})
    choice = found.choices[PRE]
    assert (choice.learning_rate, choice.edge, choice.on_selection_seed) == (2e-3, None, False)
    assert choice.losses == {1: 1.60, 2: 1.64}
    assert choice.outcome.held_out_loss is not None
    assert choice.outcome.held_out_loss.mean == pytest.approx(1.62)
    assert choice.outcome.held_out_loss.half_width == pytest.approx(12.706 * 0.02, rel=1e-4)


@pytest.mark.parametrize(
    ("losses", "chosen", "edge"),
    [
        ({1e-3: [1.4], 2e-3: [1.5], 4e-3: [1.6]}, 1e-3, LOW_EDGE),
        ({1e-3: [1.6], 2e-3: [1.5], 4e-3: [1.4]}, 4e-3, HIGH_EDGE),
        ({1e-3: [1.6], 2e-3: [1.5], 4e-3: [NAN]}, 2e-3, None),
        ({1e-3: [1.6], 2e-3: [NAN], 4e-3: [NAN]}, 1e-3, LOW_EDGE),
        ({1e-3: [1.6], 2e-3: [1.5], 4e-3: [None]}, 2e-3, HIGH_EDGE),
        ({1e-3: [1.6]}, 1e-3, ONLY_RATE),
    ],
)
def test_a_best_rate_at_the_edge_of_what_was_tried_is_flagged(losses: Losses, chosen: float, edge: str | None) -> None:
    found = findings({PRE: losses})
    assert (found.choices[PRE].learning_rate, found.choices[PRE].edge) == (chosen, edge)
    assert bool(told(found, "Edge of the grid")) == (edge is not None)


def test_a_diverged_run_is_never_chosen_however_low_its_loss() -> None:
    found = findings({PRE: {1e-3: [1.5], 2e-3: [NAN]}, POST: {1e-3: [NAN], 2e-3: [NAN]}})
    assert found.choices.keys() == {PRE}
    assert told(found, "Diverged") == "pre at 2e-3; post at 1e-3 and 2e-3."
    assert not told(found, "Stable at every rate")


def test_a_clear_difference_is_confirmed_and_a_vague_one_is_not() -> None:
    found = findings(
        {
            PRE: {1e-3: [1.50, 1.500, 1.520, 1.480, 1.510]},
            POST: {1e-3: [1.50, 1.490, 1.560, 1.460, 1.520]},
            SIAMESE: {1e-3: [1.40, 1.400, 1.421, 1.382, 1.409]},
            method("deepnorm"): {1e-3: [1.60, 1.600, 1.621, 1.582, 1.609]},
        }
    )
    by_method = {comparison.method.name: comparison for comparison in found.comparisons}
    assert [by_method[name].conclusion for name in ("post", "siamese", "deepnorm")] == [
        NOT_CONFIRMED, CONFIRMED_LOWER, CONFIRMED_HIGHER,
    ]  # fmt: skip
    assert by_method["siamese"].difference.by_seed == pytest.approx({1: -0.1, 2: -0.099, 3: -0.098, 4: -0.101})
    assert "siamese against pre −0.0995 nats" in told(found, "Confirmed")
    assert told(found, "Not confirmed") == "post against pre +0.0050 nats (the intervals include zero)."
    lowest = told(found, "Lowest held-out loss")
    assert lowest.startswith("siamese at 1e-3, 1.4030 nats (PPL 4.068, 4 seeds). Next is pre, 0.0995 nats above")
    assert lowest.endswith("; the difference is confirmed.")


def test_pairing_removes_what_seeds_have_in_common() -> None:
    seeds = [1.0, 1.2, 1.6, 0.9, 2.0]
    found = findings(
        {PRE: {1e-3: seeds}, SIAMESE: {1e-3: [seed - 0.01 - 0.001 * (i % 2) for i, seed in enumerate(seeds)]}}
    )
    assert found.comparisons[0].conclusion == CONFIRMED_LOWER
    spread = found.choices[SIAMESE].outcome.held_out_loss
    assert spread is not None and spread.half_width is not None and spread.half_width > 0.5


def test_the_corrected_interval_is_wider_with_more_tests() -> None:
    losses = [1.5, 1.50, 1.52, 1.51]
    lower = [loss - 0.1 + 0.01 * math.sin(index) for index, loss in enumerate(losses)]
    alone = findings({PRE: {1e-3: losses}, SIAMESE: {1e-3: lower}})
    crowd = findings(
        {PRE: {1e-3: losses}, SIAMESE: {1e-3: lower}} | {method(f"m{i}"): {1e-3: losses} for i in range(4)}
    )
    widths = []
    for found in (alone, crowd):
        comparison = found.comparison(SIAMESE, PRE)
        assert comparison is not None and comparison.interval is not None
        widths.append(comparison.interval.half_width)
    assert widths[1] / widths[0] == pytest.approx(student_t_quantile(0.99, 2) / student_t_quantile(0.95, 2))


def test_one_seed_gives_a_difference_without_an_interval() -> None:
    found = findings({PRE: {1e-3: [1.5]}, SIAMESE: {1e-3: [1.4]}})
    comparison = found.comparisons[0]
    assert (comparison.conclusion, comparison.decision) == (ONE_SEED, None)
    assert comparison.interval is not None and comparison.interval.mean == pytest.approx(-0.1)
    assert comparison.interval.half_width is None
    assert found.choices[SIAMESE].on_selection_seed
    assert told(found, "Confirmed").startswith("Nothing: no two methods share two seeds")
    assert "one seed, which also chose the rate" in told(found, "Lowest held-out loss")


def test_a_method_with_the_selection_seed_alone_is_compared_on_that_seed() -> None:
    found = findings({PRE: {1e-3: [1.50, 1.6, 1.7]}, POST: {1e-3: [1.45]}})
    assert found.comparisons[0].difference.by_seed == pytest.approx({0: -0.05})


def test_a_seed_that_diverged_forbids_a_confirmation() -> None:
    found = findings({PRE: {1e-3: [1.5, 1.50, 1.52, 1.51]}, POST: {1e-3: [1.3, 1.30, 1.321, NAN]}})
    assert found.comparisons[0].conclusion == SOME_DIVERGED
    assert "the order of the two is not tested here" in told(found, "Lowest held-out loss")
    assert found.choices[POST].diverged == 1
    assert told(found, "Diverged") == "post at 1e-3 (1 of 4 seeds)."
    lost = findings({PRE: {1e-3: [1.5, 1.5]}, POST: {1e-3: [1.3, NAN]}})
    assert lost.comparisons[0].conclusion == NOT_COMPARABLE


def test_qkv_norm_is_compared_with_its_control_row_too() -> None:
    losses: Losses = {1e-3: [1.5, 1.5]}
    with_control = findings({PRE: losses, CONTROL: losses, POST: losses, SIAMESE: losses})
    pairs = {(each.method.name, each.baseline.name) for each in with_control.comparisons}
    assert pairs == {("pre + qkv", "pre"), ("post", "pre"), ("siamese", "pre"), ("siamese", "pre + qkv")}
    assert not told(with_control, "Control row missing")
    without = findings({PRE: losses, SIAMESE: losses})
    assert told(without, "Control row missing").startswith(
        "No pre with QKV-norm and the same norm was run beside siamese,"
    )
    assert lacks_control([PRE, CONTROL, SIAMESE]) == [] and lacks_control([PRE, SIAMESE]) == [SIAMESE]


def test_the_baseline_is_the_pre_norm_configured_most_alike() -> None:
    shallow, deep = method("pre", depth="4"), method("pre · deep", depth="8")
    assert baseline_of(method("siamese", depth="8"), [shallow, deep]) is deep
    assert baseline_of(method("post", depth="4"), [shallow, deep]) is shallow
    assert baseline_of(POST, [POST, CONTROL]) is None
    assert control_of(POST, [PRE, CONTROL]) is None


def test_a_reference_and_a_control_have_the_norm_of_the_method() -> None:
    ours = method("siamese + seednorm", "qkv-head", "seednorm")
    assert baseline_of(ours, [PRE, CONTROL, ours]) is None and lacks_control([PRE, CONTROL, ours]) == [ours]
    control, reference = method("pre + qkv + seednorm", "qkv-head", "seednorm"), method("pre + s", norm="seednorm")
    assert control_of(ours, [CONTROL, control]) is control and baseline_of(ours, [PRE, reference]) is reference
    heads = {"norm.heads": "4"}
    four = method("siamese + seednorm:heads=4", "qkv-head", "seednorm", **heads)
    assert control_of(four, [control]) is None
    assert control_of(four, [control, same := method("pre + four", "qkv-head", "seednorm", **heads)]) is same
    losses: Losses = {1e-3: [1.5]}
    found = findings({PRE: losses, CONTROL: losses, ours: losses})
    assert [each.method for each in found.comparisons] == [CONTROL]
    assert told(found, "Control row missing").startswith("No pre with QKV-norm and the same norm was run beside siam")
    assert told(found, "Reference row missing") == "No pre with the same norm was run beside siamese + seednorm."


def test_methods_are_ranked_on_the_seeds_they_share() -> None:
    """The further seeds are harder: their mean may not stand against a loss of the selection seed."""
    found = findings({PRE: {1e-3: [1.50, 1.70, 1.72]}, POST: {1e-3: [1.60]}, SIAMESE: {1e-3: [1.40, 1.65, 1.64]}})
    assert [choice.method for choice in found.ranked()] == [SIAMESE, PRE, POST]
    assert not found.same_seeds
    lowest = told(found, "Lowest held-out loss")
    assert lowest.startswith("siamese at 1e-3, 1.6450 nats (PPL 5.181, 2 seeds). Next is pre, 0.0650 nats above;")
    alone = findings({POST: {1e-3: [1.60]}, SIAMESE: {1e-3: [1.40, 1.65, 1.64]}})
    assert "Next is post, 0.2000 nats above on seed 0;" in told(alone, "Lowest held-out loss")


def test_the_first_two_are_in_the_order_of_the_seeds_they_share() -> None:
    found = findings({PRE: {1e-3: [1.40, 1.70, 1.72]}, POST: {1e-3: [1.60]}, SIAMESE: {1e-3: [1.41, 1.60, 1.61]}})
    assert [choice.method for choice in found.ranked()] == [SIAMESE, PRE, POST]
    assert "Next is pre, 0.1050 nats above;" in told(found, "Lowest held-out loss")


def test_outcomes_at_a_rate_are_over_the_same_seeds() -> None:
    found = findings({PRE: {1e-3: [1.5, 1.3, NAN]}, POST: {1e-3: [1.4], 2e-3: [1.6, 1.7]}})
    seeds = {(of.name, rate): [run.seed for run in each.runs] for (rate, of), each in found.outcomes.items()}
    assert seeds == {("pre", 1e-3): [0], ("post", 1e-3): [0], ("post", 2e-3): [0, 1]}
    assert told(found, "Diverged") == "pre at 1e-3 (1 of 3 seeds)."
    assert told(found, "Stable at every rate") == "post."
    assert "every method has finished at that rate" in told(found, "Seeds")


def test_sensitivity_is_the_mean_excess_over_the_grid_capped_at_the_unigram_entropy() -> None:
    found = findings(
        {
            PRE: {1e-3: [1.6], 2e-3: [1.5], 4e-3: [1.7]},
            POST: {1e-3: [1.6], 2e-3: [NAN], 4e-3: [NAN]},
            SIAMESE: {1e-3: [1.6], 2e-3: [1.5]},
        }
    )
    assert found.sensitivities == {PRE: pytest.approx(0.1), POST: pytest.approx((0.0 + 1.4 + 1.4) / 3)}


def test_outcomes_hold_the_worst_verdict_and_the_seeds_that_survived() -> None:
    outcome = findings({POST: {1e-3: [1.4, NAN, 1.6]}}).outcomes[1e-3, POST]
    assert (outcome.verdict, outcome.with_verdict, outcome.all_diverged) == ("diverged", 1, False)
    assert outcome.held_out_loss is not None and outcome.held_out_loss.count == 2
    assert outcome.held_out_perplexity is not None
    assert outcome.held_out_perplexity.mean == pytest.approx((math.exp(1.4) + math.exp(1.6)) / 2)
    assert outcome.median(lambda run: run.seed) == 1
