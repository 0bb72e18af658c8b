"""A loss curve, from the record of a run or from any file that holds one.

Formats: metrics.jsonl, CSV with or without a header (as TensorBoard downloads it, for one), JSON lines, a JSON list,
and trainer_state.json of transformers.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siamesenorm.errors import UserError, unknown
from siamesenorm.files import decode_json
from siamesenorm.training.run_record import parse_lines, read_bytes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

FINAL_FRACTION = 0.1
"""The last part of the steps whose mean training loss is the training loss of a run."""
STEP_COLUMNS = ("step", "_step", "global_step")
GRADIENT_COLUMNS = ("gradient_norm", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Training losses at increasing steps, and what a verdict can use about the run.

    `gradient_norms` has None where none was logged; `skipped` says which updates were left out. `floor` is the loss of
    a model that has learned nothing (unigram entropy, ln(classes), variance), `scale` the unit of a verdict's
    thresholds (1 nat for language), `held_out` the last held-out loss, `unit` that of the losses ("nats/token"). The
    facts are those of a run's own record; of other curves they are unknown unless given.
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    gradient_norms: tuple[float | None, ...] | None = None
    skipped: tuple[bool, ...] | None = None
    steps_total: int | None = None
    warmup_steps: int = 0
    floor: float | None = None
    scale: float = 1.0
    held_out: float | None = None
    unit: str = ""

    @classmethod
    def of(cls, losses: Iterable[float], **facts: Any) -> LossCurve:
        """Return the curve of the losses of steps 1, 2, 3, ..."""
        losses = tuple(losses)
        return cls(steps=tuple(range(1, len(losses) + 1)), losses=losses, **facts)

    def __post_init__(self) -> None:
        last = self.steps[-1] if self.steps else 0
        if self.steps_total is not None and self.steps_total < max(1, last):
            raise UserError(f"steps_total is {self.steps_total}: the curve goes to step {last}, give at least that")
        if self.warmup_steps < 0:
            raise UserError(f"warmup_steps is {self.warmup_steps}: give 0 or more")
        if self.floor is not None and not math.isfinite(self.floor):
            raise UserError(f"floor is {self.floor}: give the loss of a model that has learned nothing, or none")
        if not 0 < self.scale < math.inf:
            raise UserError(f"scale is {self.scale}: give a number above 0")

    @property
    def warmup_points(self) -> int:
        """How many points belong to the warm-up."""
        return bisect_right(self.steps, self.warmup_steps - self._counted_from_zero)

    @property
    def missing_points(self) -> int:
        """How many points are to come until the planned end, at the interval of those that are there."""
        if self.steps_total is None or not self.steps:
            return 0
        points, last = len(self.steps), self.steps[-1]
        interval = (last - self.steps[0]) / (points - 1) if points > 1 else max(1, last)
        return max(0, math.floor((self.steps_total - self._counted_from_zero - last) / interval))

    @property
    def _counted_from_zero(self) -> bool:
        """Whether the first step is called 0: the last of n is then n - 1."""
        return bool(self.steps) and self.steps[0] == 0


@dataclass(frozen=True, slots=True)
class _Row:
    """One record of a file, and its place for messages, such as "losses.csv, line 7"."""

    place: str
    cells: Mapping[str, Any]

    def has(self, column: str) -> bool:
        """Return whether there is a value in a column."""
        return self.cells.get(column) not in (None, "")

    def number(self, column: str) -> float:
        """Return the number in a column; raises UserError where there is something else."""
        cell = self.cells.get(column)
        try:
            if isinstance(cell, bool) or not isinstance(cell, int | float | str):
                raise ValueError
            return float(cell)
        except (ValueError, OverflowError) as error:
            raise UserError(f"{self.place}: {column} is {repr(cell)[:40]}, not a number") from error

    def whole_number(self, column: str) -> int:
        """Return the whole number in a column; raises UserError where there is something else."""
        number = self.number(column)
        if not number.is_integer():
            raise UserError(f"{self.place}: {column} is {self.cells[column]!r}, not a whole number")
        return int(number)


def loss_curve(records: Iterable[Mapping[str, Any]]) -> LossCurve:
    """Return the curve in the records of a run; raises UserError when there is none."""
    rows = [_Row(f"the record, line {number}", record) for number, record in enumerate(records, start=1)]
    return _curve(rows, "loss", "the record")


def read_loss_curve(path: Path, *, column: str = "loss") -> LossCurve:
    """Return the loss curve in a file, or in the `metrics.jsonl` of a run directory.

    A table's loss is its `column`; the columns `step` and `gradient_norm` (or `grad_norm`) are used when there. A CSV
    without a header holds losses, or steps and losses, or steps, losses and gradient norms. Rows with an empty or null
    loss were logged for something else and are left out: a loss that is not a number must say nan. Raises `UserError`
    on what cannot be read: no file, an empty or binary one, no such column, text among numbers, steps that fall.
    """
    if path.is_dir():
        path = path / "metrics.jsonl"
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"{path} is not text: expected metrics.jsonl, CSV or JSON")
    if not text.strip():
        raise UserError(f"{path} is empty: expected a loss curve as metrics.jsonl, CSV or JSON")
    read_rows = _json_rows if text.lstrip()[0] in "[{" else _csv_rows
    return _curve(read_rows(text, column, path), column, str(path))


def _json_rows(text: str, column: str, path: Path) -> list[_Row]:
    try:
        value = decode_json(text)
    except ValueError as error:
        if text.lstrip().startswith("["):
            raise UserError(f"{path} is not JSON: {error}") from error
        value = None
    if isinstance(value, dict):
        value = value.get("log_history")  # trainer_state.json of Hugging Face's Trainer
    if isinstance(value, list):
        return [_json_row(f"{path}, item {number}", item, column) for number, item in enumerate(value, start=1)]
    return [_json_row(f"{path}, line {number}", item, column) for number, item in parse_lines(text.encode(), path)]


def _json_row(place: str, item: Any, column: str) -> _Row:
    if isinstance(item, list):
        raise UserError(f"{place}: expected a number or an object with a {column!r}, found a list")
    return _Row(place, item if isinstance(item, Mapping) else {column: item})


def _csv_rows(text: str, column: str, path: Path) -> list[_Row]:
    lines = text.splitlines()
    first = next(line for line in lines if line.strip())
    try:
        reader = csv.reader(lines, delimiter=max(",\t;", key=first.count), strict=True)
        table = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: line {reader.line_num}: {error}") from error
    _, header = table[0]
    if not all(map(_is_number, header)):
        del table[0]
    elif len(header) > 3:
        raise UserError(f"{path} has {len(header)} columns and no header: add a first line that names them")
    elif column != "loss":
        raise UserError(f"{path} has no header, so no column {column!r}: add a first line that names its columns")
    else:
        header = [["loss"], ["step", "loss"], ["step", "loss", "gradient_norm"]][len(header) - 1]
    for number, row in table:
        if len(row) != len(header):
            raise UserError(f"{path}, line {number}: {len(row)} cells where the first line has {len(header)}")
    return [_Row(f"{path}, line {number}", dict(zip(header, row, strict=True))) for number, row in table]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _curve(rows: Sequence[_Row], column: str, source: str) -> LossCurve:
    facts: dict[str, Any] = {}
    if any("kind" in row.cells for row in rows):
        facts = _facts(rows)
        rows = [row for row in rows if row.cells.get("kind") == "train"]
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    loss_column = _find(names, (column,))
    if names and loss_column is None:
        raise UserError(f"{source}: {unknown('column', column, names)}; name that of the loss with --column")
    rows = [row for row in rows if loss_column and row.has(loss_column)]
    if not loss_column or not rows:
        raise UserError(f"{source} has no loss: expected at least one number in {column!r}")
    norm_column = _find(names, GRADIENT_COLUMNS)
    norms = tuple(row.number(norm_column) if row.has(norm_column) else None for row in rows) if norm_column else None
    steps, losses = _steps(rows, _find(names, STEP_COLUMNS)), tuple(row.number(loss_column) for row in rows)
    skipped = tuple(row.cells.get("skipped") is True for row in rows) if "skipped" in names else None
    try:
        return LossCurve(steps=steps, losses=losses, gradient_norms=norms, skipped=skipped, **facts)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def _facts(rows: Sequence[_Row]) -> dict[str, Any]:
    """Return the facts in the record of a run: those of its line of kind "model", and the last held-out loss."""
    facts: dict[str, Any] = {}
    for row in rows:
        if row.cells.get("kind") == "model":
            facts |= {name: row.whole_number(name) for name in ("steps", "warmup_steps") if row.has(name)}
            facts |= {name: row.number(name) for name in ("floor", "scale") if row.has(name)}
            facts |= {"unit": str(row.cells["unit"])} if row.has("unit") else {}
        elif row.cells.get("kind") == "validation" and "loss" in row.cells:
            facts["held_out"] = row.number("loss")
    if "steps" in facts:
        facts["steps_total"] = facts.pop("steps")
    return facts


def _find(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Return the first column with a wanted name, exactly or but for upper case."""
    folded = {name.casefold(): name for name in reversed(names)}
    exact = (name for name in wanted if name in names)
    return next(exact, None) or next((folded[name] for name in wanted if name in folded), None)


def _steps(rows: Sequence[_Row], column: str | None) -> tuple[int, ...]:
    if column is None:
        return tuple(range(1, len(rows) + 1))
    steps = tuple(row.whole_number(column) for row in rows)
    for row, (before, step) in zip(rows[1:], pairwise(steps), strict=True):
        if step <= before:
            raise UserError(f"{row.place}: step {step} follows step {before}: sort the rows, keep one row a step")
    return steps


def final_mean(steps: ArrayLike, losses: ArrayLike, planned: int) -> float | None:
    """Return the mean loss over the last tenth of the planned steps, or None where training did not get to its end."""
    import numpy as np  # a verdict needs torch alone

    steps, losses = np.asarray(steps), np.asarray(losses)
    if not len(steps) or steps[-1] < planned:
        return None
    return float(np.mean(losses[steps > planned - final_steps(planned)]))


def final_steps(planned: int) -> int:
    """Return how many steps are the last tenth of the planned ones, at least one."""
    return max(1, math.floor(FINAL_FRACTION * planned))
