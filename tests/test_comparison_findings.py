"""What is concluded from known results: choice of the rate, pairing, correction, edges, controls, sensitivity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtrit

from comparison_sweeps import template
from siamesenorm.comparison.comparison_report import conclusions, definitions
from siamesenorm.comparison.experiment_plan import ComparisonKind, ExperimentPlan, Part, PlannedComparison, PlannedRun
from siamesenorm.comparison.findings import Conclusion, Edge, Findings, find, steps_to_final_loss
from siamesenorm.comparison.results import Curve, ExperimentResults, RunResult
from siamesenorm.comparison.sweep_grid import comparisons_of
from siamesenorm.tasks.language import LanguageTask
from siamesenorm.training.verdict import judge

Losses = Mapping[float, Sequence[float | None]]
"""Held-out loss by rate and seed 0, 1, ...: None is not run, NaN diverged, above 2.9 not learned."""

FACTS = {"metrics": [metric.to_json() for metric in LanguageTask.metrics], "floor": 3.0, "unit": "nats", "batch": 4}


def result(method: str, rate: float, seed: int, loss: float) -> RunResult:
    diverged = math.isnan(loss)
    training = [1.3] * 20 + [2.4] * 20 if diverged else [loss] * 40
    held_out = 1.2 if diverged else loss  # lower than any other, and of no consequence
    trace = Curve(steps=np.arange(1.0, 41.0), values=np.array(training))
    records = [
        {"kind": "model", "steps": 40, "warmup_steps": 0, "floor": 3.0, "scale": 1.0},
        *({"kind": "train", "step": step, "loss": value} for step, value in enumerate(training, start=1)),
        {"kind": "validation", "step": 40, "loss": held_out},
    ]
    part = Part.SELECTION if seed == 0 else Part.REPORT
    return RunResult(
        path=Path(f"{method}-{rate}-{seed}"),
        identity="",
        method=method, learning_rate=rate, seed=seed, part=part, label=method,
        status="finished", verdict=judge(records), train_loss=loss,
        held_out={"loss": held_out, "perplexity": math.exp(held_out)}, first_held_out={}, held_out_step=40, steps=40,
        steps_done=40, step_seconds=0.1, peak_memory_bytes=2**20, losses=trace, gradient_norms=trace,
        facts={**FACTS, "attention_norm": "qkv-head" if method in (CONTROL, SIAMESE) else "qk"},
        config={"task": {"model": {}}, "batch": 4}, environments=(),
    )  # fmt: skip


def findings(
    results: Mapping[str, Losses], comparisons: Sequence[PlannedComparison] | None = None, **absent: PlannedRun
) -> Findings:
    runs = [
        result(of, rate, seed, loss)
        for of, by_rate in results.items()
        for rate, losses in by_rate.items()
        for seed, loss in enumerate(losses)
        if loss is not None
    ]
    if comparisons is None:
        comparisons = [
            PlannedComparison(method=of, baseline=PRE, kind=ComparisonKind.TOPOLOGY)
            for of in results
            if of != PRE and PRE in results
        ]
    plan = ExperimentPlan(runs={run.path.name: run for run in runs} | absent, comparisons=tuple(comparisons), jobs=1)
    return find(ExperimentResults(path=Path("s"), plan=plan, runs=tuple(runs)))


PRE, CONTROL, POST, SIAMESE = "pre", "pre + qkv", "post", "siamese"
NAN = math.nan


def text_of(of: Findings, topic: str) -> str:
    return " ".join(each.text for each in [*conclusions(of), *definitions(of)] if each.topic == topic)


def test_the_rate_is_chosen_on_the_selection_seed_and_reported_on_the_others() -> None:
    found = findings({PRE: {1e-3: [1.50, 1.40, 1.42], 2e-3: [1.45, 1.60, 1.64], 4e-3: [1.55, 1.30, 1.30]}})
    choice = found.choices[PRE]
    assert (choice.learning_rate, choice.edge, choice.on_selection_seed) == (2e-3, None, False)
    assert choice.losses == {1: 1.60, 2: 1.64}
    assert choice.held_out_loss is not None
    assert choice.held_out_loss.mean == pytest.approx(1.62)
    assert choice.held_out_loss.half_width == pytest.approx(12.706 * 0.02, rel=1e-4)


@pytest.mark.parametrize(
    ("losses", "chosen", "edge"),
    [
        ({1e-3: [1.4], 2e-3: [1.5], 4e-3: [1.6]}, 1e-3, Edge.LOW),
        ({1e-3: [1.6], 2e-3: [1.5], 4e-3: [1.4]}, 4e-3, Edge.HIGH),
        ({1e-3: [1.6], 2e-3: [1.5], 4e-3: [NAN]}, 2e-3, None),
        ({1e-3: [1.6], 2e-3: [NAN], 4e-3: [NAN]}, 1e-3, Edge.LOW),
        ({1e-3: [1.6], 2e-3: [1.5], 4e-3: [None]}, 2e-3, Edge.HIGH),
        ({1e-3: [1.6]}, 1e-3, Edge.ONLY),
    ],
)
def test_a_best_rate_at_the_edge_of_what_was_tried_is_flagged(losses: Losses, chosen: float, edge: str | None) -> None:
    found = findings({PRE: losses})
    assert (found.choices[PRE].learning_rate, found.choices[PRE].edge) == (chosen, edge)
    assert bool(text_of(found, "Edge of the grid")) == (edge is not None)


def test_a_diverged_run_is_never_chosen_however_low_its_loss() -> None:
    found = findings({PRE: {1e-3: [1.5], 2e-3: [NAN]}, POST: {1e-3: [NAN], 2e-3: [NAN]}})
    assert found.choices.keys() == {PRE}
    assert text_of(found, "Diverged") == "pre at 2e-3; post at 1e-3 and 2e-3."
    assert not text_of(found, "Stable at every rate")


def test_a_clear_difference_is_confirmed_and_a_vague_one_is_not() -> None:
    found = findings(
        {
            PRE: {1e-3: [1.50, 1.500, 1.520, 1.480, 1.510]},
            POST: {1e-3: [1.50, 1.490, 1.560, 1.460, 1.520]},
            SIAMESE: {1e-3: [1.40, 1.400, 1.421, 1.382, 1.409]},
            "deepnorm": {1e-3: [1.60, 1.600, 1.621, 1.582, 1.609]},
        }
    )
    by_method = {comparison.method: comparison for comparison in found.comparisons}
    assert [by_method[name].conclusion for name in ("post", "siamese", "deepnorm")] == [
        Conclusion.NOT_CONFIRMED, Conclusion.CONFIRMED_LOWER, Conclusion.CONFIRMED_HIGHER,
    ]  # fmt: skip
    assert by_method["siamese"].difference.by_seed == pytest.approx({1: -0.1, 2: -0.099, 3: -0.098, 4: -0.101})
    assert "siamese against pre −0.0995 nats" in text_of(found, "Confirmed")
    assert text_of(found, "Not confirmed") == "post against pre +0.0050 nats (the Holm intervals include zero)."
    lowest = text_of(found, "Lowest held-out loss")
    assert lowest.startswith("siamese at 1e-3, 1.4030 nats (PPL 4.068, 4 seeds). Next is pre, 0.0995 nats above")
    assert lowest.endswith("; the difference is confirmed.")


def test_pairing_removes_what_seeds_have_in_common() -> None:
    seeds = [1.0, 1.2, 1.6, 0.9, 2.0]
    found = findings(
        {PRE: {1e-3: seeds}, SIAMESE: {1e-3: [seed - 0.01 - 0.001 * (i % 2) for i, seed in enumerate(seeds)]}}
    )
    assert found.comparisons[0].conclusion == Conclusion.CONFIRMED_LOWER
    spread = found.choices[SIAMESE].held_out_loss
    assert spread is not None and spread.half_width is not None and spread.half_width > 0.5


def quantile(confidence: float) -> float:
    """Return the factor of a two-sided interval over three seeds."""
    return float(stdtrit(2, (1 + confidence) / 2))


def test_the_corrected_interval_is_wider_with_more_tests() -> None:
    losses = [1.5, 1.50, 1.52, 1.51]
    lower = [loss - 0.1 + 0.01 * math.sin(index) for index, loss in enumerate(losses)]
    alone = findings({PRE: {1e-3: losses}, SIAMESE: {1e-3: lower}})
    crowd = findings({PRE: {1e-3: losses}, SIAMESE: {1e-3: lower}} | {f"m{i}": {1e-3: losses} for i in range(4)})
    widths = []
    for found in (alone, crowd):
        (comparison,) = (each for each in found.comparisons if each.method == SIAMESE)
        assert comparison.corrected is not None and comparison.interval is not None
        widths.append(comparison.corrected.half_width)
        assert comparison.interval.half_width == pytest.approx(
            quantile(0.95) * np.std(list(comparison.difference.by_seed.values()), ddof=1) / math.sqrt(3)
        ), "the printed 95 % interval is the t interval, whatever the number of tests"
    assert widths[1] / widths[0] == pytest.approx(quantile(0.99) / quantile(0.95))


def test_one_seed_gives_a_difference_without_an_interval() -> None:
    found = findings({PRE: {1e-3: [1.5]}, SIAMESE: {1e-3: [1.4]}})
    comparison = found.comparisons[0]
    assert (comparison.conclusion, comparison.decision) == (Conclusion.ONE_SEED, None)
    assert comparison.interval is not None and comparison.interval.mean == pytest.approx(-0.1)
    assert comparison.interval.half_width is None
    assert found.choices[SIAMESE].on_selection_seed
    assert text_of(found, "Confirmed").startswith("Nothing: no two methods share two seeds")
    assert "one seed, which also chose the rate" in text_of(found, "Lowest held-out loss")


def test_a_method_with_the_selection_seed_alone_is_compared_on_that_seed() -> None:
    found = findings({PRE: {1e-3: [1.50, 1.6, 1.7]}, POST: {1e-3: [1.45]}})
    assert found.comparisons[0].difference.by_seed == pytest.approx({0: -0.05})


def test_a_seed_that_diverged_forbids_a_confirmation() -> None:
    found = findings({PRE: {1e-3: [1.5, 1.50, 1.52, 1.51]}, POST: {1e-3: [1.3, 1.30, 1.321, NAN]}})
    assert found.comparisons[0].conclusion == Conclusion.SOME_DIVERGED
    assert text_of(found, "Lowest held-out loss").startswith("pre at 1e-3"), "a method cannot gain by failing"
    assert found.choices[POST].count("diverged") == 1
    assert text_of(found, "Diverged") == "post at 1e-3 (1 of 4 seeds)."
    lost = findings({PRE: {1e-3: [1.5, 1.5]}, POST: {1e-3: [1.3, NAN]}})
    assert lost.comparisons[0].conclusion == Conclusion.NOT_COMPARABLE


def test_the_plan_names_the_baselines_and_nothing_else_is_compared() -> None:
    losses: Losses = {1e-3: [1.5, 1.5]}
    planned = [
        PlannedComparison(method=SIAMESE, baseline=CONTROL, kind=ComparisonKind.CONTROL),
        PlannedComparison(method=SIAMESE, baseline="absent", kind=ComparisonKind.TOPOLOGY),
    ]
    found = findings({PRE: losses, CONTROL: losses, POST: losses, SIAMESE: losses}, planned)
    assert [(each.method, each.baseline) for each in found.comparisons] == [(SIAMESE, CONTROL)]
    assert not text_of(found, "Control row missing")
    without = findings({PRE: losses, SIAMESE: losses})
    assert SIAMESE in text_of(without, "Control row missing")
    assert text_of(findings({PRE: losses, "deepnorm": losses}, []), "Without baseline")


def planned_pairs(*methods: str) -> dict[tuple[str, str], ComparisonKind]:
    return {(each.method, each.baseline): each.kind for each in comparisons_of(methods, template())}


def test_topologies_operators_and_ablations_have_baselines_that_differ_in_one_thing() -> None:
    kind = ComparisonKind
    assert planned_pairs("pre", "pre + qkv", "post", "siamese") == {
        ("pre + qkv", "pre"): kind.ABLATION,
        ("post", "pre"): kind.TOPOLOGY,
        ("siamese", "pre"): kind.TOPOLOGY,
        ("siamese", "pre + qkv"): kind.CONTROL,
    }
    assert planned_pairs("pre", "pre + seednorm") == {("pre + seednorm", "pre"): kind.OPERATOR}
    option = "siamese:depth_scale=none"
    assert planned_pairs("siamese", option) == {(option, "siamese"): kind.ABLATION}
    assert planned_pairs("pre", "pre + seednorm", "pre + qkv + seednorm", "siamese", "siamese + seednorm") == {
        ("pre + seednorm", "pre"): kind.OPERATOR,
        ("pre + qkv + seednorm", "pre + seednorm"): kind.ABLATION,
        ("siamese", "pre"): kind.TOPOLOGY,
        ("siamese + seednorm", "pre + seednorm"): kind.TOPOLOGY,
        ("siamese + seednorm", "pre + qkv + seednorm"): kind.CONTROL,
        ("siamese + seednorm", "siamese"): kind.OPERATOR,
    }
    assert planned_pairs("siamese + seednorm", "pre") == {}, "two things differ"


def test_methods_are_ranked_on_the_seeds_they_share() -> None:
    """The further seeds are harder: their mean may not stand against a loss of the selection seed."""
    found = findings({PRE: {1e-3: [1.50, 1.70, 1.72]}, POST: {1e-3: [1.60]}, SIAMESE: {1e-3: [1.40, 1.65, 1.64]}})
    assert [choice.method for choice in found.ranked()] == [SIAMESE, PRE, POST]
    assert not found.same_seeds
    lowest = text_of(found, "Lowest held-out loss")
    assert lowest.startswith("siamese at 1e-3, 1.6450 nats (PPL 5.181, 2 seeds). Next is pre, 0.0650 nats above;")
    alone = findings({POST: {1e-3: [1.60]}, SIAMESE: {1e-3: [1.40, 1.65, 1.64]}})
    assert "Next is post, 0.2000 nats above on seed 0;" in text_of(alone, "Lowest held-out loss")


def test_the_first_two_are_in_the_order_of_the_seeds_they_share() -> None:
    found = findings({PRE: {1e-3: [1.40, 1.70, 1.72]}, POST: {1e-3: [1.60]}, SIAMESE: {1e-3: [1.41, 1.60, 1.61]}})
    assert [choice.method for choice in found.ranked()] == [SIAMESE, PRE, POST]
    assert "Next is pre, 0.1050 nats above;" in text_of(found, "Lowest held-out loss")


def test_outcomes_at_a_rate_are_over_the_same_seeds() -> None:
    found = findings({PRE: {1e-3: [1.5, 1.3, NAN]}, POST: {1e-3: [1.4], 2e-3: [1.6, 1.7]}})
    seeds = {(of, rate): [run.seed for run in each.runs] for (rate, of), each in found.outcomes.items()}
    assert seeds == {("pre", 1e-3): [0], ("post", 1e-3): [0], ("post", 2e-3): [0, 1]}
    assert text_of(found, "Diverged") == "pre at 1e-3 (1 of 3 seeds)."
    assert text_of(found, "Stable at every rate") == "post."
    assert "every method has finished at that rate" in text_of(found, "Seeds")


def test_sensitivity_counts_a_diverged_rate_as_nothing_learned() -> None:
    """Whatever the run's own last losses were: here they are low. Only the selection seed counts."""
    found = findings(
        {
            PRE: {1e-3: [1.6, 1.0], 2e-3: [1.5, 2.0], 4e-3: [1.7]},
            POST: {1e-3: [1.6], 2e-3: [NAN], 4e-3: [NAN]},
            SIAMESE: {1e-3: [1.6], 2e-3: [1.5]},
            "deepnorm": {1e-3: [NAN], 2e-3: [NAN], 4e-3: [NAN]},
        },
        absent=PlannedRun(method=SIAMESE, learning_rate=4e-3, seed=0, part=Part.SELECTION, label=SIAMESE),
    )
    assert found.sensitivities == {PRE: pytest.approx(0.1), POST: pytest.approx((0.0 + 1.4 + 1.4) / 3)}
    assert findings({PRE: {1e-3: [1.5]}}).sensitivities == {}, "a single rate says nothing"


