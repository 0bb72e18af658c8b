"""Claims of the papers as declared comparisons, and what our runs say of each: a signed sum over paired seeds.

A claim is `sum_i c_i m(cell_i)` of a measure m, and the sign that the paper reports. Its interval is widened for all
claims of an item (Holm), those of the paper and our own hypotheses apart: it is confirmed where that excludes zero on
the paper's side, contradicted where on the other. Of a measure that is yes or no for each seed the seeds are counted: a
t interval of equal values would have no width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Any

import numpy as np

from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, Record, RunResult
from siamesenorm.comparison.statistics import Estimate, HolmDecision, PairedDifference, holm
from siamesenorm.evaluation.evaluation import NONE, RAW
from siamesenorm.evaluation.multiple_choice import MEAN, MultipleChoice
from siamesenorm.recipes.published_numbers import find_published


class ClaimOutcome(StrEnum):
    """What the runs say of a claim."""

    CONFIRMED = "confirmed"
    """The interval excludes zero in the published direction."""
    NOT_SEEN = "not seen at this scale"
    """The interval includes zero: a gap within noise."""
    TOO_FEW_SEEDS = "too few seeds"
    """Fewer than two seeds have what is measured: there is no interval."""
    CONTRADICTED = "contradicted"
    """The interval excludes zero in the other direction."""
    ON_EVERY_SEED = "seen on every seed"
    """Of yes or no: as published on each of at least two seeds."""
    ON_NO_SEED = "seen on no seed"
    """Of yes or no: on none of at least two seeds."""
    ON_SOME_SEEDS = "seen on some seeds"
    """Of yes or no: on some of them."""
    NO_RATE = "diverged at every rate"
    """A method of the claim has no rate at which it could be compared."""
    NOT_RUN = "not run"
    """A cell has no finished run, or none with what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number of one run: its label, its unit, its format, and the name of its published numbers."""

    label: str
    unit: str
    of: Callable[[RunResult], float | None]
    published: str = ""
    decimals: int = 4
    counts: bool = False
    """Whether it is yes or no for each seed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A method in a grid, at a position in the learning rates; None is the one rate, or the one that was chosen."""

    method: str
    grid: str = ""
    rate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperClaim:
    """A claim: its sentence, what is measured, the signed cells, and the sign of their sum in the paper.

    `published` names another published number than that of the measure, where the paper states the claim in it, with
    its unit and the factor on it that gives it the sign of the measure. Where that is itself a difference from a
    baseline (`REDUCTIONS`), the baseline has no row.
    """

    text: str
    measure: str
    terms: tuple[tuple[float, Cell], ...]
    sign: int
    published: tuple[str, str, float] | None = None
    own: bool = False
    """Whether no paper states it: a hypothesis of this project."""

    @property
    def statement(self) -> str:
        """The sentence, with whose it is where it is of no paper."""
        return f"hypothesis of this project: {self.text}" if self.own else self.text


OWN = (RAW, NONE)
"""Kinds of weights in records that are not of an average."""
REDUCTIONS = {"ppl_reduction": "pre"}
"""Published numbers that are differences from a method, with that method."""
Cells = Callable[[Cell], Mapping[int, RunResult] | None]
"""Returns the finished runs of a cell by seed; None where the method diverged at every rate from which to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedClaim:
    """A claim with the published effect, and ours by seed with the decision of Holm's procedure."""

    claim: PaperClaim
    effect: PairedDifference
    published: float | None
    published_verdicts: tuple[str, ...]
    decision: HolmDecision | None = None
    without_rate: bool = False
    """Whether a method of the claim diverged at every rate."""

    @property
    def counts(self) -> bool:
        """Whether what is measured is yes or no for each seed."""
        return MEASURES[self.claim.measure].counts

    @property
    def seeds_as_published(self) -> int:
        """On how many seeds the effect has the published sign."""
        return sum(value * self.claim.sign > 0 for value in self.effect.by_seed.values())

    @property
    def interval(self) -> Estimate | None:
        """The mean effect with its 95 % t interval; none of yes or no."""
        return self.effect.interval() if self.effect.by_seed and not self.counts else None

    @property
    def corrected(self) -> Estimate | None:
        """The mean effect with the interval widened for all claims of the item."""
        return None if self.decision is None else self.effect.interval(self.decision.confidence)

    @property
    def outcome(self) -> ClaimOutcome:
        """What the corrected interval says, or the number of seeds."""
        if not self.effect.by_seed:
            return ClaimOutcome.NO_RATE if self.without_rate else ClaimOutcome.NOT_RUN
        if self.counts and len(self.effect.by_seed) > 1:
            found = {0: ClaimOutcome.ON_NO_SEED, len(self.effect.by_seed): ClaimOutcome.ON_EVERY_SEED}
            return found.get(self.seeds_as_published, ClaimOutcome.ON_SOME_SEEDS)
        if self.corrected is None or self.corrected.ends is None:
            return ClaimOutcome.TOO_FEW_SEEDS
        low, high = self.corrected.ends
        if low <= 0 <= high:
            return ClaimOutcome.NOT_SEEN
        return ClaimOutcome.CONFIRMED if (low > 0) == (self.claim.sign > 0) else ClaimOutcome.CONTRADICTED

    @property
    def same_direction(self) -> bool | None:
        """Whether the mean has the sign of the paper; None without an interval, and for a mean of zero."""
        return None if self.interval is None or not self.interval.mean else self.interval.mean * self.claim.sign > 0


