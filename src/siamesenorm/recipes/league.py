"""What the league adds to the page of an item: every method against Pre-Norm's own curve, its noise and its cost."""

from __future__ import annotations

import math
import statistics

from matplotlib.figure import Figure as Drawing

from siamesenorm.comparison import figure_style, formatting
from siamesenorm.comparison.comparison_tables import METHOD, estimate_text, missing_choice, verdict_entry
from siamesenorm.comparison.experiment_plan import Part
from siamesenorm.comparison.figure_style import Figure, Theme
from siamesenorm.comparison.findings import Choice, Findings, NoiseBand
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import LOWER, Block, Column, Entry, Pill, Row, RowGroup, Statements, Table
from siamesenorm.comparison.report_parts import statements as named_statements
from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, ExperimentResults, RunResult
from siamesenorm.comparison.statistics import Bound, effective_speedup
from siamesenorm.recipes.item_results import ItemResults

LEAGUE, BASELINE = "league", "pre"
ROW = 0.24
"""Inches of a row of the figure."""
IRREDUCIBLE = 0.0
"""Loss, in nats, that the curve of budgets is read above: at this scale none is known."""


def league_sections(results: ItemResults, findings: Findings) -> dict[str, Block]:
    """Return the table of the league with its definitions; none before Pre-Norm has a result."""
    league, pre = findings.results, findings.choices.get(BASELINE)
    if pre is None:
        return {}
    ranked = findings.ranked()
    places = {choice.method for choice in ranked}
    others = [each for each in findings.choices.values() if each.method not in places]
    absent = [method for method in league.methods if method not in findings.choices]
    band = NoiseBand.of(pre)
    curve = budget_curve(results, findings)
    rows = [_row(results, league, choice, pre, band, curve, findings.shared_loss(choice)) for choice in ranked]
    rows += [_row(results, league, choice, pre, band, curve, None) for choice in others]
    columns = (
        METHOD,
        Column("Chosen rate", "the lowest held-out loss of the first seed"),
        Column(f"Held-out loss{LOWER}", "mean ± half width of the 95 % t interval over the reported seeds"),
        Column("Seeds", "reported seeds"),
        Column(
            "Against noise", "place of the loss on the shared seeds against one more run of Pre-Norm", numeric=False
        ),
        Column("Stable rates", "tried rates at which the first seed neither diverged nor failed to learn"),
        Column("Verdict", "at the chosen rate, the worst of the seeds", numeric=False),
        Column("Parameters", "more than Pre-Norm's"),
        Column("Step", "time of a step over Pre-Norm's"),
        Column("Speedup, equal steps", "compute that Pre-Norm needs for the same loss, over what it had"),
        Column("Effective speedup", "the same, divided by the time of a step"),
    )
    failed = [
        (Entry(method), *[Entry(NOTHING)] * 5, missing_choice(league, method), *[Entry(NOTHING)] * 4)
        for method in absent
    ]
    table = Table("The league", columns, (RowGroup("", (*rows, *failed)),)).without_empty_columns()
    return {
        "The league": table,
        "How to read the league": Statements(named_statements(_definitions(results, findings, band, curve))),
    }


def ranking_figure(findings: Findings) -> Figure:
    """Return the figure of all ranked methods: losses of the reported seeds, their mean and its interval."""
    ranked, noise = findings.ranked(), findings.noise
    band = f" The band: where one more seed of {noise.baseline} falls with 95 % probability." if noise else ""
    return Figure(
        name="ranking",
        title="The league",
        caption=f"Held-out loss ({findings.results.unit}) of every method at its own learning rate. Strokes: reported "
        f"seeds; dots: their mean; lines: its 95 % t interval, cut at the edges.{band}",
        alternative="; ".join(f"{each.method} {findings.shared_loss(each):.3f}" for each in ranked),
        draw=lambda theme: draw_ranking(findings, theme),
    )


def draw_ranking(findings: Findings, theme: Theme) -> Drawing:
    """Draw a row for every ranked method, the lowest loss at the top."""
    ranked, noise = findings.ranked(), findings.noise
    styles, names = figure_style.styles_of(findings.results.methods), [each.method for each in ranked]
    height = 0.9 + ROW * len(ranked)
    drawing = Drawing(figsize=(figure_style.WIDTH, height))
    axes = drawing.subplots()
    left = 0.04 + figure_style.name_room(names)
    drawing.subplots_adjust(left=left, right=0.97, top=1 - 0.4 / height, bottom=0.5 / height)
    if noise:
        axes.axvspan(noise.low, noise.high, color=styles[noise.baseline].color(theme), alpha=0.13, linewidth=0)
    values = [value for each in ranked for value in each.losses.values() if math.isfinite(value)]
    margin = 0.04 * (max(values) - min(values))
    axes.set_xlim(min(values) - margin, max(values) + margin)
    for place, choice in enumerate(ranked):
        color = styles[choice.method].color(theme)
        seeds = list(choice.losses.values())
        axes.plot(seeds, [place] * len(seeds), linestyle="", marker="|", markersize=7, color=color)
        if (estimate := choice.held_out_loss) is not None:
            if estimate.ends:
                axes.plot(estimate.ends, [place, place], color=color, linewidth=1.2)
            axes.plot([estimate.mean], [place], marker="o", markersize=5, color=color)
    axes.set_ylim(len(ranked) - 0.5, -0.5)
    axes.set_yticks(range(len(ranked)), [figure_style.shortened(name) for name in names], color=theme.ink)
    axes.set_title("The league", x=(0.02 - left) / (0.97 - left))
    axes.set_xlabel(f"held-out loss ({findings.results.unit})")
    axes.grid(visible=False, axis="y")
    axes.tick_params(length=0)
    return drawing