def test_a_run_that_did_not_learn_keeps_its_number_and_its_word() -> None:
    found = findings({PRE: {1e-3: [1.5], 2e-3: [2.95]}, POST: {1e-3: [2.96], 2e-3: [2.97]}})
    lost = found.outcomes[2e-3, PRE]
    assert (lost.verdict, lost.all_diverged, lost.whole) == ("not learned", False, True)
    assert lost.held_out_loss is not None and lost.held_out_loss.mean == 2.95
    assert text_of(found, "Not learned") == "pre at 2e-3; post at 1e-3 and 2e-3."
    assert text_of(found, "Diverged") == "No finished run."
    assert not text_of(found, "Stable at every rate")
    assert found.choices[POST].learning_rate == 1e-3


def test_stable_at_every_rate_is_said_only_of_methods_whose_runs_have_all_ended() -> None:
    planned = PlannedRun(method=PRE, learning_rate=4e-3, seed=0, part=Part.SELECTION, label=PRE)
    found = findings({PRE: {1e-3: [1.5], 2e-3: [1.6]}, POST: {1e-3: [1.5], 2e-3: [1.6], 4e-3: [1.7]}}, absent=planned)
    assert text_of(found, "Stable at every rate") == "post."
    further = dataclasses.replace(planned, learning_rate=1e-3, seed=1, part=Part.REPORT)
    assert not text_of(findings({PRE: {1e-3: [1.5]}}, absent=further), "Stable at every rate")
    fewer = findings({PRE: {1e-3: [1.5]}, POST: {1e-3: [1.5], 2e-3: [1.6]}})
    assert text_of(fewer, "Stable at every rate") == "post."


