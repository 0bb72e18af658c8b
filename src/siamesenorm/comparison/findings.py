"""What an experiment shows: outcomes by rate, the rate each method is reported at, and which differences are confirmed.

The rate of a method is chosen on the runs of the part `selection` and its result reported on the others, so that the
choice does not flatter the result. Differences are paired by seed and corrected together (Holm).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Self

from siamesenorm.comparison import formatting
from siamesenorm.comparison.experiment_plan import ComparisonKind, Part, PlannedComparison
from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, SPIKED, STABLE, ExperimentResults, RunResult
from siamesenorm.comparison.statistics import (
    Estimate,
    HolmDecision,
    PairedDifference,
    holm,
    noise_band,
    paired_difference,
    rate_sensitivity,
    t_interval,
    time_to_target,
)

Quantity = Callable[[RunResult], float | None]


class Conclusion(StrEnum):
    """What the corrected interval of a difference allows to say."""

    CONFIRMED_LOWER = "confirmed lower"
    CONFIRMED_HIGHER = "confirmed higher"
    NOT_CONFIRMED = "not confirmed"
    ONE_SEED = "one seed, no interval"
    SOME_DIVERGED = "diverged on a seed"
    NOT_COMPARABLE = "nothing to compare"


class AgainstNoise(StrEnum):
    """Where a held-out loss is against the noise band of a baseline."""

    BELOW = "below noise"
    INSIDE = "inside noise"
    ABOVE = "above noise"


class Edge(StrEnum):
    """Where the chosen rate is among the rates that were tried, if not inside them."""

    LOW = "low edge"
    HIGH = "high edge"
    ONLY = "only rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of one method at one learning rate, over its seeds."""

    method: str
    learning_rate: float
    runs: tuple[RunResult, ...]

    @property
    def complete(self) -> tuple[RunResult, ...]:
        """The runs that have ended."""
        return tuple(run for run in self.runs if run.complete)

    @property
    def verdict(self) -> str | None:
        """The worst verdict of its complete runs."""
        return next((word for word in (DIVERGED, NOT_LEARNED, SPIKED, STABLE) if self.count(word)), None)

    def count(self, verdict: str | None) -> int:
        """Return how many complete runs have a verdict."""
        return sum(run.word == verdict for run in self.complete)

    @property
    def diverged(self) -> bool:
        """Whether a complete run diverged."""
        return self.verdict == DIVERGED

    @property
    def all_diverged(self) -> bool:
        """Whether every complete run diverged, so that there is no result to print."""
        return self.diverged and self.count(DIVERGED) == len(self.complete)

    @property
    def whole(self) -> bool:
        """Whether every complete run has a result, so that its mean may be the best of those beside it."""
        return bool(self.complete) and all(run.has_result for run in self.complete)

    @property
    def losses(self) -> dict[int, float]:
        """The held-out loss by seed of the runs that did not diverge."""
        return {run.seed: run.score for run in self.runs if run.has_result}

    @property
    def held_out_loss(self) -> Estimate | None:
        """The held-out loss over the seeds that did not diverge."""
        return self.metric("loss")

    @property
    def description(self) -> str:
        """Method, learning rate, verdict and held-out loss in words."""
        loss = self.held_out_loss
        reached = f", held-out loss {loss.mean:.3f}" if loss and not self.diverged else ""
        return f"{self.method} at {formatting.rate(self.learning_rate)}: {self.verdict or 'unfinished'}{reached}"

    def metric(self, name: str) -> Estimate | None:
        """Return a metric on held-out data over the seeds that did not diverge."""
        return self.estimate(lambda run: run.held_out.get(name))

    def estimate(self, quantity: Quantity) -> Estimate | None:
        """Return a quantity with its t interval over the seeds that did not diverge."""
        values = [value for run in self.complete if run.has_result and (value := quantity(run)) is not None]
        return t_interval(values) if values else None

    def median(self, quantity: Quantity) -> float | None:
        """Return the median of a quantity over the complete runs that have it."""
        values = [value for run in self.complete if (value := quantity(run)) is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Outcome):
    """The learning rate that the selection runs chose for a method; `runs` are those it is reported on."""

    edge: Edge | None
    selection: RunResult

    @property
    def on_selection_seed(self) -> bool:
        """Whether there is no other run, so that the result is the very one that chose the rate."""
        return self.runs == (self.selection,)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseBand:
    """The held-out losses between which one more seed of a baseline falls, at the rate chosen for it."""

    baseline: str
    low: float
    high: float

    @classmethod
    def of(cls, choice: Choice) -> Self | None:
        """Return the band of a baseline at its chosen rate; None for fewer than two seeds."""
        band = noise_band(list(choice.losses.values()))
        return None if band is None else cls(baseline=choice.method, low=band[0], high=band[1])

    def place(self, loss: float) -> AgainstNoise:
        """Return where a loss is against the band."""
        if loss < self.low:
            return AgainstNoise.BELOW
        return AgainstNoise.ABOVE if loss > self.high else AgainstNoise.INSIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(PlannedComparison):
    """The difference in held-out loss between a method and its baseline, paired by seed.

    `diverged` says that a seed of one of them did: the others alone prove nothing. `interval` is the t interval at
    95 %, `corrected` the one widened by Holm's procedure, which decides whether a difference is confirmed.
    `steps_to_baseline` is the median over seeds of the step at which the method's training loss was as low as the
    baseline's at its end, infinite where it never was (`steps_to_final_loss`); of trainings from the start alone.
    """

    learning_rate: float
    difference: PairedDifference
    diverged: bool
    steps_to_baseline: float | None = None
    decision: HolmDecision | None = None

    @property
    def interval(self) -> Estimate | None:
        """The mean difference with its t interval at 95 %; None where no seed can be paired."""
        return self.difference.interval() if self.difference.by_seed else None

    @property
    def corrected(self) -> Estimate | None:
        """The mean difference with its interval at the confidence of Holm's procedure; None where it was not tested."""
        return self.difference.interval(self.decision.confidence) if self.decision else None

    @property
    def conclusion(self) -> Conclusion:
        """What the corrected interval allows to say."""
        if not self.difference.by_seed:
            return Conclusion.NOT_COMPARABLE
        if self.diverged:
            return Conclusion.SOME_DIVERGED
        if self.decision is None:
            return Conclusion.ONE_SEED
        if not self.decision.rejected:
            return Conclusion.NOT_CONFIRMED
        lower = self.difference.interval().mean < 0
        return Conclusion.CONFIRMED_LOWER if lower else Conclusion.CONFIRMED_HIGHER

    @property
    def confirmed(self) -> bool:
        """Whether the corrected interval excludes zero."""
        return self.conclusion in (Conclusion.CONFIRMED_LOWER, Conclusion.CONFIRMED_HIGHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything a report says of an experiment that chooses learning rates, derived once.

    The outcomes of one rate are all over the same seeds: those that every method has finished there.
    """

    results: ExperimentResults
    outcomes: Mapping[tuple[float, str], Outcome]
    choices: Mapping[str, Choice]
    comparisons: tuple[Comparison, ...]
    sensitivities: Mapping[str, float]

    def at(self, rate: float) -> list[Outcome]:
        """Return the outcomes at a learning rate."""
        return [outcome for (at, _), outcome in self.outcomes.items() if at == rate]

    def is_best(self, outcome: Outcome, quantity: Quantity, *, lowest: bool = True) -> bool:
        """Return whether its mean is the best at its rate of those whose runs all have a result."""
        beside = [each for each in self.at(outcome.learning_rate) if each.whole]
        means = [value.mean for each in beside if (value := each.estimate(quantity))]
        own = outcome.estimate(quantity)
        return outcome.whole and own is not None and own.mean == (min if lowest else max)(means)

    def ranked(self) -> list[Choice]:
        """Return the choices with a result on every seed, lowest loss first; if there are none, those with some result.

        The loss is `shared_loss`; the first two are in the order of the seeds that the two share.
        """
        ranked = sorted(self._comparable, key=self.shared_loss)
        if len(ranked) > 1 and paired(ranked[0], ranked[1]).interval().mean > 0:
            ranked[0], ranked[1] = ranked[1], ranked[0]
        return ranked

    @property
    def _comparable(self) -> list[Choice]:
        some = [choice for choice in self.choices.values() if choice.losses]
        return [choice for choice in some if choice.whole] or some

    @property
    def shared_seeds(self) -> set[int]:
        """The reported seeds on which every ranked choice has a result."""
        return set.intersection(*(set(choice.losses) for choice in self._comparable)) if self._comparable else set()

    def shared_loss(self, choice: Choice) -> float:
        """Return the mean held-out loss of a ranked choice over the shared seeds; without any, of the selection."""
        return statistics.fmean([choice.losses[seed] for seed in self.shared_seeds] or [choice.selection.score])

    @property
    def noise(self) -> NoiseBand | None:
        """The noise band of the plan's first baseline that has a result on two seeds; control rows do not count."""
        planned = self.results.plan.comparisons
        for method in dict.fromkeys(each.baseline for each in planned if each.kind is not ComparisonKind.CONTROL):
            choice = self.choices.get(method)
            if choice is not None and (band := NoiseBand.of(choice)):
                return band
        return None

    @property
    def same_seeds(self) -> bool:
        """Whether all methods that have a result have it on the same seeds."""
        return len({frozenset(choice.losses) for choice in self.choices.values() if choice.losses}) <= 1


def find(results: ExperimentResults) -> Findings:
    """Derive the findings of an experiment."""
    outcomes = {}
    for rate in results.learning_rates:
        at_rate = [run for run in results.runs if run.learning_rate == rate]
        seeds = _common_seeds(at_rate) or set(results.plan.selection_seeds)
        for method in results.methods:
            if runs := [run for run in at_rate if run.method == method]:
                shown = tuple(run for run in runs if run.seed in seeds)
                outcomes[rate, method] = Outcome(method=method, learning_rate=rate, runs=shown)
    choices = {method: choice for method in results.methods if (choice := choose_learning_rate(results, method))}
    return Findings(
        results=results,
        outcomes=outcomes,
        choices=choices,
        comparisons=corrected_together(_comparisons(results, choices)),
        sensitivities={m: value for m in results.methods if (value := _sensitivity(results, m)) is not None},
    )


def choose_learning_rate(results: ExperimentResults, method: str) -> Choice | None:
    """Return the rate with the lowest held-out loss among the selection runs that did not diverge.

    None where there is no such run: the method diverged at every rate, or has not been run.
    """
    complete = [run for run in results.runs_of(method) if run.complete]
    tried = [run for run in complete if run.part is Part.SELECTION]
    best = min(tried, key=lambda run: run.score, default=None)
    if best is None or not best.has_result:
        return None
    rate = best.learning_rate
    others = tuple(run for run in complete if run.learning_rate == rate and run.part is not Part.SELECTION)
    edge = _edge(rate, {run.learning_rate for run in tried})
    return Choice(method=method, learning_rate=rate, runs=others or (best,), edge=edge, selection=best)


def diverged_at_every_rate(results: ExperimentResults, method: str) -> bool:
    """Whether a method has runs that ended, and all of them diverged."""
    complete = [run for run in results.runs_of(method) if run.complete]
    return bool(complete) and all(run.diverged for run in complete)


def compare(planned: PlannedComparison, method: Outcome, baseline: Outcome) -> Comparison:
    """Pair the seeds of a method and of its baseline; `corrected_together` adds the decision."""
    return Comparison(
        **asdict(planned),
        learning_rate=method.learning_rate,
        difference=paired_difference(method.losses, baseline.losses),
        diverged=method.diverged or baseline.diverged,
    )


def paired(choice: Choice, other: Choice) -> PairedDifference:
    """Pair the reported seeds of two methods, or, where they have none in common, the runs that chose the rates."""
    difference = paired_difference(choice.losses, other.losses)
    if difference.by_seed:
        return difference
    return PairedDifference(by_seed={choice.selection.seed: choice.selection.score - other.selection.score})


def steps_to_final_loss(runs: Iterable[RunResult], baseline: Iterable[RunResult]) -> float | None:
    """Return the median over seeds of the steps that runs need for the final training loss of a baseline's runs.

    Both losses are means over a tenth of the planned steps: of the baseline its last, of a run the tenth before a step.
    A run counts where the baseline has a result on its seed, infinite where it never gets there; None without any.
    """
    targets = {run.seed: run.train_loss for run in baseline if run.has_result and run.train_loss is not None}
    times = [
        time_to_target(run.trailing_losses, targets[run.seed]) for run in runs if run.complete and run.seed in targets
    ]
    return statistics.median(times) if times else None


def corrected_together(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons with the decisions of Holm's procedure over all that can be tested."""
    comparisons = tuple(comparisons)
    p_values = {
        index: p
        for index, each in enumerate(comparisons)
        if not each.diverged and (p := each.difference.p_value) is not None
    }
    decisions = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return tuple(replace(each, decision=decisions.get(index)) for index, each in enumerate(comparisons))


def _common_seeds(runs: Iterable[RunResult]) -> set[int]:
    """Return the seeds that every method with a finished run has finished."""
    finished: dict[str, set[int]] = {}
    for run in runs:
        if run.complete:
            finished.setdefault(run.method, set()).add(run.seed)
    return set.intersection(*finished.values()) if finished else set()


def _comparisons(results: ExperimentResults, choices: Mapping[str, Choice]) -> Iterator[Comparison]:
    """Yield the comparisons of the plan whose two methods have a result, each at its chosen rate."""
    for planned in results.plan.comparisons:
        if {planned.method, planned.baseline} <= choices.keys():
            choice, baseline = choices[planned.method], choices[planned.baseline]
            comparison, runs, base = compare(planned, choice, baseline), choice.runs, baseline.runs
            if not comparison.diverged and not comparison.difference.by_seed:
                comparison = replace(comparison, difference=paired(choice, baseline))
                runs, base = (choice.selection,), (baseline.selection,)
            yield replace(comparison, steps_to_baseline=steps_to_final_loss(runs, base))


def _sensitivity(results: ExperimentResults, method: str) -> float | None:
    """Return the mean excess loss over the rates of the selection; a diverged run counts as one that learned nothing.

    None where a rate has not been run, where only one was tried, where all diverged, and where one diverged and the
    loss of a model that has learned nothing is not known.
    """
    selection = [run for run in results.runs if run.part is Part.SELECTION and run.complete]
    planned = [run for run in results.plan.runs.values() if run.part is Part.SELECTION]
    # A method may have been tried outside the grid of all.
    grid = set.intersection(*({run.learning_rate for run in planned if run.method == m} for m in results.methods))
    losses = {run.learning_rate: run.score for run in selection if run.method == method and run.learning_rate in grid}
    floor = next((run.floor for run in selection if run.method == method and run.floor is not None), None)
    return rate_sensitivity(losses, floor=floor) if losses.keys() == grid else None


def _edge(chosen: float, tried: Collection[float]) -> Edge | None:
    if len(tried) == 1:
        return Edge.ONLY
    if chosen == min(tried):
        return Edge.LOW
    return Edge.HIGH if chosen == max(tried) else None
