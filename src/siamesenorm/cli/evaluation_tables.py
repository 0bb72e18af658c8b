"""The records of evaluations as tables of the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from siamesenorm.cli.output import console
from siamesenorm.comparison.accuracy_tables import result_cells
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.evaluation.choice_tasks import TASKS
from siamesenorm.evaluation.evaluation import Record
from siamesenorm.evaluation.multiple_choice import MEAN, MEAN_STDERR, MultipleChoice
from siamesenorm.evaluation.paired_tests import PAIRED

Cells = Sequence[str]


def show(records: Sequence[Record]) -> None:
    """Print a table of each record of tasks and of each comparison, and one with a row for each other result."""
    output = console()
    kinds = {MultipleChoice.name: ("Task", *CHOICE_COLUMNS), PAIRED: ("Task", *PAIRED_COLUMNS)}
    others = [row for record in records if record["evaluation"] not in kinds for row in _rows(record)]
    if others:
        output.print(_table("", ("evaluation", "weights", "result", "value"), others))
    for record in records:
        if columns := kinds.get(record["evaluation"]):
            write = choice_row if record["evaluation"] == MultipleChoice.name else paired_row
            title = f"{record['evaluation']}, {record['options']['split']}, {record['weights']} weights"
            if "models" in record:
                title += f": {' minus '.join(record['models'])}"
            results = record["results"]
            rows = [(TASKS[name].label, *write(results[name])) for name in record["options"]["tasks"]]
            output.print(_table(title, columns, [*rows, ("Average", *average_cells(results))]))


COUNTS = {"acc": "accuracy", "acc_per_char": "accuracy per character"}
CHOICE_COLUMNS = ("items", "accuracy", "per character", "bits per byte", "counts")
PAIRED_COLUMNS = ("items", "of", "difference in %", "95 % interval", "p (McNemar)", "bits per byte", "p (paired t)")


def choice_row(result: Mapping[str, Any]) -> Cells:
    """Return the cells of a task: accuracies in percent, with their standard errors."""
    return (
        str(result["items"]),
        percent(result["acc"], result["acc_stderr"]),
        percent(result["acc_per_char"], result["acc_per_char_stderr"]),
        number(result["bits_per_byte"], result["bits_per_byte_stderr"]),
        COUNTS[result["primary"]],
    )


def paired_row(result: Mapping[str, Any]) -> Cells:
    """Return the cells of a task: differences of the accuracy that counts and of bits per byte."""
    counted, bits = result[result["primary"]], result["bits_per_byte"]
    return (
        str(result["items"]),
        COUNTS[result["primary"]],
        percent(counted["difference"], counted["stderr"], signed=True),
        interval(counted),
        probability(counted["p_value"]),
        number(bits["difference"], bits["stderr"], signed=True),
        probability(bits["p_value"]),
    )


def average_cells(results: Mapping[str, Any]) -> Cells:
    """Return the cells of the plain mean over tasks, or of a difference of such means."""
    average = results[MEAN]
    if not isinstance(average, Mapping):
        return ("", percent(average, results[MEAN_STDERR]), "", "", "the column that counts")
    difference = percent(average["difference"], average["stderr"], signed=True)
    return ("", "what counts", difference, interval(average), probability(average["p_value"]) + " (normal)", "", "")


def percent(value: float, error: float | None = None, *, signed: bool = False) -> str:
    """Write a share in percent, with its standard error."""
    return number(100 * value, None if error is None else 100 * error, form=".2f", signed=signed)


def number(value: float, error: float | None, *, form: str = ".4f", signed: bool = False) -> str:
    """Write a number with its standard error."""
    return f"{value:{'+' if signed else ''}{form}}" + ("" if error is None else f" ± {error:{form}}")


def interval(result: Mapping[str, Any]) -> str:
    """Write the interval of a share in percent."""
    low, high = result.get("low"), result.get("high")
    return NOTHING if low is None or high is None else f"{100 * low:+.2f} to {100 * high:+.2f}"


def probability(value: float | None) -> str:
    """Write a p-value."""
    return NOTHING if value is None else f"{value:.3g}"


def _rows(record: Record) -> Iterator[Cells]:
    return ((record["evaluation"], record["weights"], name, value) for name, value in result_cells(record))


def _table(title: str, columns: Cells, rows: Sequence[Cells]) -> Table:
    table = Table(header_style="bold", title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