def budget_runs(results: ItemResults) -> tuple[RunResult, ...]:
    """Return Pre-Norm's runs of all lengths at one learning rate: that of its runs of other lengths than the league's.

    At a rate of its own for each length, the curve would be of several recipes.
    """
    others = [each for name, each in results.grids.items() if results.grid(name).methods == (BASELINE,)]
    runs = [run for each in (*others, results.grids[LEAGUE]) for run in each.runs_of(BASELINE) if run.has_result]
    return tuple(run for run in runs if others and run.learning_rate == runs[0].learning_rate)


def budget_curve(results: ItemResults, findings: Findings) -> dict[float, float]:
    """Return the mean held-out loss of those runs by compute, in steps, over the seeds that rank the methods.

    Of those, over the seeds that all budgets have.
    """
    scores: dict[float, dict[int, float]] = {}
    for run in budget_runs(results):
        if run.seed in findings.shared_seeds:
            scores.setdefault(float(run.steps), {})[run.seed] = run.score
    seeds = set.intersection(*map(set, scores.values())) if scores else set()
    return {steps: statistics.fmean(each[s] for s in seeds) for steps, each in sorted(scores.items()) if seeds}


def step_cost(results: ItemResults, choice: Choice, pre: Choice) -> float | None:
    """Return the time of a step over Pre-Norm's: as measured apart, or of runs that ran alone."""
    if choice.method in results.costs:
        return results.costs[choice.method]
    own, base = (each.median(lambda run: run.step_seconds) for each in (choice, pre))
    return own / base if results.grids[LEAGUE].plan.jobs == 1 and not results.costs and own and base else None


def _row(
    results: ItemResults,
    league: ExperimentResults,
    choice: Choice,
    pre: Choice,
    band: NoiseBand | None,
    curve: dict[float, float],
    loss: float | None,
) -> Row:
    """Return the row of a method; without a `loss`, because seeds diverged, it has neither a place nor a speedup."""
    cost = step_cost(results, choice, pre)
    speedup = (
        effective_speedup(curve, loss, cost or 1.0, compute=float(pre.selection.steps), irreducible=IRREDUCIBLE)
        if len(curve) > 2 and pre.selection.steps and loss is not None
        else None
    )
    place = NOTHING if band is None or loss is None else band.place(loss).removesuffix(" noise")
    first = [run for run in league.runs_of(choice.method) if run.part is Part.SELECTION and run.complete]
    stable = [run for run in first if run.word not in (DIVERGED, NOT_LEARNED)]
    more = (choice.selection.parameters or 0) / (pre.selection.parameters or 1) - 1
    sign = f"{speedup.bound} " if speedup and speedup.bound is not Bound.EXACT else ""
    return (
        Entry(choice.method),
        Entry(formatting.rate(choice.learning_rate), None if choice.edge is None else Pill("edge", choice.edge)),
        Entry(estimate_text(choice.held_out_loss, ".4f")),
        Entry(str(len(choice.losses))),
        Entry(place),
        Entry(f"{len(stable)} of {len(first)}"),
        verdict_entry(choice),
        Entry(formatting.percent(more)),
        Entry(NOTHING if cost is None else f"{cost:.2f}×"),
        Entry(NOTHING if speedup is None else f"{sign}{speedup.at_equal_step_cost:.2f}×"),
        Entry(NOTHING if speedup is None or cost is None else f"{sign}{speedup.ratio:.2f}×"),
    )


def _definitions(
    results: ItemResults, findings: Findings, band: NoiseBand | None, curve: dict[float, float]
) -> dict[str, str]:
    seeds = formatting.listed([str(seed) for seed in sorted(findings.shared_seeds)])
    shared = f"seeds {seeds}, which all methods have" if seeds else "the seed that chose the rates"
    between = f"between {band.low:.4f} and {band.high:.4f} here" if band else "not known before two seeds have ended"
    points = ", ".join(f"{steps:g} steps {loss:.4f}" for steps, loss in curve.items())
    rate = ", ".join(dict.fromkeys(formatting.rate(run.learning_rate) for run in budget_runs(results)))
    return {
        "Order": f"By the mean held-out loss over {shared}; methods of which a seed diverged come last. Neighbours are "
        "not shown to differ; tests against the baselines are below.",
        "Noise": f"The interval in which the loss of one more run of Pre-Norm falls, {between}.",
        "Speedup": f"From Pre-Norm's own losses by number of steps ({points}), on the same seeds, all at the learning "
        f"rate {rate}, interpolated in their logarithms above an irreducible loss of {IRREDUCIBLE:g}. A loss outside "
        "of them gives a bound."
        if curve
        else "Not known before Pre-Norm has been trained with other numbers of steps.",
        "Step": "Measured apart from the runs, of another, larger model on one thread of a CPU with plain operators; "
        "kernels on a GPU differ."
        if results.costs
        else "The median over the faster half of the steps, where every run was trained alone on its device.",
    }
