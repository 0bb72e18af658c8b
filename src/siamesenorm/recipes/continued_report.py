"""The report of continued models: the bases, and each variant against its base continued unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from siamesenorm.comparison import quantities, summary
from siamesenorm.comparison.comparison_report import closing_sections, comparisons_csv, runs_csv
from siamesenorm.comparison.findings import Comparison, Conclusion, Outcome, corrected_together
from siamesenorm.comparison.plan import Part, PlannedComparison
from siamesenorm.comparison.quantities import NOTHING
from siamesenorm.comparison.result_tables import VERDICT, against_baselines, verdict_pill
from siamesenorm.comparison.results import ExperimentResults, RunResult
from siamesenorm.comparison.sections import Report, ReportSection, Statement, Statements
from siamesenorm.comparison.statistics import Estimate, paired_difference
from siamesenorm.comparison.tables import LOWER, Column, Entry, Group, Table
from siamesenorm.errors import UserError

BASE = Column("Base", "the trained Pre-Norm model, and its attention norm where it is not the usual one", numeric=False)
CONTINUED_AS = Column("Continued as", "topology, and operator where it changes", numeric=False)
LOSS = Column(f"Held-out loss{LOWER}", "mean ± half width of the 95 % t interval over seeds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedVariant:
    """A variant at a rate, and the jump of its loss: before the first step minus that of the base, the largest."""

    base: str
    label: str
    outcome: Outcome
    jump: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedFindings:
    """Everything the report says, derived once; `continuations` are in the order of the plan, the main rate first."""

    results: ExperimentResults
    bases: tuple[Outcome, ...]
    continuations: tuple[ContinuedVariant, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of the continuations, the main one first."""
        return tuple(dict.fromkeys(each.outcome.learning_rate for each in self.continuations))


def find_continued(results: ExperimentResults) -> ContinuedFindings:
    """Derive the findings; all comparisons are corrected together (Holm). Raises UserError where nothing has ended."""
    groups: dict[tuple[float, str], list[RunResult]] = {}
    bases: dict[str, list[RunResult]] = {}
    for run in results.runs:
        if run.complete and run.planned.part is Part.CONTINUED:
            groups.setdefault((run.learning_rate, run.method), []).append(run)
        elif run.complete:
            bases.setdefault(run.method, []).append(run)
    if not groups:
        raise UserError(f"no continuation in {results.path} has ended: train it with --data")
    by_id = {run.identity: run for run in results.runs}
    continuations = []
    for (rate, method), runs in groups.items():
        sources = [by_id[run.base] for run in runs if run.base in by_id]
        continuations.append(
            ContinuedVariant(
                base=sources[0].planned.label if sources else NOTHING,
                label=runs[0].planned.label,
                outcome=Outcome(method=method, learning_rate=rate, runs=tuple(runs)),
                jump=max((_jump(run, by_id) for run in runs), key=abs),
            )
        )
    return ContinuedFindings(
        results=results,
        bases=tuple(
            Outcome(method=base, learning_rate=runs[0].learning_rate, runs=tuple(runs)) for base, runs in bases.items()
        ),
        continuations=tuple(continuations),
        comparisons=corrected_together(_comparisons(results, groups)),
    )


def continued_report(findings: ContinuedFindings, *, title: str = "") -> Report:
    """Return the report as a list of sections."""
    results = findings.results
    groups = {
        _title(rate): [each for each in findings.comparisons if each.learning_rate == rate] for rate in findings.rates
    }
    tables = (bases_table(findings), continuations_table(findings), against_baselines(groups, results.unit))
    return Report(
        title=title or "A Pre-Norm model, converted and continued",
        subject=(summary.data_sentence(results), summary.budget_sentence(results.runs[-1])),
        sections=(
            ReportSection("What came out", (Statements(items=conclusions(findings), tone="conclusions"),)),
            *(ReportSection(table.title, (table,)) for table in tables),
            ReportSection("The verdicts", (Statements(items=summary.VERDICTS),)),
            *closing_sections(results),
        ),
        records={"runs.csv": runs_csv(results), "comparisons.csv": comparisons_csv(findings.comparisons)},
    )


def bases_table(findings: ContinuedFindings) -> Table:
    """Build the table of the bases."""
    rows = tuple(
        (Entry(text=outcome.method), Entry(text=str(len(outcome.complete))), _loss_entry(outcome.held_out_loss))
        for outcome in findings.bases
    )
    columns = (BASE, Column("Seeds", "runs that have ended"), LOSS)
    return Table(title="The models to continue", columns=columns, groups=(Group(rows=rows),))


