"""Tables of multiple-choice tasks, from the records of evaluations of the runs: accuracies, and bits per byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from siamesenorm.analysis.analyses import ANALYSES
from siamesenorm.comparison import formatting
from siamesenorm.comparison.findings import Findings, Outcome
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import HIGHER, LOWER, Column, Entry, Row, RowGroup, Table
from siamesenorm.comparison.results import RunResult
from siamesenorm.evaluation.choice_tasks import TASKS
from siamesenorm.evaluation.evaluation import RAW
from siamesenorm.evaluation.multiple_choice import MEAN, MultipleChoice, mean_of_tasks
from siamesenorm.evaluation.paired_tests import PAIRED

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuantity:
    """What a table shows of each task: its primary accuracy in percent, or another metric of its results."""

    title: str
    form: str
    metric: str = ""
    scale: float = 1.0
    lowest: bool = False

    def of(self, result: Results) -> tuple[float, float | None]:
        """Return the value of a task with its standard error over the items, where the record has one."""
        metric = self.metric or result["primary"]
        error = result.get(f"{metric}_stderr")
        return self.scale * result[metric], None if error is None else self.scale * error

    def explanation(self, name: str, result: Results) -> str:
        """Return a sentence about a task's column."""
        kind = "accuracy by log-probability" + (" per character" if TASKS[name].primary == "acc_per_char" else "")
        what = "bits per byte of the right answer" if self.metric else kind
        return f"{what} on {result['items']:,} items, mean over seeds; in brackets the standard error over the items"


ACCURACY = TaskQuantity(title="Accuracy on tasks in percent", form=".2f", scale=100.0)
BITS = TaskQuantity(title="Bits per byte of the right answers", form=".4f", metric="bits_per_byte", lowest=True)


def accuracy_tables(findings: Findings) -> tuple[Table, ...]:
    """Build the papers' table of accuracies, and one of bits per byte, for each set of items that was scored.

    Methods are under each learning rate. The numbers are those of the trained weights, not of an average of weights, at
    the last step that was scored.
    """
    sets = {
        str(record["options"]["digest"]): record for run in findings.results.runs for record in _records(run).values()
    }
    # A page has a title once.
    which = {digest: f" (items {digest[:12]})" if len(sets) > 1 else "" for digest in sets}
    return tuple(
        dataclasses.replace(table, title=f"{table.title}{which[digest]}")
        for digest, record in sets.items()
        for table in (_table(findings, record, quantity) for quantity in (ACCURACY, BITS))
    )


def evaluations_table(run: RunResult) -> Table:
    """Build the table of what else a run was evaluated by: every number of each record that is no analysis."""
    columns = (
        Column("Evaluation", "what was measured", numeric=False),
        Column("Step", "of the weights"),
        Column("Weights", "raw: as trained; ema: their average", numeric=False),
        Column("Result", "its name in evaluations.jsonl", numeric=False),
        Column("Value", "of the result"),
    )
    left_out = (MultipleChoice.name, PAIRED, *ANALYSES)
    rows = tuple(
        tuple(map(Entry, (each["evaluation"], f"{each['step']:,}", each["weights"], name, value)))
        for each in run.evaluations
        if each["evaluation"] not in left_out
        for name, value in result_cells(each)
    )
    return Table("Other evaluations", columns, (RowGroup("", rows),) if rows else ())


def result_cells(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a record with their names, those of a part after its name."""
    for name, value in record["results"].items():
        nested = value if isinstance(value, Mapping) else {"": value}
        for part, each in nested.items():
            text = f"{each:.6g}" if isinstance(each, float) else formatting.NOTHING if each is None else str(each)
            yield f"{name} {part}".strip(), text


def task_values(run: RunResult, digest: str, quantity: TaskQuantity) -> dict[str, tuple[float, float | None]]:
    """Return a run's values on a set of items by task, and their mean, with standard errors; empty without any."""
    record = _records(run).get(digest)
    if record is None:
        return {}
    tasks = {name: quantity.of(record["results"][name]) for name in record["options"]["tasks"]}
    return {**tasks, MEAN: mean_of_tasks(list(tasks.values()))}


def _records(run: RunResult) -> dict[str, Mapping[str, Any]]:
    """Return the last record of each set of items by its digest."""
    found = (each for each in run.evaluations if each["evaluation"] == MultipleChoice.name and each["weights"] == RAW)
    return {each["options"]["digest"]: each for each in sorted(found, key=lambda each: int(each["step"]))}


def _table(findings: Findings, record: Mapping[str, Any], quantity: TaskQuantity) -> Table:
    names, digest = record["options"]["tasks"], record["options"]["digest"]
    mark = LOWER if quantity.lowest else HIGHER
    columns = (
        Column("Method", "topology, and attention norm or operator where they are not the usual ones", numeric=False),
        Column("Seeds", "the seeds that were scored"),
        *(Column(f"{TASKS[name].label}{mark}", quantity.explanation(name, record["results"][name])) for name in names),
        Column(f"Average{mark}", "plain mean of the tasks; in brackets its standard error over the items"),
    )
    groups = (
        RowGroup(
            f"Learning rate {formatting.rate(rate)}",
            tuple(
                _row(findings, outcome, digest, (*names, MEAN), quantity)
                for outcome in findings.at(rate)
                if _scored(outcome, digest)
            ),
        )
        for rate in findings.results.learning_rates
    )
    shown = tuple(group for group in groups if group.rows)
    return Table(f"{quantity.title} ({record['options']['split']})", columns, shown)


def _scored(outcome: Outcome, digest: str) -> int:
    return sum(digest in _records(run) for run in outcome.complete)


def _row(findings: Findings, outcome: Outcome, digest: str, keys: tuple[str, ...], quantity: TaskQuantity) -> Row:
    def entry(key: str) -> Entry:
        def value(run: RunResult) -> float | None:
            return task_values(run, digest, quantity).get(key, (None, None))[0]

        def error(run: RunResult) -> float | None:
            return task_values(run, digest, quantity).get(key, (None, None))[1]

        estimate, over_items = outcome.estimate(value), outcome.estimate(error)
        if estimate is None:
            return Entry(NOTHING)
        text = formatting.estimate(estimate, quantity.form)
        if over_items is not None:  # seeds share the items, so that more of them do not reduce it
            text += f" ({formatting.formatted(over_items.mean, quantity.form)})"
        return Entry(text, strong=findings.is_best(outcome, value, lowest=quantity.lowest))

    return (Entry(outcome.method), Entry(str(_scored(outcome, digest))), *map(entry, keys))
