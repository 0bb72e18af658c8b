"""Two models on the same items: is the difference larger than that of chance among these items?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from scipy import stats

from siamesenorm.errors import UserError
from siamesenorm.evaluation.choice_tasks import Primary
from siamesenorm.evaluation.evaluation import Record
from siamesenorm.evaluation.multiple_choice import MEAN, METRICS, ItemScore, MultipleChoice, read_item_scores
from siamesenorm.training.run_directory import RunDirectory

CONFIDENCE = 0.95
PAIRED = "paired-multiple-choice"
"""The name of records of a comparison."""


def compare_items(first: Sequence[ItemScore], second: Sequence[ItemScore], *, what: str = "items") -> dict[str, Any]:
    """Return the differences first - second of each metric on the same items.

    For each: the mean, its standard error, a 95 % interval, and a two-sided p-value. For accuracies these are those of
    `paired_proportions`; for bits per byte those of the paired t-test. Raises UserError for other items than the
    first's.
    """
    if [(each.id, each.label) for each in first] != [(each.id, each.label) for each in second]:
        raise UserError(f"{what}: the two models were scored on different items: evaluate both on the same files")
    found: dict[str, Any] = {"items": len(first)}
    for metric in METRICS:
        pairs = np.array(
            [[getattr(one, metric), getattr(other, metric)] for one, other in zip(first, second, strict=True)]
        )
        difference = pairs[:, 0] - pairs[:, 1]
        if metric == "bits_per_byte":
            found[metric] = mean_difference(difference)
        else:
            found[metric] = paired_proportions(
                int((difference > 0).sum()), int((difference < 0).sum()), len(difference)
            )
    return found


def mean_difference(values: np.ndarray) -> dict[str, float | None]:
    """Return mean, standard error, 95 % t interval and the p-value of a t-test; None where one item has none."""
    mean, count = float(values.mean()), len(values)
    if count < 2 or not np.isfinite(values).all():
        return {"difference": mean, "stderr": None, "low": None, "high": None, "p_value": None}
    error = float(values.std(ddof=1) / math.sqrt(count))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    p_value = float(2 * stats.t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    return {"difference": mean, "stderr": error, "low": mean - half, "high": mean + half, "p_value": p_value}


def paired_proportions(only_first: int, only_second: int, count: int) -> dict[str, Any]:
    """Return the difference of two accuracies on the same `count` items, of which one model alone has some right.

    The p-value is that of McNemar's exact test, binomial over those items. Standard error and 95 % interval are those
    of Bonett and Price (2012, Journal of Educational and Behavioral Statistics 37, 479), with one item added to each of
    the two counts: p = (only_first + 1) / (count + 2), q = (only_second + 1) / (count + 2),

        p - q ± z sqrt((p + q - (p - q)^2) / (count + 2)),

    so that few items on which both models agree are no certainty. `centre` is p - q.
    """
    discordant = only_first + only_second
    p, q = ((only + 1) / (count + 2) for only in (only_first, only_second))
    error = math.sqrt((p + q - (p - q) ** 2) / (count + 2))
    return {
        "difference": (only_first - only_second) / count,
        "stderr": error,
        "centre": p - q,
        **_normal_interval(p - q, error),
        "only_first": only_first,
        "only_second": only_second,
        "p_value": float(stats.binomtest(only_first, discordant).pvalue) if discordant else 1.0,
    }


def _normal_interval(centre: float, error: float) -> dict[str, float]:
    """Return the 95 % interval of a difference of shares."""
    half = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * error
    return {"low": max(-1.0, centre - half), "high": min(1.0, centre + half)}


def compare_tasks(
    first: Mapping[str, Sequence[ItemScore]],
    second: Mapping[str, Sequence[ItemScore]],
    primaries: Mapping[str, Primary],
) -> dict[str, Any]:
    """Return `compare_items` of each task, and the difference of the averages of their primary accuracies.

    The average's standard error is that of independent tasks, with the errors of `paired_proportions`, which are never
    zero; its interval and its p-value are normal, both about the mean of their centres, so that they agree.
    """
    results = {
        name: {**compare_items(first[name], second[name], what=name), "primary": primaries[name]} for name in first
    }
    chosen = [results[name][primaries[name]] for name in results]
    mean = sum(each["difference"] for each in chosen) / len(chosen)
    centre = sum(each["centre"] for each in chosen) / len(chosen)
    error = math.sqrt(sum(each["stderr"] ** 2 for each in chosen)) / len(chosen)
    p_value = float(2 * stats.norm.sf(abs(centre) / error))
    average = {"difference": mean, "stderr": error, **_normal_interval(centre, error), "p_value": p_value}
    return {**results, MEAN: average}


class Evaluated(Protocol):
    """A model whose items were scored: `TrainedRun` or `OtherModel`."""

    directory: RunDirectory

    @property
    def step(self) -> int:
        """The step of its weights."""

    @property
    def identity(self) -> str:
        """The identity of the run, or the digest of the model."""


def paired_record(first: Evaluated, second: Evaluated, choice: MultipleChoice, *, weights: str) -> Record:
    """Return the record of the comparison of two models by the scores of items that both have kept.

    `models` has the names of their directories, whole paths where those are the same.
    """

    def scores(model: Evaluated) -> dict[str, tuple[ItemScore, ...]]:
        kept = read_item_scores(model.directory.item_scores_of(model.step, weights, choice.digest))
        return {one.task.name: kept[f"{one.task.name}_{one.split}"] for one in choice.tasks}

    primaries = {one.task.name: one.task.primary for one in choice.tasks}
    results = compare_tasks(scores(first), scores(second), primaries)
    options = {**choice.options(), "against": second.identity, "against_step": second.step}
    return {
        "kind": "evaluation",
        "step": first.step,
        "weights": weights,
        "evaluation": PAIRED,
        "models": _names(first, second),
        "options": options,
        "results": results,
    }


def _names(first: Evaluated, second: Evaluated) -> list[str]:
    paths = [model.directory.path.resolve() for model in (first, second)]
    return [path.name if paths[0].name != paths[1].name else str(path) for path in paths]