def test_outcomes_hold_the_worst_verdict_and_the_seeds_that_survived() -> None:
    outcome = findings({POST: {1e-3: [1.4, NAN, 1.6]}}).outcomes[1e-3, POST]
    assert (outcome.verdict, outcome.count("diverged"), outcome.all_diverged) == ("diverged", 1, False)
    assert outcome.held_out_loss is not None and outcome.held_out_loss.count == 2
    perplexity = outcome.metric("perplexity")
    assert perplexity is not None and perplexity.mean == pytest.approx((math.exp(1.4) + math.exp(1.6)) / 2)
    assert outcome.median(lambda run: run.seed) == 1
    assert findings({POST: {1e-3: [2.95, NAN]}}).outcomes[1e-3, POST].verdict == "diverged"


def falling(method: str, seed: int, start: float) -> RunResult:
    """Return a run whose training loss falls by 0.01 a step, from `start`."""
    values = start - 0.01 * np.arange(1.0, 41.0)
    run = result(method, 1e-3, seed, 1.5)
    curve = Curve(steps=np.arange(1.0, 41.0), values=values)
    return dataclasses.replace(run, losses=curve, train_loss=float(values[-4:].mean()))


def test_steps_to_the_final_loss_of_the_baseline_are_counted_by_seed() -> None:
    base = [falling(PRE, seed, start) for seed, start in ((1, 2.0), (2, 2.1), (3, 2.2))]
    ahead = [falling(POST, seed, start) for seed, start in ((1, 1.9), (2, 2.05), (3, 2.5), (4, 0.0))]
    assert steps_to_final_loss(ahead[:1], base) == pytest.approx(31, abs=1), "0.1 ahead is 10 of 40 steps"
    assert steps_to_final_loss(ahead[2:3], base) == math.inf
    assert steps_to_final_loss(ahead, base) == steps_to_final_loss(ahead[1:2], base) == pytest.approx(36, abs=1)
    assert steps_to_final_loss(ahead[3:], base) is None, "the baseline has no run of this seed"


def test_no_step_counts_after_a_loss_that_is_not_finite() -> None:
    run = falling(PRE, 1, 2.0)
    run.losses.values[10] = NAN
    assert list(run.trailing_losses) == [4, 5, 6, 7, 8, 9, 10]
    assert run.trailing_losses[10] == pytest.approx(run.losses.values[6:10].mean())
