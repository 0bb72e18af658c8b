"""What can be reproduced at a scale: runs, how many of them have ended, and what the others cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.comparison import formatting
from siamesenorm.comparison.experiment_plan import find_run
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import Column, Entry, Pill, RowGroup, Table
from siamesenorm.recipes.item import Item
from siamesenorm.recipes.prices import count_operations
from siamesenorm.recipes.scales import WORKLOADS, Scale, Workload
from siamesenorm.training.config import RunConfig
from siamesenorm.training.run_directory import RunDirectory

DEVICES = {Scale.MINI: "core", Scale.SMALL: "H100", Scale.FULL: "H100"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An item at a scale: its runs, those that have ended, and the hours of the others on one core, or one GPU.

    `shared` runs belong to an earlier item, too, and cost nothing here. `available` is False where nothing is trained.
    """

    item: Item
    available: bool
    runs: int
    ended: int
    shared: int
    hours: float


def list_offers(
    items: Sequence[Item], scale: Scale, stores: Sequence[Path], data_of: Callable[[Workload], Any]
) -> Iterator[Offer]:
    """Yield an offer for each item; `data_of` returns the path of the data, or None for those of the committed runs.

    The middle of the rates stands in where runs will choose one, and extensions of the rates are not counted.
    """
    seen: set[str] = set()
    for item in items:
        runs: dict[str, tuple[RunConfig, Workload]] = {}
        for grid in item.grids:
            if workload := WORKLOADS[grid.domain].get(scale):
                template = grid.template(workload, workload.template(data_of(workload)))
                runs |= {c.identity[:12]: (c, workload) for _, c in grid.expected_runs(workload, template)}
        ended = {name for name in runs if RunDirectory(find_run(stores, name)).verdict_file.is_file()}
        missing = [each for name, each in runs.items() if name not in seen | ended]
        yield Offer(
            item=item,
            available=bool(runs) or not item.grids,
            runs=len(runs),
            ended=len(ended),
            shared=len(seen & runs.keys()),
            hours=sum(count_operations(config) / workload.speed for config, workload in missing) / 3600,
        )
        seen |= runs.keys()


def offers_table(offers: Sequence[Offer], scale: Scale) -> Table:
    """Build the table of items, with the sum of what they cost."""
    columns = (
        Column("Item", "name on the command line", numeric=False),
        Column("From", "paper, and table or figure", numeric=False),
        Column("Shows", "what is compared", numeric=False),
        Column("Runs", "all runs of the item"),
        Column("There", "runs that have ended"),
        Column("Shared", "runs that an earlier item has, too"),
        Column("Left", f"estimated hours of one {DEVICES[scale]} for the others"),
    )
    rows = [
        (
            Entry(each.item.name),
            Entry(each.item.paper),
            Entry(each.item.title),
            *(Entry(str(n)) for n in (each.runs, each.ended, each.shared)),
            Entry(_hours(each.hours)) if each.available else Entry(pill=Pill("none", "not at this scale")),
        )
        for each in offers
    ]
    total = (Entry("all"), Entry(""), Entry(""), *[Entry(NOTHING)] * 3, Entry(_hours(sum(o.hours for o in offers))))
    return Table(f"Items at the scale {scale}", columns, (RowGroup("", (*rows, total)),))


def _hours(value: float) -> str:
    return f"{formatting.count(value)} h" if value >= 1000 else f"{value:.1f} h"
