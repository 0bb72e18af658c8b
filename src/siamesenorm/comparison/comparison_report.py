"""The report of an experiment that chooses learning rates, and that of a single run, as lists of sections."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from siamesenorm.comparison import quantities, summary
from siamesenorm.comparison.figures import curve_figures, rate_figures
from siamesenorm.comparison.findings import Comparison, Findings, find
from siamesenorm.comparison.result_tables import against_baselines, at_chosen_rates, by_kind, by_learning_rate
from siamesenorm.comparison.results import ExperimentResults, RunResult
from siamesenorm.comparison.sections import Code, Gallery, Report, ReportSection, Statement, Statements
from siamesenorm.comparison.tables import Table

Row = dict[str, object]

COMPARISON_COLUMNS = (
    *("method", "baseline", "kind", "learning_rate", "seeds", "difference", "t_low", "t_high", "p_value"),
    *("holm_low", "holm_high", "holm_p_value", "conclusion"),
)


def comparison_tables(findings: Findings) -> tuple[Table, ...]:
    """Return the tables of a comparison; the one of differences is left out where nothing is compared."""
    groups = by_kind(findings.comparisons)
    differences = (against_baselines(groups, findings.results.unit),) if groups else ()
    return (at_chosen_rates(findings), *differences, by_learning_rate(findings))


def comparison_report(findings: Findings, *, title: str = "") -> Report:
    """Return the report of a comparison."""
    results = findings.results
    best, *differences, by_rate = comparison_tables(findings)
    sections = [
        ReportSection("What came out", (Statements(items=summary.conclusions(findings), tone="conclusions"),)),
        ReportSection(best.title, (best,)),
        *(ReportSection(table.title, (table,)) for table in differences),
        ReportSection("Where each method is stable", (Gallery(figures=rate_figures(findings)),)),
        ReportSection(by_rate.title, (by_rate,)),
    ]
    for rate in results.learning_rates:
        if figures := curve_figures(findings, rate):
            heading = f"Training at learning rate {quantities.rate(rate)}"
            sections.append(ReportSection(heading, (Gallery(figures=figures),)))
    sections.append(ReportSection("How to read this", (Statements(items=summary.definitions(findings)),)))
    if notes := summary.method_notes(findings):
        sections.append(ReportSection("The methods", (Statements(items=notes),)))
    sections += closing_sections(results)
    return Report(
        title=title or summary.title_of(findings),
        subject=summary.subject(findings),
        sections=tuple(sections),
        records={"results.csv": runs_csv(results), "comparisons.csv": comparisons_csv(findings.comparisons)},
    )


def run_report(results: ExperimentResults, *, title: str = "") -> Report:
    """Return the report of a single run: its verdict, its numbers, its curves."""
    (run,) = results.runs
    findings = find(results)
    figures = curve_figures(findings, run.learning_rate)
    sections = [ReportSection("What came out", (Statements(items=_run_statements(run), tone="conclusions"),))]
    if figures:
        sections.append(ReportSection("Training", (Gallery(figures=figures),)))
    sections.append(ReportSection("The verdicts", (Statements(items=summary.VERDICTS),)))
    return Report(
        title=title or run.planned.name,
        subject=(summary.budget_sentence(run),),
        sections=(*sections, *closing_sections(results)),
        records={"results.csv": runs_csv(results)},
    )


def closing_sections(results: ExperimentResults) -> list[ReportSection]:
    """Return what ends every report: unfinished runs, the command and the environment, where there are any."""
    sections = []
    if absent := summary.unfinished(results):
        sections.append(ReportSection("Unfinished runs", (Statements(items=absent),)))
    if results.plan.command:
        sections.append(ReportSection("How to repeat it", (Code(text=results.plan.command),)))
    if entries := summary.environment(results.runs):
        sections.append(ReportSection("Environment", (Statements(items=entries),)))
    return sections


def runs_csv(results: ExperimentResults) -> str:
    """Return one row a run, the unfinished and the missing included; an unknown number is an empty field."""
    missing: list[Row] = [{"run": run.path.name, "status": "missing", "reason": run.reason} for run in results.missing]
    rows = [_run_row(run) for run in results.runs]
    return _csv(list(rows[0]), [*rows, *missing])


def comparisons_csv(comparisons: Sequence[Comparison]) -> str:
    """Return one row a comparison: paired difference, both intervals, Holm's p-value, conclusion."""
    return _csv(COMPARISON_COLUMNS, [_comparison_row(each) for each in comparisons])


def _run_statements(run: RunResult) -> tuple[Statement, ...]:
    statements = []
    if run.verdict is None:
        statements.append(Statement(topic="Unfinished", text=f"{run.steps_done:,} of {run.steps:,} steps."))
    else:
        statements.append(Statement(topic="Verdict", text=f"{run.verdict.sentence()}."))
    for metric in run.metrics:
        if (value := run.held_out.get(metric.name)) is not None:
            at = f", at step {run.held_out_step:,}" if run.held_out_step is not None else ""
            text = f"{quantities.formatted(value, metric.format)}{at}."
            statements.append(Statement(topic=f"Held-out {metric.label}", text=text))
    if run.step_seconds is not None:
        text = f"{quantities.seconds(run.step_seconds)}, the median over the faster half of the steps."
        statements.append(Statement(topic="Step time", text=text))
    return tuple(statements)


def _run_row(run: RunResult) -> Row:
    return {
        "run": run.path.name,
        "method": run.method,
        "part": run.planned.part,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "status": run.status,
        "verdict": run.word,
        "reason": run.verdict and run.verdict.sentence(),
        "spikes": run.verdict and len(run.verdict.spikes),
        "train_loss": run.train_loss,
        **{f"held_out_{metric.name}": run.held_out.get(metric.name) for metric in run.metrics},
        "held_out_step": run.held_out_step,
        "steps": run.steps,
        "steps_done": run.steps_done,
        "items": run.items,
        "passes_over_data": run.passes_over_data,
        "parameters": run.parameters,
        "flops_per_item": run.flops_per_item,
        "step_seconds": run.step_seconds,
        "peak_memory_bytes": run.peak_memory_bytes,
    }


def _comparison_row(comparison: Comparison) -> Row:
    interval, corrected = comparison.interval, comparison.corrected
    return {
        "method": comparison.method,
        "baseline": comparison.baseline,
        "kind": comparison.kind,
        "learning_rate": comparison.learning_rate,
        "seeds": " ".join(str(seed) for seed in comparison.difference.by_seed),
        "difference": interval and interval.mean,
        "t_low": interval and interval.low,
        "t_high": interval and interval.high,
        "p_value": comparison.difference.p_value,
        "holm_low": corrected and corrected.low,
        "holm_high": corrected and corrected.high,
        "holm_p_value": comparison.decision and comparison.decision.adjusted_p,
        "conclusion": comparison.conclusion,
    }


def _csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