def continuations_table(findings: ContinuedFindings) -> Table:
    """Build the table of every variant at every rate."""
    unit = findings.results.unit
    columns = (
        BASE,
        CONTINUED_AS,
        Column(
            "Jump", f"held-out loss before the first step minus that of the base, the largest of all seeds ({unit})"
        ),
        VERDICT,
        Column("Seeds", "runs that have ended"),
        LOSS,
    )
    groups = []
    for rate in findings.rates:
        rows = tuple(_row(each) for each in findings.continuations if each.outcome.learning_rate == rate)
        groups.append(Group(title=_title(rate), rows=rows))
    return Table(title="Continued, converted and unchanged", columns=columns, groups=tuple(groups))


def conclusions(findings: ContinuedFindings) -> tuple[Statement, ...]:
    """Return a statement for every comparison, in the words that its interval allows."""
    statements = [_statement(each, findings.results.unit) for each in findings.comparisons]
    absent = len(findings.results.unfinished) + len(findings.results.missing)
    if absent:
        statements.append(Statement(topic="Unfinished", text=f"{quantities.plural(absent, 'run')}."))
    return tuple(statements)


def _comparisons(results: ExperimentResults, groups: dict[tuple[float, str], list[RunResult]]) -> Iterator[Comparison]:
    """Yield the comparisons of the plan at every rate, over the seeds that both have."""
    for rate in dict.fromkeys(rate for rate, _ in groups):
        for planned in results.plan.comparisons:
            own = {run.seed: run for run in groups.get((rate, planned.method), [])}
            other = {run.seed: run for run in groups.get((rate, planned.baseline), [])}
            seeds = sorted(own.keys() & other.keys())
            if seeds:
                yield _comparison(planned, rate, [own[seed] for seed in seeds], [other[seed] for seed in seeds])


def _comparison(planned: PlannedComparison, rate: float, own: list[RunResult], other: list[RunResult]) -> Comparison:
    return Comparison(
        method=planned.method,
        baseline=planned.baseline,
        kind=planned.kind,
        learning_rate=rate,
        difference=paired_difference(
            {run.seed: run.score for run in own if run.has_result},
            {run.seed: run.score for run in other if run.has_result},
        ),
        diverged=any(run.diverged for run in (*own, *other)),
    )


def _jump(run: RunResult, by_id: dict[str, RunResult]) -> float:
    """Return the held-out loss of a run before its first step minus that of its base at its end."""
    first, base = run.first_held_out.get("loss"), by_id.get(run.base or "")
    if first is None:
        raise UserError(f"{run.path} has no evaluation before its first step: train it again")
    return first - base.held_out_loss if base is not None and base.held_out_loss is not None else 0.0


def _row(each: ContinuedVariant) -> tuple[Entry, ...]:
    return (
        Entry(text=each.base),
        Entry(text=each.label),
        Entry(text="0" if each.jump == 0 else f"{each.jump:+.0e}".replace("-", quantities.MINUS)),
        Entry(pill=verdict_pill(each.outcome)),
        Entry(text=str(len(each.outcome.complete))),
        _loss_entry(each.outcome.held_out_loss),
    )


def _loss_entry(loss: Estimate | None) -> Entry:
    return Entry(text=NOTHING if loss is None else quantities.loss_estimate(loss))


def _statement(comparison: Comparison, unit: str) -> Statement:
    topic, corrected = f"{comparison.method}, {quantities.rate(comparison.learning_rate)}", comparison.corrected
    if corrected is None:
        return Statement(topic=topic, text=f"No conclusion: {comparison.conclusion}.")
    words = {
        Conclusion.CONFIRMED_LOWER: "Ends lower than unchanged, confirmed",
        Conclusion.CONFIRMED_HIGHER: "Ends higher than unchanged, confirmed",
    }
    word = words.get(comparison.conclusion, "No difference from unchanged is confirmed")
    numbers = f"{quantities.signed(corrected.mean)} {unit}, Holm {quantities.interval(corrected)}"
    return Statement(topic=topic, text=f"{word}: {numbers}, {quantities.plural(corrected.count, 'seed')}.")


def _title(rate: float) -> str:
    return f"Continued at learning rate {quantities.rate(rate)}"
