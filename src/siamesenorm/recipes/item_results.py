"""The runs of an item read back: the results of each of its grids, and which runs are in a cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siamesenorm.comparison.findings import choose_learning_rate, diverged_at_every_rate
from siamesenorm.comparison.results import ExperimentResults, RunResult, has_started, read_experiment
from siamesenorm.errors import UserError, reason
from siamesenorm.files import decode_json, disk_errors, encode_json, write_atomically
from siamesenorm.recipes.claims import Cell, JudgedClaim, judge_claims
from siamesenorm.recipes.item import Item, RunGrid
from siamesenorm.recipes.item_claims import claims_of
from siamesenorm.recipes.items import find_item
from siamesenorm.recipes.scales import Scale

ITEM_FILE = "item.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResults:
    """An item at a scale, and the results of its grids that have any, by the name of the grid.

    `costs` are step times over Pre-Norm's by topology, measured apart from the runs.
    """

    item: Item
    scale: Scale
    path: Path
    grids: Mapping[str, ExperimentResults]
    costs: Mapping[str, float] = field(default_factory=dict)

    def runs_in(self, cell: Cell) -> dict[int, RunResult] | None:
        """Return the finished runs of a cell by seed: those at its rate, or those reported at the chosen one.

        None where a rate was to be chosen and the method diverged at every one.
        """
        results = self.grids.get(cell.grid)
        if results is None:
            return {}
        grid = self.grid(cell.grid)
        if grid.chosen:
            if choice := choose_learning_rate(results, cell.method):
                return {run.seed: run for run in choice.runs}
            return None if diverged_at_every_rate(results, cell.method) else {}
        workload = self.item.workload(grid, self.scale)
        rate = workload.rates[min(cell.rate or 0, len(workload.rates) - 1)]
        own = (run for run in results.runs_of(cell.method) if run.learning_rate == rate and run.complete)
        return {run.seed: run for run in own}

    def grid(self, name: str) -> RunGrid:
        """Return a grid of the item by its name."""
        return next(grid for grid in self.item.grids if grid.name == name)

    def judged(self) -> tuple[JudgedClaim, ...]:
        """Return the claims of the item with their outcomes."""
        return judge_claims(self.item.name, claims_of(self.item.name), self.runs_in)


def write_item(directory: Path, item: Item, scale: Scale, costs: Path | None = None, *, mixed: bool = False) -> None:
    """Write `item.json`; earlier costs stay unless `costs` is given, and `mixed`, once set, stays set.

    `mixed` allows runs of a grid that were computed with different kernels, or partly compiled. Raises UserError for a
    file that is there and cannot be read.
    """
    file = directory / ITEM_FILE
    earlier = _read_record(directory) if file.is_file() else {"costs": {}, "mixed": False}
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {
            "item": item.name,
            "scale": scale,
            "mixed": mixed or earlier["mixed"],
            "costs": read_costs(costs) if costs else earlier["costs"],
        }
        write_atomically(file, f"{encode_json(record, indent=1)}\n".encode())


def read_item(directory: Path) -> ItemResults:
    """Read the directory of an item; raises UserError where it is none, or where no run has started."""
    record = _read_record(directory)
    item = record["item"]
    grids = {
        grid.name: read_experiment(directory / grid.directory, mixed=record["mixed"])
        for grid in item.grids
        if has_started(directory / grid.directory)
    }
    if not grids:
        raise UserError(f"no run of {item.name} has started in {directory}: train it before the report")
    return ItemResults(item=item, scale=record["scale"], path=directory, grids=grids, costs=record["costs"])


def _read_record(directory: Path) -> dict[str, Any]:
    """Return the fields of `item.json`; raises UserError where it is missing or damaged."""
    try:
        record = decode_json((directory / ITEM_FILE).read_bytes())
        return {
            "item": find_item(record["item"]),
            "scale": Scale(record["scale"]),
            "costs": {topology: float(cost) for topology, cost in record["costs"].items()},
            "mixed": bool(record["mixed"]),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"{directory} is not the directory of an item ({reason(error)})"
        raise UserError(f"{fault}: reproduce the item in another one") from error


def read_costs(file: Path) -> dict[str, float]:
    """Return the step times over Pre-Norm's, with plain operators, of a file of `benchmarks/topology_cost.py`."""
    try:
        rows = decode_json(file.read_bytes())["rows"]
        return {
            row["topology"]: float(row["step_to_pre"]["median"])
            for row in rows
            if row["candidate"] == "plain" and row.get("step_to_pre")
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = f"{file} has no costs of topologies ({reason(error)})"
        raise UserError(f"{fault}: give benchmarks/topology_cost.json") from error