def judge_claims(item: str, claims: Sequence[PaperClaim], cells: Cells) -> tuple[JudgedClaim, ...]:
    """Return the claims of an item with their outcomes, corrected together (Holm); our hypotheses are so apart."""
    judged = [_effect_of(item, claim, cells) for claim in claims]
    for own in (False, True):
        family = {index: each for index, each in enumerate(judged) if each.claim.own is own and not each.counts}
        tested = {index: p for index, each in family.items() if (p := each.effect.p_value) is not None}
        for index, decision in zip(tested, holm(list(tested.values())), strict=True):
            judged[index] = replace(judged[index], decision=decision)
    return tuple(judged)


def _effect_of(item: str, claim: PaperClaim, cells: Cells) -> JudgedClaim:
    measure = MEASURES[claim.measure]
    runs = [(factor, cells(cell)) for factor, cell in claim.terms]
    found = [
        (
            factor,
            {s: v for s, run in (each or {}).items() if (v := measure.of(run)) is not None and isfinite(v)},
        )
        for factor, each in runs
    ]
    seeds = set.intersection(*(set(values) for _, values in found))
    rows = [find_published(item, cell.grid, cell.method, cell.rate) for _, cell in claim.terms]
    name, _, sign = claim.published or (measure.published, measure.unit, 1.0)
    stated = [
        0.0 if REDUCTIONS.get(name) == cell.method else None if row is None else row.value(name)
        for (_, cell), row in zip(claim.terms, rows, strict=True)
    ]
    numbers = [
        None if value is None else sign * factor * value for (factor, _), value in zip(claim.terms, stated, strict=True)
    ]
    return JudgedClaim(
        claim=claim,
        effect=PairedDifference(
            by_seed={seed: sum(factor * values[seed] for factor, values in found) for seed in sorted(seeds)}
        ),
        published=None if None in numbers else sum(number for number in numbers if number is not None),
        published_verdicts=tuple(f"{row.method} {row.verdict}" for row in rows if row and row.verdict),
        without_rate=any(each is None for _, each in runs),
    )


# --- what is measured


def held_out_loss(run: RunResult) -> float | None:
    """Return the held-out loss; a diverged run counts as a model that has learned nothing."""
    return run.score if isfinite(run.score) else run.floor


def held_out_accuracy(run: RunResult) -> float | None:
    """Return the held-out accuracy in percent; a diverged run counts as chance: its floor is log(classes)."""
    if run.diverged:
        return None if run.floor is None else 100 * math.exp(-run.floor)
    value = run.held_out.get("accuracy")
    return None if value is None else 100 * value


def failed(run: RunResult) -> float:
    """Return 1 for a run that diverged or did not learn, else 0."""
    return float(run.word in (DIVERGED, NOT_LEARNED))


def exploded(run: RunResult) -> float | None:
    """Return 1 where a gradient norm, before clipping, exceeded 100 after the warm-up or ever was not finite, else 0.

    100 is the threshold of SiameseNorm's section 5.1.
    """
    norms = run.gradient_norms
    late = norms.values[(norms.steps > run.config["optimizer"]["warmup_steps"]) | ~np.isfinite(norms.values)]
    return float(not np.all(late <= 100.0)) if len(late) else None


def evaluated(run: RunResult, name: str) -> dict[str, Any] | None:
    """Return the results of an evaluation of a run's own weights; None where it was not made."""
    best = newest_record(run, name)
    return None if best is None else dict(best["results"])


def newest_record(run: RunResult, name: str) -> Record | None:
    """Return the record of an evaluation of a run's own weights; None where it was not made.

    Of several that of the last step, and of these the one on the most items or samples.
    """
    own = [each for each in run.evaluations if each["evaluation"] == name and each["weights"] in OWN]
    return max(own, key=lambda each: (each["step"], _size(each["results"])), default=None)


