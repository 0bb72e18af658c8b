"""Tables of accuracies on multiple-choice tasks, from the records of evaluations of the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siamesenorm.comparison import formatting
from siamesenorm.comparison.findings import Findings, Outcome
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import HIGHER, Column, Entry, Row, RowGroup, Table
from siamesenorm.comparison.results import RunResult
from siamesenorm.evaluation.choice_tasks import TASKS

AVERAGE = "average"
CHOICE = "multiple-choice"
Results = Mapping[str, Any]


def accuracy_tables(findings: Findings) -> tuple[Table, ...]:
    """Build the papers' table of accuracies, methods under each learning rate, for each set of items that was scored.

    The numbers are those of the trained weights, not of an average of weights, at the last step that was scored.
    """
    sets = {
        str(record["options"]["digest"]): record for run in findings.results.runs for record in _records(run).values()
    }
    return tuple(_table(findings, digest, record["options"]["split"]) for digest, record in sets.items())


def accuracies(run: RunResult, digest: str) -> dict[str, float]:
    """Return a run's primary accuracies in percent by task on a set of items, and their average; empty without any."""
    record = _records(run).get(digest)
    if record is None:
        return {}
    results: Results = record["results"]
    tasks = {name: 100 * each[each["primary"]] for name, each in results.items() if name != AVERAGE}
    return {**tasks, AVERAGE: 100 * results[AVERAGE]}


def _records(run: RunResult) -> dict[str, Mapping[str, Any]]:
    """Return the last record of each set of items by its digest."""
    found = (each for each in run.evaluations if each["evaluation"] == CHOICE and each["weights"] == "raw")
    return {each["options"]["digest"]: each for each in sorted(found, key=lambda each: int(each["step"]))}


def _table(findings: Findings, digest: str, split: str) -> Table:
    results = findings.results
    record = next(found for run in results.runs if (found := _records(run).get(digest)))
    names = record["options"]["tasks"]
    columns = (
        Column("Method", "topology, and attention norm or operator where they are not the usual ones", numeric=False),
        Column("Seeds", "the seeds that were scored"),
        *(Column(f"{TASKS[name].label}{HIGHER}", _explanation(name, record["results"][name])) for name in names),
        Column(f"Average{HIGHER}", "plain mean of the tasks"),
    )
    groups = (
        RowGroup(
            f"Learning rate {formatting.rate(rate)}",
            tuple(
                _row(findings, outcome, digest, (*names, AVERAGE))
                for outcome in findings.at(rate)
                if _scored(outcome, digest)
            ),
        )
        for rate in results.learning_rates
    )
    return Table(f"Accuracy on tasks in percent ({split})", columns, tuple(group for group in groups if group.rows))


def _explanation(name: str, result: Results) -> str:
    kind = "accuracy by log-probability" + (" per character" if TASKS[name].primary == "acc_per_char" else "")
    return f"{kind} on {result['items']:,} items, mean over seeds"


def _scored(outcome: Outcome, digest: str) -> int:
    return sum(bool(accuracies(run, digest)) for run in outcome.complete)


def _row(findings: Findings, outcome: Outcome, digest: str, keys: tuple[str, ...]) -> Row:
    def entry(key: str) -> Entry:
        def quantity(run: RunResult) -> float | None:
            return accuracies(run, digest).get(key)

        estimate = outcome.estimate(quantity)
        if estimate is None:
            return Entry(NOTHING)
        return Entry(formatting.estimate(estimate, ".2f"), strong=findings.is_best(outcome, quantity, lowest=False))

    return (Entry(outcome.method), Entry(str(_scored(outcome, digest))), *map(entry, keys))
