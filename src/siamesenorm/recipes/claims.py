"""Claims of the papers as declared comparisons, and what our runs say of each: a signed sum over paired seeds.

A claim is `sum_i c_i m(cell_i)` of a measure m, and the sign that the paper reports. Its interval is widened for all
claims of an item (Holm): it is confirmed where that excludes zero on the paper's side, contradicted where on the other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from siamesenorm.comparison.results import RunResult
from siamesenorm.comparison.statistics import Estimate, PairedDifference, holm
from siamesenorm.evaluation.multiple_choice import MEAN, MultipleChoice
from siamesenorm.recipes.published_numbers import find_published


class ClaimOutcome(StrEnum):
    """What the runs say of a claim."""

    CONFIRMED = "confirmed"
    """The interval excludes zero in the published direction."""
    NOT_SEEN = "not seen at this scale"
    """The interval includes zero, or there are too few seeds for one: a gap within noise."""
    CONTRADICTED = "contradicted"
    """The interval excludes zero in the other direction."""
    NOT_RUN = "not run"
    """A cell has no finished run, or none with what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number of one run: its label, its unit, its format, and the name under which papers state it."""

    label: str
    unit: str
    of: Callable[[RunResult], float | None]
    published: str
    decimals: int = 4


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
    its unit and the factor on it that gives it the sign of the measure.
    """

    text: str
    measure: str
    terms: tuple[tuple[float, Cell], ...]
    sign: int
    published: tuple[str, str, float] | None = None


Cells = Callable[[Cell], Mapping[int, RunResult]]
"""Returns the finished runs of a cell by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedClaim:
    """A claim with the published effect, and ours by seed with the confidence of Holm's procedure."""

    claim: PaperClaim
    effect: PairedDifference
    published: float | None
    published_verdicts: tuple[str, ...]
    confidence: float | None = None

    @property
    def interval(self) -> Estimate | None:
        """The mean effect with its 95 % t interval."""
        return self.effect.interval() if self.effect.by_seed else None

    @property
    def corrected(self) -> Estimate | None:
        """The mean effect with the interval widened for all claims of the item."""
        return None if self.confidence is None else self.effect.interval(self.confidence)

    @property
    def outcome(self) -> ClaimOutcome:
        """What the corrected interval says."""
        if not self.effect.by_seed:
            return ClaimOutcome.NOT_RUN
        if self.corrected is None or self.corrected.ends is None:
            return ClaimOutcome.NOT_SEEN
        low, high = self.corrected.ends
        if low <= 0 <= high:
            return ClaimOutcome.NOT_SEEN
        return ClaimOutcome.CONFIRMED if (low > 0) == (self.claim.sign > 0) else ClaimOutcome.CONTRADICTED

    @property
    def same_direction(self) -> bool | None:
        """Whether the mean has the sign of the paper; None without runs."""
        return None if self.interval is None else self.interval.mean * self.claim.sign > 0


def judge_claims(item: str, claims: Sequence[PaperClaim], cells: Cells) -> tuple[JudgedClaim, ...]:
    """Return the claims of an item with their outcomes, corrected together (Holm)."""
    judged = [_effect_of(item, claim, cells) for claim in claims]
    tested = {index: p for index, each in enumerate(judged) if (p := each.effect.p_value) is not None}
    for index, decision in zip(tested, holm(list(tested.values())), strict=True):
        judged[index] = replace(judged[index], confidence=decision.confidence)
    return tuple(judged)


def _effect_of(item: str, claim: PaperClaim, cells: Cells) -> JudgedClaim:
    measure = MEASURES[claim.measure]
    found = [
        (factor, {seed: value for seed, run in cells(cell).items() if (value := measure.of(run)) is not None})
        for factor, cell in claim.terms
    ]
    seeds = set.intersection(*(set(values) for _, values in found))
    rows = [find_published(item, cell.grid, cell.method, cell.rate) for _, cell in claim.terms]
    name, _, sign = claim.published or (measure.published, measure.unit, 1.0)
    numbers = [
        None if row is None or (value := row.value(name)) is None else sign * factor * value
        for (factor, _), row in zip(claim.terms, rows, strict=True)
    ]
    return JudgedClaim(
        claim=claim,
        effect=PairedDifference(
            by_seed={seed: sum(factor * values[seed] for factor, values in found) for seed in sorted(seeds)}
        ),
        published=None if None in numbers else sum(number for number in numbers if number is not None),
        published_verdicts=tuple(f"{row.method} {row.verdict}" for row in rows if row and row.verdict),
    )


# --- what is measured


def held_out_loss(run: RunResult) -> float | None:
    """Return the held-out loss; a diverged run counts as a model that has learned nothing."""
    return run.score if math.isfinite(run.score) else run.floor


def largest_gradient(run: RunResult) -> float | None:
    """Return the largest gradient norm after the warm-up, before clipping."""
    start = run.config["optimizer"]["warmup_steps"]
    values = run.gradient_norms.values[run.gradient_norms.steps > start]
    return float(np.nanmax(values)) if len(values) and np.isfinite(values).any() else None


def evaluated(run: RunResult, name: str) -> dict[str, Any] | None:
    """Return the results of an evaluation of a run's own weights, the newest; None where it was not made."""
    found = [each for each in run.evaluations if each["evaluation"] == name and each["weights"] in ("raw", "none")]
    return dict(found[-1]["results"]) if found else None


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


MEASURES: dict[str, Measure] = {
    "loss": Measure(label="held-out loss", unit="nats", of=held_out_loss, published="loss"),
    "accuracy": Measure(
        label="held-out accuracy",
        unit="%",
        of=lambda run: None if (value := run.held_out.get("accuracy")) is None else 100 * value,
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
    "gradient": Measure(
        label="largest gradient norm after the warm-up", unit="", of=largest_gradient, published="gradient_norm"
    ),
    "growth": Measure(label="log growth of the magnitude", unit="", of=magnitude_growth, published="growth"),
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
    "pruning": Measure(label="loss added by removing a deep block", unit="nats", of=pruning_harm, published="harm"),
}
"""What claims measure, by name."""
