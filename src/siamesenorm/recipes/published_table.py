"""The table of an item's published numbers beside ours, and where they are from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from siamesenorm.comparison import formatting
from siamesenorm.comparison.comparison_tables import METHOD, estimate_text, verdict_entry
from siamesenorm.comparison.findings import Outcome
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import Column, Entry, Pill, Row, RowGroup, Statement, Table
from siamesenorm.comparison.statistics import t_interval
from siamesenorm.recipes.claims import REDUCTIONS, Cell
from siamesenorm.recipes.item_results import ItemResults
from siamesenorm.recipes.published_numbers import PublishedRow, find_published, published_sources
from siamesenorm.tasks.task import Metric

NAMES = {"ppl": "PPL", "fid": "FID", "ppl_reduction": "PPL lower by"}
REDUCED = {"ppl_reduction": "perplexity"}
"""The metrics of which published numbers are reductions."""


def published_of(results: ItemResults) -> dict[str, list[PublishedRow]]:
    """Return the published rows of every grid at every rate, by what the rows have in common."""
    groups: dict[str, list[PublishedRow]] = {}
    for name in results.grids:
        grid = results.grid(name)
        rates = results.item.workload(grid, results.scale).rates
        positions: list[int | None] = [None] if grid.chosen else list(grid.rates or range(len(rates)))
        for position in positions:
            rows = [row for m in grid.methods if (row := find_published(results.item.name, name, m, position))]
            rate = None if position is None else rates[min(position, len(rates) - 1)]
            at = "own best rate" if rate is None else f"learning rate {formatting.rate(rate)}"
            groups[", ".join(filter(None, (name, at)))] = rows
    return {title: rows for title, rows in groups.items() if rows}


def sources(groups: Mapping[str, Sequence[PublishedRow]]) -> Iterator[Statement]:
    """Yield where published numbers are from, with the tables, and a link to the paper."""
    tables: dict[str, dict[str, None]] = {}
    for row in (row for rows in groups.values() for row in rows):
        tables.setdefault(row.source, {})[row.table] = None
    for source, names in tables.items():
        address = published_sources().get(source)
        link = None if address is None else (address.removeprefix("https://"), address)
        yield Statement(source, f"{'; '.join(names)}.", link)


def published_table(results: ItemResults) -> Table:
    """Build the table of published numbers beside ours, at every rate of every grid that has some."""
    groups = published_of(results)
    metrics = list({metric.name: metric for each in results.grids.values() for metric in each.metrics}.values())
    values = tuple(dict.fromkeys(value for rows in groups.values() for row in rows for value in row.values))
    paper = [Column(f"Paper, {NAMES.get(each, each.replace('_', ' '))}", "as it is published") for each in values]
    reductions = [each for each in values if each in REDUCED]
    columns = (
        METHOD,
        *paper[:1],
        *(
            Column(
                f"Ours, {NAMES[each]}",
                "than that of the baseline on the same seed, mean ± half width of the 95 % t interval",
            )
            for each in reductions
        ),
        *(Column(f"Ours, {metric.label}", "held out, mean ± half width of the 95 % t interval") for metric in metrics),
        Column("Paper, verdict", "diverged, or with loss spikes", numeric=False),
        Column("Ours, verdict", "the worst of the seeds", numeric=False),
        Column("Seeds", "seeds of our runs"),
        *paper[1:],
        Column("Setting of the paper", "table, learning rate and tokens", numeric=False),
        Column("Source", "where the published number is from", numeric=False),
    )
    shown = (
        RowGroup(title, tuple(_published_row(results, row, values, metrics) for row in rows))
        for title, rows in groups.items()
    )
    return Table("Published and ours", columns, tuple(shown))


def _published_row(results: ItemResults, row: PublishedRow, values: tuple[str, ...], metrics: Sequence[Metric]) -> Row:
    runs = tuple((results.runs_in(Cell(row.method, row.grid, row.rate)) or {}).values())
    outcome = Outcome(method=row.method, learning_rate=runs[0].learning_rate if runs else 0.0, runs=runs)
    stated = [Entry(f"{row.values[name]:g}" if name in row.values else NOTHING) for name in values]
    return (
        Entry(row.method),
        *stated[:1],
        *(Entry(_reduction(results, row, REDUCED[name], REDUCTIONS[name])) for name in values if name in REDUCED),
        *(Entry(estimate_text(outcome.metric(each.name), each.format)) for each in metrics),
        Entry(pill=Pill(row.verdict, row.verdict)) if row.verdict else Entry(NOTHING),
        verdict_entry(outcome),
        Entry(str(len(outcome.complete))),
        *stated[1:],
        Entry(f"{row.table}, {row.setting}"),
        Entry(row.source),
    )


def _reduction(results: ItemResults, row: PublishedRow, metric: str, baseline: str) -> str:
    """Write by how much the method of a row lowers a metric of the baseline, over the seeds on which both have it."""
    if row.method == baseline:
        return NOTHING
    ours, base = (
        {
            seed: value
            for seed, run in (results.runs_in(Cell(method, row.grid, row.rate)) or {}).items()
            if run.has_result and (value := run.held_out.get(metric)) is not None
        }
        for method in (row.method, baseline)
    )
    differences = [base[seed] - ours[seed] for seed in sorted(ours.keys() & base.keys())]
    return estimate_text(t_interval(differences) if differences else None, ".2f")
