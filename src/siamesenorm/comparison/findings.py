"""What a sweep shows: outcomes by rate, the rate each method is reported at, and what is confirmed against whom.

The rate of a method is chosen on the selection seed and its result reported on the other seeds, so that the
choice does not flatter the result. Differences are paired by seed and corrected together (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, SPIKED, STABLE, Method, RunResult, SweepResults
from siamesenorm.comparison.statistics import (
    Estimate,
    HolmDecision,
    PairedDifference,
    holm,
    paired_difference,
    t_interval,
)
from siamesenorm.training.stability import learning_rate_sensitivity

CONFIRMED_LOWER, CONFIRMED_HIGHER, NOT_CONFIRMED = "confirmed lower", "confirmed higher", "not confirmed"
ONE_SEED, SOME_DIVERGED, NOT_COMPARABLE = "one seed, no interval", "diverged on a seed", "nothing to compare"
LOW_EDGE, HIGH_EDGE, ONLY_RATE = "low edge", "high edge", "only rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one method did at one learning rate, over its seeds."""

    method: Method
    learning_rate: float
    runs: tuple[RunResult, ...]

    @property
    def complete(self) -> tuple[RunResult, ...]:
        """The runs that have ended."""
        return tuple(run for run in self.runs if run.complete)

    @property
    def verdict(self) -> str | None:
        """The worst verdict of its complete runs."""
        words = {run.word for run in self.complete}
        return next((word for word in (DIVERGED, NOT_LEARNED, SPIKED, STABLE) if word in words), None)

    @property
    def with_verdict(self) -> int:
        """How many complete runs have that worst verdict."""
        return sum(run.word == self.verdict for run in self.complete)

    @property
    def all_diverged(self) -> bool:
        """Whether every complete run diverged, so that there is no result to print."""
        return bool(self.complete) and all(run.diverged for run in self.complete)

    @property
    def whole(self) -> bool:
        """Whether every complete run has a result, so that its mean may be the lowest of those beside it."""
        return bool(self.complete) and all(run.converged for run in self.complete)

    @property
    def held_out_loss(self) -> Estimate | None:
        """The held-out loss in nats over the seeds that did not diverge."""
        return self._estimate(lambda run: run.held_out_loss)

    @property
    def held_out_perplexity(self) -> Estimate | None:
        """The held-out perplexity over the seeds that did not diverge."""
        return self._estimate(lambda run: run.held_out_perplexity)

    @property
    def train_perplexity(self) -> Estimate | None:
        """The training perplexity over the seeds that did not diverge."""
        return self._estimate(lambda run: run.train_perplexity)

    def median(self, quantity: Callable[[RunResult], float | None]) -> float | None:
        """Return the median of a quantity over the complete runs that have it."""
        values = sorted(value for run in self.complete if (value := quantity(run)) is not None)
        middle = len(values) // 2
        if not values:
            return None
        return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2

    def _estimate(self, quantity: Callable[[RunResult], float | None]) -> Estimate | None:
        values = [value for run in self.complete if run.converged and (value := quantity(run)) is not None]
        return t_interval(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The learning rate that the selection seed chose for a method, and the runs it is reported on."""

    method: Method
    learning_rate: float
    edge: str | None
    selection: RunResult
    reported: tuple[RunResult, ...]

    @property
    def on_selection_seed(self) -> bool:
        """Whether there is no other seed, so that the result is the very one that chose the rate."""
        return self.reported == (self.selection,)

    @property
    def diverged(self) -> int:
        """How many of the reported runs diverged."""
        return sum(run.diverged for run in self.reported)

    @property
    def outcome(self) -> Outcome:
        """The reported runs as an outcome."""
        return Outcome(method=self.method, learning_rate=self.learning_rate, runs=self.reported)

    @property
    def losses(self) -> dict[int, float]:
        """The held-out loss by seed of the reported runs that did not diverge."""
        return {run.seed: run.score for run in self.reported if run.converged}

    def mean_over(self, seeds: Collection[int]) -> float:
        """Return the mean held-out loss over some of those seeds; over none, the loss of the selection seed."""
        return math.fsum(self.losses[seed] for seed in seeds) / len(seeds) if seeds else self.selection.score


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A method against a baseline, each at its chosen rate: the paired difference in held-out loss (nats).

    `diverged` says that a reported seed of one of them did; the others then prove nothing.
    """

    method: Method
    baseline: Method
    difference: PairedDifference
    diverged: bool
    decision: HolmDecision | None = None

    @property
    def testable(self) -> bool:
        """Whether there is an interval at all, and no seed was lost to divergence."""
        return self.difference.p_value is not None and not self.diverged

    @property
    def interval(self) -> Estimate | None:
        """The mean difference with its Holm-corrected interval, where it could be tested."""
        if not self.difference.by_seed:
            return None
        return self.difference.interval(self.decision.confidence) if self.decision else self.difference.estimate

    @property
    def conclusion(self) -> str:
        """What the corrected interval allows to say."""
        if not self.difference.by_seed:
            return NOT_COMPARABLE
        if self.diverged:
            return SOME_DIVERGED
        if self.decision is None:
            return ONE_SEED
        if not self.decision.rejected:
            return NOT_CONFIRMED
        return CONFIRMED_LOWER if self.difference.estimate.mean < 0 else CONFIRMED_HIGHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything a report says of a sweep, derived once.

    The outcomes of one rate are all over the same seeds: those that every method has finished there.
    """

    sweep: SweepResults
    outcomes: Mapping[tuple[float, Method], Outcome]
    choices: Mapping[Method, Choice]
    comparisons: tuple[Comparison, ...]
    sensitivities: Mapping[Method, float]

    def comparison(self, method: Method, baseline: Method | None) -> Comparison | None:
        """Return the comparison of two methods, if it is one of those made."""
        return next((c for c in self.comparisons if (c.method, c.baseline) == (method, baseline)), None)

    def ranked(self) -> list[Choice]:
        """Return the choices that have a result, lowest held-out loss first, on the seeds that all of them share.

        The selection seed stands in where they share none; the first two are in the order of the seeds the two share.
        """
        with_result = [choice for choice in self.choices.values() if choice.losses]
        shared = set.intersection(*(set(choice.losses) for choice in with_result)) if with_result else set()
        ranked = sorted(with_result, key=lambda choice: choice.mean_over(shared))
        if len(ranked) > 1 and paired(ranked[0], ranked[1]).estimate.mean > 0:
            ranked[:2] = ranked[1::-1]
        return ranked

    @property
    def same_seeds(self) -> bool:
        """Whether all methods that have a result have it on the same seeds."""
        return len({frozenset(choice.losses) for choice in self.choices.values() if choice.losses}) <= 1


def find(sweep: SweepResults) -> Findings:
    """Derive the findings of a sweep."""
    seeds = {rate: _seeds_at(sweep, rate) for rate in sweep.learning_rates}
    outcomes = {
        (rate, method): Outcome(
            method=method, learning_rate=rate, runs=tuple(run for run in runs if run.seed in seeds[rate])
        )
        for rate in sweep.learning_rates
        for method in sweep.methods
        if (runs := [r for r in sweep.runs if r.method == method and r.learning_rate == rate])
    }
    choices = {method: choice for method in sweep.methods if (choice := choose_learning_rate(sweep, method))}
    return Findings(
        sweep=sweep,
        outcomes=outcomes,
        choices=choices,
        comparisons=_compare_all(sweep.methods, choices),
        sensitivities={m: value for m in sweep.methods if (value := _sensitivity(sweep, m)) is not None},
    )


def _seeds_at(sweep: SweepResults, rate: float) -> set[int]:
    """Return the seeds that every method with a finished run at a rate has finished; the selection seed if none."""
    finished: dict[Method, set[int]] = {}
    for run in sweep.runs:
        if run.learning_rate == rate and run.complete:
            finished.setdefault(run.method, set()).add(run.seed)
    shared = set.intersection(*finished.values()) if finished else set()
    return shared or {sweep.selection_seed}


def choose_learning_rate(sweep: SweepResults, method: Method) -> Choice | None:
    """Return the rate with the lowest held-out loss among the selection seed's runs that did not diverge.

    None where that seed has no such run: the method diverged at every rate, or has not been run.
    """
    tried = [run for run in sweep.runs if run.method == method and run.seed == sweep.selection_seed and run.complete]
    converged = [run for run in tried if run.converged]
    if not converged:
        return None
    best = min(converged, key=lambda run: run.score)
    others = tuple(
        run
        for run in sweep.runs
        if run.method == method
        and run.learning_rate == best.learning_rate
        and run.seed != sweep.selection_seed
        and run.complete
    )
    return Choice(
        method=method,
        learning_rate=best.learning_rate,
        edge=_edge(best.learning_rate, [run.learning_rate for run in tried]),
        selection=best,
        reported=others or (best,),
    )


def baseline_of(method: Method, methods: Sequence[Method]) -> Method | None:
    """Return the Pre-Norm of the same norm, without QKV-norm, that is configured most like the method."""
    return _most_alike(method, [m for m in methods if m.topology == "pre" and not m.normalises_values])


def control_of(method: Method, methods: Sequence[Method]) -> Method | None:
    """Return the Pre-Norm of the same norm, with QKV-norm, that is configured most like a method that has it."""
    if not method.normalises_values:
        return None
    return _most_alike(method, [m for m in methods if m.topology == "pre" and m.normalises_values])


def lacks_control(methods: Sequence[Method]) -> list[Method]:
    """Return the methods with QKV-norm where no `pre` of the same norm with QKV-norm was run beside them."""
    return [m for m in methods if m.normalises_values and control_of(m, methods) is None]


def paired(choice: Choice, other: Choice) -> PairedDifference:
    """Pair the reported seeds of two methods, or, where they have none in common, the runs that chose the rates."""
    difference = paired_difference(choice.losses, other.losses)
    if difference.by_seed:
        return difference
    return PairedDifference(by_seed={choice.selection.seed: choice.selection.score - other.selection.score})


def _sensitivity(sweep: SweepResults, method: Method) -> float | None:
    """Return the mean excess loss over the grid on the selection seed; None where a rate has not been run."""
    runs = [run for run in sweep.runs if run.method == method and run.seed == sweep.selection_seed and run.complete]
    losses = {run.learning_rate: math.inf if run.diverged else run.score for run in runs}
    cap = next((run.unigram_entropy for run in runs if run.unigram_entropy is not None), None)
    if cap is None or losses.keys() != set(sweep.learning_rates):
        return None
    return learning_rate_sensitivity(losses, floor=cap)


def _most_alike(method: Method, candidates: Sequence[Method]) -> Method | None:
    own = _beyond_topology(method)
    of_same_norm = [other for other in candidates if _norm(other) == _norm(method)]
    return min(of_same_norm, key=lambda other: len(own ^ _beyond_topology(other)), default=None)


def _norm(method: Method) -> tuple[str, set[tuple[str, str]]]:
    return method.norm, {item for item in method.specification if item[0].startswith("norm.")}


def _beyond_topology(method: Method) -> set[tuple[str, str]]:
    return {item for item in method.specification if not item[0].startswith(("topology.", "attention_norm"))}


def _edge(chosen: float, tried: Sequence[float]) -> str | None:
    if len(set(tried)) == 1:
        return ONLY_RATE
    if chosen == min(tried):
        return LOW_EDGE
    return HIGH_EDGE if chosen == max(tried) else None


def _compare_all(methods: Sequence[Method], choices: Mapping[Method, Choice]) -> tuple[Comparison, ...]:
    """Compare every method with its reference and its control row, and correct all the tests together."""
    comparisons = []
    for method in methods:
        for baseline in (baseline_of(method, methods), control_of(method, methods)):
            if baseline is not None and baseline != method and {method, baseline} <= choices.keys():
                comparisons.append(_compare(choices[method], choices[baseline]))
    p_values = [p for each in comparisons if each.testable and (p := each.difference.p_value) is not None]
    decisions = iter(holm(p_values))
    return tuple(replace(each, decision=next(decisions)) if each.testable else each for each in comparisons)


def _compare(choice: Choice, baseline: Choice) -> Comparison:
    diverged = bool(choice.diverged or baseline.diverged)
    difference = paired_difference(choice.losses, baseline.losses) if diverged else paired(choice, baseline)
    return Comparison(method=choice.method, baseline=baseline.method, difference=difference, diverged=diverged)
