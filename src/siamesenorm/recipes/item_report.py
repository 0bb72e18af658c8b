"""The page of an item: what the paper did, what was run here, both beside each other, and what became of the claims."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from siamesenorm.analysis import available_analyses
from siamesenorm.comparison import comparison_report, formatting
from siamesenorm.comparison.accuracy_tables import accuracy_tables
from siamesenorm.comparison.analysis_figures import analysis_figures
from siamesenorm.comparison.analysis_report import analysis_table
from siamesenorm.comparison.comparison_tables import (
    METHOD,
    against_baselines,
    at_chosen_rates,
    by_kind,
    by_learning_rate,
    runs_csv,
)
from siamesenorm.comparison.curve_figures import curve_figures
from siamesenorm.comparison.figure_style import Figure
from siamesenorm.comparison.findings import Findings, find
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.rate_figures import rate_figures
from siamesenorm.comparison.report_parts import (
    Block,
    Column,
    Entry,
    Gallery,
    Pill,
    Report,
    Row,
    RowGroup,
    Statement,
    Statements,
    Table,
    statements,
)
from siamesenorm.comparison.results import ExperimentResults, Record
from siamesenorm.recipes.claims import MEASURES, ClaimOutcome, JudgedClaim, newest_record
from siamesenorm.recipes.item_results import ItemResults
from siamesenorm.recipes.league import LEAGUE, league_sections, ranking_figure
from siamesenorm.recipes.published_table import published_of, published_table, sources
from siamesenorm.recipes.run_costs import count_items, model_cost
from siamesenorm.recipes.scales import Scale
from siamesenorm.training.config import RunConfig

WORDS = {
    ClaimOutcome.CONFIRMED: "The Holm interval of our runs excludes zero, in the claimed direction.",
    ClaimOutcome.NOT_SEEN: "The Holm interval includes zero: a gap within noise. It says nothing against the claim at "
    "the paper's scale.",
    ClaimOutcome.TOO_FEW_SEEDS: "Fewer than two seeds have what is measured: there is no interval.",
    ClaimOutcome.CONTRADICTED: "The Holm interval excludes zero, in the other direction, at this scale.",
    ClaimOutcome.ON_EVERY_SEED: "Of what is yes or no for a run: as published on every one of at least two seeds. No "
    "interval follows from equal answers.",
    ClaimOutcome.ON_SOME_SEEDS: "Of what is yes or no for a run: as published on some of the seeds.",
    ClaimOutcome.ON_NO_SEED: "Of what is yes or no for a run: as published on none of at least two seeds.",
    ClaimOutcome.NO_RATE: "A method of the claim diverged at every learning rate: none could be chosen for it.",
    ClaimOutcome.NOT_RUN: "A run that the claim needs was not trained, or not evaluated.",
}


NOT_RUN_HERE = " The paper's own settings (--scale full) are configurations that build; they were not run here."


def item_report(results: ItemResults, *, title: str = "") -> Report:
    """Return the page of an item."""
    item, judged = results.item, results.judged()
    findings = {name: find(each) for name, each in results.grids.items()}
    published = published_table(results)
    chosen = {name: each for name, each in findings.items() if results.grid(name).chosen}
    leading = tuple(leaders(chosen)) if item.ranked else ()
    sections: dict[str, Block] = {
        "What came out": Statements((*leading, *statements(summary(judged))), tone="conclusions"),
        "What the outcomes mean": Statements(statements(outcome_words(judged))),
        "Claims": claims_table(judged),
        published.title: published,
        "Sources of the published numbers": Statements(tuple(sources(published_of(results)))),
        **(league_sections(results, findings[LEAGUE]) if item.ranked and LEAGUE in findings else {}),
        **{table.title: table for table in grid_tables(results, findings)},
        "The methods": Statements(methods(findings)),
        "Figures": Gallery(tuple(item_figures(results, findings))),
        "How far the scale differs": scale_table(results),
        "Definitions": Statements(statements(definitions(results))),
        "Verdicts": Statements(comparison_report.VERDICTS),
        "The runs": runs_table(results),
        **comparison_report.closing_sections(together(results)),
    }
    return Report(
        title=title or item.heading,
        subject=(f"Published: {item.published}", *subject(results)),
        sections={title: block for title, block in sections.items() if getattr(block, "groups", True)},
        records={f"{results.grid(name).directory}.csv": runs_csv(each) for name, each in results.grids.items()},
    )


def subject(results: ItemResults) -> Iterator[str]:
    """Yield the data of the grids, each once, and the model and the steps of every grid."""
    data: dict[str, list[str]] = {}
    for name, each in results.grids.items():
        data.setdefault(comparison_report.data_sentence(each), []).append(name)
    for sentence, names in data.items():
        yield sentence if len(data) == 1 else f"{_named(formatting.listed(names))}{sentence}"
    for name, each in results.grids.items():
        yield f"{_named(name)}{comparison_report.budget_sentence(each.runs[0])}"


def together(results: ItemResults) -> ExperimentResults:
    """Return the runs of all grids, each once, with the commands of all plans."""
    grids = list(results.grids.values())
    commands = dict.fromkeys(each.plan.command for each in grids if each.plan.command)
    return dataclasses.replace(
        grids[0],
        plan=dataclasses.replace(grids[0].plan, command="\n".join(commands)),
        runs=tuple({run.identity: run for each in grids for run in each.runs}.values()),
        missing={name: why for each in grids for name, why in each.missing.items()},
    )


def methods(findings: dict[str, Findings]) -> tuple[Statement, ...]:
    """Return what the names of the methods of all grids mean."""
    notes = {note.topic: note for each in findings.values() for note in comparison_report.method_notes(each)}
    return tuple(notes.values())


def leaders(findings: dict[str, Findings]) -> Iterator[Statement]:
    """Yield for each grid with chosen rates the method with the lowest loss, and which ones are outside the noise."""
    for name, each in findings.items():
        if not (each.results.plan.comparisons and each.ranked()):
            continue
        lowest = comparison_report.conclusions(each)[0]
        yield dataclasses.replace(lowest, topic=f"{_named(name)}{lowest.topic[0].lower()}{lowest.topic[1:]}")
        if (noise := each.noise) is not None:
            places: dict[str, list[str]] = {}
            for choice in each.ranked():
                if choice.method != noise.baseline and choice.held_out_loss:
                    places.setdefault(noise.place(choice.held_out_loss.mean), []).append(choice.method)
            found = "; ".join(f"{place}: {formatting.listed(names)}" for place, names in places.items())
            yield Statement(
                f"{_named(name)}noise",
                f"One more seed of {noise.baseline} falls between {noise.low:.4f} and {noise.high:.4f}. {found}.",
            )


def summary(judged: tuple[JudgedClaim, ...]) -> dict[str, str]:
    """Return for each outcome the claims that have it."""
    counts = Counter(each.outcome for each in judged)
    return {
        f"{outcome.capitalize()}: {counts[outcome]} of {len(judged)}": "; ".join(
            each.claim.statement for each in judged if each.outcome is outcome
        )
        + "."
        for outcome in ClaimOutcome
        if counts[outcome]
    }


def outcome_words(judged: tuple[JudgedClaim, ...]) -> dict[str, str]:
    """Return what the outcomes mean that the claims of the page have."""
    found = {each.outcome for each in judged}
    return {outcome.capitalize(): text for outcome, text in WORDS.items() if outcome in found}


def claims_table(judged: tuple[JudgedClaim, ...]) -> Table:
    """Build the table of claims: the published effect, ours with both intervals, and the outcome."""
    columns = (
        Column("Claim", "what the paper reports", numeric=False),
        Column("Outcome", "by the Holm interval, or by the seeds where a run says yes or no", numeric=False),
        Column("Ours", "the mean over paired seeds, or the seeds on which it is as published"),
        Column("Published", "the effect in the paper: method minus baseline, in nats from the perplexities"),
        Column("Holm interval", "widened: the probability that any interval of its family misses is at most 5 %"),
        Column("95 % t interval", "of this effect alone"),
        Column("p", "two-sided, of a t test over the paired seeds"),
        Column("p (Holm)", "corrected for all claims of the paper here, or all hypotheses of this project"),
        Column("Seeds", "seeds that all cells of the claim have"),
        Column("Direction", "whether the mean has the published sign", numeric=False),
        Column("Measure", "what is compared", numeric=False),
    )
    rows = tuple(map(_claim_row, judged))
    return Table("Claims", columns, (RowGroup("", rows),) if rows else ())


def _claim_row(each: JudgedClaim) -> Row:
    claim, measure, interval = each.claim, MEASURES[each.claim.measure], each.interval
    unit = claim.published[1] if claim.published else measure.unit
    decimals = 2 if claim.published else measure.decimals
    stated = f"{formatting.signed(each.published, decimals)} {unit}".strip() if each.published is not None else ""
    ours = NOTHING if interval is None else f"{formatting.signed(interval.mean, measure.decimals)} {measure.unit}"
    if each.counts:
        stated, seeds = "", len(each.effect.by_seed)
        ours = f"{each.seeds_as_published} of {formatting.plural(seeds, 'seed')}" if seeds else NOTHING
    direction = {None: NOTHING, True: "same", False: "other"}[each.same_direction]
    return (
        Entry(claim.statement),
        Entry(pill=Pill(each.outcome, each.outcome)),
        Entry(ours.strip()),
        Entry("; ".join(filter(None, (stated, *each.published_verdicts))) or NOTHING),
        Entry(NOTHING if each.corrected is None else formatting.interval(each.corrected)),
        Entry(NOTHING if interval is None else formatting.interval(interval)),
        Entry(NOTHING if each.decision is None else formatting.p_value(each.effect.p_value or 0.0)),
        Entry(NOTHING if each.decision is None else formatting.p_value(each.decision.adjusted_p)),
        Entry(str(len(each.effect.by_seed))),
        Entry(direction),
        Entry(measure.label),
    )


def grid_tables(results: ItemResults, findings: dict[str, Findings]) -> Iterator[Table]:
    """Yield the tables of every grid: by learning rate, and before it, where rates are chosen, those at them."""
    for name, each in findings.items():
        tables = [by_learning_rate(each), *accuracy_tables(each), *numbers_inside(each, results.grid(name).evaluations)]
        if results.grid(name).chosen:
            tables = [at_chosen_rates(each), against_baselines(by_kind(each.comparisons), each.results.unit), *tables]
        for table in tables:
            yield Table(f"{_named(name)}{table.title}", table.columns, table.groups)


def item_figures(results: ItemResults, findings: dict[str, Findings]) -> Iterator[Figure]:
    """Yield the figures: loss and gradient norm at each rate, the frontier where rates are chosen, and analyses."""
    if results.item.ranked and LEAGUE in findings and findings[LEAGUE].ranked():
        yield ranking_figure(findings[LEAGUE])
    for name, each in findings.items():
        grid = results.grid(name)
        rates = grid.learning_rates(results.item.workload(grid, results.scale))
        curves = [] if grid.chosen else [figure for rate in rates for figure in curve_figures(each, rate)]
        for figure in [
            *(rate_figures(each) if grid.chosen else ()),
            *curves,
            *_analysis_figures(each, grid.evaluations),
        ]:
            yield dataclasses.replace(figure, name=f"{grid.directory}-{figure.name}")


def _analysis_figures(findings: Findings, evaluations: tuple[str, ...]) -> Iterator[Figure]:
    """Yield the figures of analyses."""
    for records in _analysis_records(findings, evaluations).values():
        yield from analysis_figures(records)


def numbers_inside(findings: Findings, evaluations: tuple[str, ...]) -> Iterator[Table]:
    """Yield the table of the numbers of analyses, by method."""
    if records := _analysis_records(findings, evaluations):
        methods = [each for each in findings.results.methods if any(each in found for found in records.values())]
        yield analysis_table(records, methods)


def _analysis_records(findings: Findings, evaluations: tuple[str, ...]) -> dict[str, dict[str, Record]]:
    """Return the records by analysis and method, of the first seed that has one."""
    records: dict[str, dict[str, Record]] = {}
    for analysis in set(evaluations) & set(available_analyses()):
        for run in findings.results.runs:
            if record := newest_record(run, analysis):
                records.setdefault(analysis, {}).setdefault(run.method, record)
    return {analysis: records[analysis] for analysis in evaluations if analysis in records}


def scale_table(results: ItemResults) -> Table:
    """Build the table of parameters, items and operations here and in the paper."""
    columns = (
        Column("Grid", "the runs", numeric=False),
        *(
            Column(f"{what}, {where}", f"{what} of a run with Pre-Norm, {where}")
            for what in ("Parameters", "Items")
            for where in ("here", "paper")
        ),
        Column("Operations", "of a run here, as a part of those of the paper's"),
    )
    rows = []
    for name, each in results.grids.items():
        grid = results.grid(name)
        ours = RunConfig.from_json(each.runs[0].config)
        paper = results.item.workload(grid, Scale.FULL)
        theirs = grid.template(paper, paper.template())
        mine, full = model_cost(ours), model_cost(theirs)
        part = mine.operations_per_sample * ours.batch * ours.steps
        whole = full.operations_per_sample * theirs.batch * theirs.steps
        rows.append(
            (
                Entry(name or results.item.name),
                Entry(formatting.count(mine.parameters)),
                Entry(formatting.count(full.parameters)),
                Entry(formatting.count(count_items(ours))),
                Entry(formatting.count(count_items(theirs))),
                Entry(f"1 / {formatting.count(whole / part)}"),
            )
        )
    return Table("How far the scale differs", columns, (RowGroup("", tuple(rows)),))


def definitions(results: ItemResults) -> dict[str, str]:
    """Return what the tables say, for a reader who has not read the paper."""
    environments = [each for grid in results.grids.values() for run in grid.runs for each in run.environments[-1:]]
    compiled = sum(bool(each.get("compiled")) for each in environments)
    found = {
        "Effect": "A measure of the method minus that of the baseline on the same seed, whose runs have the same data "
        "order and, up to the factors that a topology declares, the same initial weights. Published perplexities are "
        "compared as their logarithms, in nats per token; the paper's are of the training data, ours held out.",
        "A run that diverged": "In claims, counts with the loss of a model that has learned nothing. Means of tables "
        "leave it out, and say so by their verdict.",
        "Seeds": "At a given rate all seeds count. Where each method has the best rate of its own, the seed that chose "
        "the rate does not count. Claims and results by learning rate are over the seeds that all their methods have; "
        "published and ours over all seeds of each method.",
        "The scale": f"{results.scale}." + (NOT_RUN_HERE if results.scale is not Scale.FULL else ""),
    }
    if any(grid.evaluations for grid in results.item.grids):
        found["Analyses"] = (
            "Figures and numbers of what is inside a model are of its first seed; claims are of all seeds."
        )
    if 0 < compiled < len(environments):
        found["Kernels"] = (
            f"{compiled} of the {len(environments)} runs were compiled, the others not: numbers differ by rounding, "
            "times and memory are not comparable."
        )
    return found


def runs_table(results: ItemResults) -> Table:
    """Build the table of all runs with their identities and commits."""
    columns = (
        METHOD,
        Column("Learning rate", "the peak"),
        Column("Runs", "seed and identity, whose first twelve digits name the run's directory", numeric=False),
        Column("Commit", "of the code that trained them", numeric=False),
    )
    groups = []
    for name, each in results.grids.items():
        cells: dict[tuple[str, float], list[tuple[str, str]]] = {}
        for run in each.runs:
            commit = next((str(e["commit"]) for e in run.environments if e.get("commit")), NOTHING)
            cells.setdefault((run.method, run.learning_rate), []).append((f"{run.seed}: {run.identity[:12]}", commit))
        rows = tuple(
            (
                Entry(method),
                Entry(formatting.rate(rate)),
                Entry(", ".join(run for run, _ in runs)),
                Entry(", ".join(dict.fromkeys(commit for _, commit in runs))),
            )
            for (method, rate), runs in cells.items()
        )
        groups.append(RowGroup(name, rows))
    return Table("The runs", columns, tuple(groups))


def _named(grid: str) -> str:
    return f"{grid.capitalize()}: " if grid else ""
