"""What can be reproduced at a scale: runs, how many of them have ended, and what the others cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from siamesenorm.comparison import formatting
from siamesenorm.comparison.experiment_plan import find_run
from siamesenorm.recipes.item import Item
from siamesenorm.recipes.run_costs import count_operations
from siamesenorm.recipes.scales import Scale, Workload
from siamesenorm.training.config import RunConfig
from siamesenorm.training.run_directory import RunDirectory

DEVICES = {Scale.MINI: "core", Scale.SMALL: "H100", Scale.FULL: "H100"}
NOTES = {
    Scale.MINI: "",
    Scale.SMALL: ", while the runs that share it keep it busy",
    Scale.FULL: ". These are the papers' own settings: they were not run here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemState:
    """An item at a scale: its runs, those that have ended, and the hours of the others on one core, or one GPU.

    `shared` runs belong to an earlier item, too, and cost nothing here. `available` is False where nothing is trained.
    """

    item: Item
    available: bool
    runs: int
    ended: int
    shared: int
    hours: float


def list_items(
    items: Sequence[Item], scale: Scale, stores: Sequence[Path], data_of: Callable[[Workload], Any]
) -> Iterator[ItemState]:
    """Yield the state of each item; `data_of` returns the path of the data, or None for those of the committed runs.

    Where runs will choose a rate, the middle one is assumed; extensions of the rates are not counted.
    """
    seen: set[str] = set()
    for item in items:
        runs: dict[str, tuple[RunConfig, Workload]] = {}
        for grid in item.grids_at(scale):
            workload = item.workload(grid, scale)
            template = grid.template(workload, workload.template(data_of(workload)))
            runs |= {c.identity[:12]: (c, workload) for _, c in grid.expected_runs(workload, template)}
        ended = {name for name in runs if RunDirectory(find_run(stores, name)).verdict_file.is_file()}
        missing = [each for name, each in runs.items() if name not in seen | ended]
        yield ItemState(
            item=item,
            available=bool(runs) or not item.grids,
            runs=len(runs),
            ended=len(ended),
            shared=len(seen & runs.keys()),
            hours=sum(count_operations(config) / workload.speed for config, workload in missing) / 3600,
        )
        seen |= runs.keys()


def items_table(states: Sequence[ItemState], scale: Scale) -> Table:
    """Return the table of items for a terminal, with the sum of what they cost."""
    table = Table(title=f"Items at the scale {scale}", title_justify="left", header_style="bold")
    for title in ("item", "from", "shows", "runs", "ended", "shared", f"left ({DEVICES[scale]})"):
        text = title in ("item", "from", "shows")
        table.add_column(title, justify="left" if text else "right", overflow="fold", no_wrap=title == "item")
    for each in states:
        cost = _hours(each.hours) if each.available else "not at this scale"
        numbers = map(str, (each.runs, each.ended, each.shared))
        table.add_row(each.item.name, each.item.paper, each.item.title, *numbers, cost)
    table.add_section()
    table.add_row("all", "", "", "", "", "", _hours(sum(each.hours for each in states)))
    table.caption = (
        "shared: runs already counted for an earlier item; left: estimated hours of one "
        f"{DEVICES[scale]} of the unfinished runs{NOTES[scale]}"
    )
    table.caption_justify = "left"
    return table


def _hours(value: float) -> str:
    if value >= 1000:
        return f"{formatting.count(value)} h"
    return f"{value:.1f} h" if value >= 10 or not value else f"{formatting.significant(value, 2)} h"