def _size(results: Mapping[str, Any]) -> int:
    tasks = [each for each in results.values() if isinstance(each, Mapping)]
    return int(results.get("samples") or sum(int(each.get("items") or 0) for each in tasks))


def task_accuracy(run: RunResult, task: str = "") -> float | None:
    """Return the primary accuracy of a multiple-choice task in percent, of all tasks without a name."""
    results = evaluated(run, MultipleChoice.name)
    if results is None or (task and task not in results):
        return None
    return 100 * float(results[task][results[task]["primary"]] if task else results[MEAN])


def magnitude_growth(run: RunResult) -> float | None:
    """Return the log of the last over the first RMS of the stream of the largest growth."""
    results = evaluated(run, "hidden-magnitude")
    if results is None:
        return None
    profiles = [[value for value in each["rms"] if value] for each in results["streams"].values()]
    return max((math.log(profile[-1] / profile[0]) for profile in profiles if len(profile) > 1), default=None)


def stream_difference(run: RunResult, analysis: str, quantity: str) -> float | None:
    """Return the value of the bounded stream minus that of the identity stream in a record by stream."""
    found = (evaluated(run, analysis) or {}).get(quantity) or {}
    bounded, identity = (
        each["agreement"][-1] if isinstance(each, dict) else each for each in map(found.get, ("bounded", "identity"))
    )
    return None if bounded is None or identity is None else float(bounded - identity)


def pruning_harm(run: RunResult) -> float | None:
    """Return the mean increase of the loss when one block of the deeper half is removed."""
    results = evaluated(run, "pruning")
    if results is None:
        return None
    deeper = results["removed"][results["blocks"] // 2 :]
    return statistics.fmean(deeper) - float(results["loss"])


def rounding_harm(run: RunResult, scheme: str) -> float | None:
    """Return the rise of the loss when linear layers are rounded."""
    results = evaluated(run, "quantisation")
    return None if results is None else float(results["schemes"][scheme]["rise"])


def largest_outlier(run: RunResult) -> float | None:
    """Return the log of the largest ratio of an entry to the median, over sublayers and streams."""
    results = evaluated(run, "outliers")
    if results is None:
        return None
    return math.log(max(value for each in results["streams"].values() for value in each["ratio"] if value is not None))


def effective_blocks(run: RunResult) -> float | None:
    """Return the effective number of blocks."""
    results = evaluated(run, "effective-depth")
    return None if results is None else float(results["effective_blocks"])


MEASURES: dict[str, Measure] = {
    "loss": Measure(label="held-out loss", unit="nats", of=held_out_loss, published="loss"),
    "squared error": Measure(label="held-out squared error", unit="", of=held_out_loss, published="loss"),
    "accuracy": Measure(
        label="held-out accuracy",
        unit="%",
        of=held_out_accuracy,
        published="accuracy",
        decimals=2,
    ),
    "average": Measure(label="mean accuracy", unit="%", of=task_accuracy, published="average", decimals=2),
    "arithmetic": Measure(
        label="accuracy in arithmetic",
        unit="%",
        of=lambda run: task_accuracy(run, "basic_arithmetic"),
        published="arithmetic",
        decimals=2,
    ),
    "failed": Measure(label="failed (1: diverged or not learned)", unit="", of=failed, published="failed", counts=True),
    "trained": Measure(label="trained (1) or failed (-1)", unit="", of=lambda run: 1 - 2 * failed(run), counts=True),
    "exploded": Measure(
        label="exploded (1: a gradient norm above 100 after the warm-up, or not finite)",
        unit="",
        of=exploded,
        counts=True,
    ),
    "growth": Measure(label="log growth of the magnitude", unit="", of=magnitude_growth),
    "fusion": Measure(
        label="final gain, bounded minus identity",
        unit="",
        of=lambda run: stream_difference(run, "fusion", "gains"),
        published="gain_difference",
    ),
    "lens": Measure(
        label="agreement with the output, bounded minus identity",
        unit="%",
        of=lambda run: None if (v := stream_difference(run, "logit-lens", "streams")) is None else 100 * v,
        published="agreement_difference",
        decimals=1,
    ),
    "pruning": Measure(label="loss added by removing a deep block", unit="nats", of=pruning_harm),
    "w8a8": Measure(label="loss added by rounding to 8 bits", unit="nats", of=lambda run: rounding_harm(run, "w8a8")),
    "w4a4": Measure(label="loss added by rounding to 4 bits", unit="nats", of=lambda run: rounding_harm(run, "w4a4")),
    "outliers": Measure(label="log of the largest ratio of an entry to the median", unit="", of=largest_outlier),
    "effective blocks": Measure(label="effective blocks", unit="", of=effective_blocks, decimals=2),
}
"""What claims measure, by name."""
