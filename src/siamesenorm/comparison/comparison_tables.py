"""The tables of a comparison, for people and as CSV: by learning rate, at the chosen rates, against the baselines."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from siamesenorm.comparison import formatting
from siamesenorm.comparison.accuracy_tables import accuracy_tables
from siamesenorm.comparison.experiment_plan import ComparisonKind
from siamesenorm.comparison.findings import (
    Choice,
    Comparison,
    Findings,
    NoiseBand,
    Outcome,
    Quantity,
    diverged_at_every_rate,
)
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import HIGHER, LOWER, Column, Entry, Pill, Row, RowGroup, Table
from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, SPIKED, UNFINISHED, ExperimentResults, RunResult
from siamesenorm.comparison.statistics import Estimate
from siamesenorm.tasks.task import Metric

T = TypeVar("T")
Record = dict[str, object]

METHOD = Column("Method", "topology, and attention norm or operator where they are not the usual ones", numeric=False)
VERDICT = Column("Verdict", "the worst verdict of the seeds", numeric=False)

KIND_TITLES = {
    ComparisonKind.TOPOLOGY: "Topology: against Pre-Norm with the same operator",
    ComparisonKind.CONTROL: "Topology: against Pre-Norm with the same operator and QKV-norm",
    ComparisonKind.OPERATOR: "Operator: against the same topology with the usual operator",
    ComparisonKind.INITIALISATION: "Initialisation: against the same method with the usual one",
    ComparisonKind.OPTIMIZER: "Optimizer: against the same method with the usual one",
    ComparisonKind.ABLATION: "One part changed: against the same method without the change",
}

RUN_COLUMNS = (
    *("held_out_step", "steps", "steps_done", "items", "passes_over_data", "parameters", "flops_per_item"),
    *("step_seconds", "peak_memory_bytes"),
)
"""Columns of the CSV that are attributes of `RunResult`."""
COMPARISON_COLUMNS: dict[str, Callable[[Comparison], object]] = {
    "method": lambda each: each.method,
    "baseline": lambda each: each.baseline,
    "kind": lambda each: each.kind,
    "learning_rate": lambda each: each.learning_rate,
    "seeds": lambda each: " ".join(map(str, each.difference.by_seed)),
    "difference": lambda each: each.interval and each.interval.mean,
    "t_low": lambda each: _ends(each.interval)[0],
    "t_high": lambda each: _ends(each.interval)[1],
    "p_value": lambda each: each.difference.p_value,
    "holm_low": lambda each: _ends(each.corrected)[0],
    "holm_high": lambda each: _ends(each.corrected)[1],
    "holm_p_value": lambda each: each.decision and each.decision.adjusted_p,
    "steps_to_baseline": lambda each: each.steps_to_baseline,
    "conclusion": lambda each: each.conclusion,
}


def comparison_tables(findings: Findings) -> tuple[Table, ...]:
    """Return the tables of a comparison; the one of differences is left out where nothing is compared."""
    groups = by_kind(findings.comparisons)
    differences = (against_baselines(groups, findings.results.unit),) if groups else ()
    return (at_chosen_rates(findings), *differences, *accuracy_tables(findings), by_learning_rate(findings))


def by_learning_rate(findings: Findings) -> Table:
    """Build the papers' table: methods under each learning rate, with metrics, verdict, spread and cost."""
    results = findings.results
    trained, item = training_metric(results), results.runs[0].item
    columns = (
        METHOD,
        Column(
            f"Train {trained.label}{_arrow(trained)}",
            f"{trained.label} of the mean training loss over the last 10 % of steps",
        ),
        *map(_held_out_column, results.metrics),
        VERDICT,
        Column("Seeds", "the seeds that every method has finished at this rate"),
        Column("Parameters", "all parameters, and the change against the baseline if there is one"),
        Column(f"FLOPs/{item}", f"training on one {item}, three times the forward pass; norms are not counted"),
        Column("Step time", "median over the faster half of the steps, and the ratio to the baseline"),
        Column("Memory", "peak memory of the process or the device"),
    )
    groups = tuple(
        RowGroup(
            f"Learning rate {formatting.rate(rate)}",
            tuple(_outcome_row(findings, outcome) for outcome in findings.at(rate)),
        )
        for rate in results.learning_rates
    )
    return Table("Results by learning rate", columns, groups).without_empty_columns()


def at_chosen_rates(findings: Findings) -> Table:
    """Build the table of every method at the rate that its selection runs chose."""
    noise = findings.noise
    columns = (
        METHOD,
        Column("Chosen rate", "lowest held-out loss of the selection runs that did not diverge"),
        Column("Seeds", "reported seeds, the selection seed left out where there are others"),
        *map(_held_out_column, findings.results.metrics),
        VERDICT,
        *([Column("Against noise", f"the held-out loss against {noise_words(noise)}", numeric=False)] if noise else []),
        Column(f"Rate sensitivity{LOWER}", "mean excess loss over the grid of rates"),
    )
    rows = tuple(_choice_row(findings, method, noise) for method in findings.results.methods)
    return Table("Every method at its own best rate", columns, (RowGroup("", rows),))


def noise_words(noise: NoiseBand) -> str:
    """Return what a noise band is, in words."""
    return f"the noise band of {noise.baseline}, {noise.low:.4f} to {noise.high:.4f}"


def by_kind(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Group comparisons by what differs between method and baseline."""
    groups = {title: [each for each in comparisons if each.kind is kind] for kind, title in KIND_TITLES.items()}
    return {title: group for title, group in groups.items() if group}


def against_baselines(groups: Mapping[str, Sequence[Comparison]], unit: str) -> Table:
    """Build the table of differences paired by seed, with both intervals, from groups with their titles."""
    columns = (
        METHOD,
        Column("Baseline", "the method it is compared with", numeric=False),
        Column("Seeds", "seeds that both have"),
        Column(f"Difference ({unit})", "held-out loss minus that of the baseline, mean over the seeds"),
        Column("95 % t interval", "of this difference alone"),
        Column("p", "two-sided p-value of the paired t test, of this difference alone"),
        Column("Holm interval", "widened so that all tests of the table together are wrong at most once in 20"),
        Column("Holm p", "p-value adjusted for the number of tests of the table"),
        Column(
            "Steps to its loss",
            "steps until the training loss was as low as the baseline's over its last tenth, of those planned; median "
            "over the seeds, a run that never got there counts as infinite",
        ),
        Column("Conclusion", "confirmed where the Holm interval excludes zero", numeric=False),
    )
    rows = tuple(RowGroup(title, tuple(map(_comparison_row, group))) for title, group in groups.items())
    return Table("Against the baselines", columns, rows).without_empty_columns()


def verdict_entry(outcome: Outcome) -> Entry:
    """Return the verdict of an outcome, with the number of seeds where they disagree."""
    if not outcome.complete:
        return Entry(pill=Pill(UNFINISHED, UNFINISHED))
    if outcome.verdict is None:
        return Entry(pill=Pill("none", "no verdict"))
    count, total = outcome.count(outcome.verdict), len(outcome.complete)
    return Entry(pill=Pill(outcome.verdict, outcome.verdict + ("" if count == total else f" {count}/{total}")))


def estimate_text(value: Estimate | None, form: str) -> str:
    """Write a mean and its interval in the format of a metric, a dash where there is none."""
    return NOTHING if value is None else formatting.estimate(value, form)


def training_metric(results: ExperimentResults) -> Metric:
    """Return the metric in which training losses are shown: the last one that follows from the loss."""
    return next(metric for metric in reversed(results.metrics) if metric.of_loss)


def runs_csv(results: ExperimentResults) -> str:
    """Return one row a run, the unfinished and the missing included; an unknown number is an empty field."""
    rows = [_run_record(run) for run in results.runs]
    missing: list[Record] = [{"run": name, "status": "missing", "reason": why} for name, why in results.missing.items()]
    return _csv(list(rows[0]), [*rows, *missing])


def comparisons_csv(comparisons: Sequence[Comparison]) -> str:
    """Return one row a comparison: paired difference, both intervals, Holm's p-value, conclusion."""
    rows = [{name: value_of(each) for name, value_of in COMPARISON_COLUMNS.items()} for each in comparisons]
    return _csv(list(COMPARISON_COLUMNS), rows)


def _comparison_row(comparison: Comparison) -> Row:
    conclusion = comparison.conclusion
    return (
        Entry(comparison.method),
        Entry(comparison.baseline),
        Entry(str(len(comparison.difference.by_seed))),
        Entry(_written(comparison.interval, lambda value: formatting.signed(value.mean))),
        Entry(_written(comparison.interval, formatting.interval)),
        Entry(_written(comparison.difference.p_value, formatting.p_value)),
        Entry(_written(comparison.corrected, formatting.interval)),
        Entry(_written(comparison.decision, lambda decision: formatting.p_value(decision.adjusted_p))),
        Entry(_written(comparison.steps_to_baseline, formatting.steps)),
        Entry(pill=Pill(conclusion, conclusion)),
    )


def _held_out_column(metric: Metric) -> Column:
    explanation = f"{metric.label} at the last validation, mean ± half width of the 95 % t interval over seeds"
    return Column(f"Held-out {metric.label}{_arrow(metric)}", explanation)


def _arrow(metric: Metric) -> str:
    return LOWER if metric.direction == "lower" else HIGHER


def _outcome_row(findings: Findings, outcome: Outcome) -> Row:
    results = findings.results
    baselines = [each.baseline for each in results.plan.comparisons if each.method == outcome.method]
    named = {other.method: other for other in findings.at(outcome.learning_rate)}
    reference = next((named[name] for name in baselines if name in named), None)
    trained = training_metric(results)
    return (
        Entry(outcome.method),
        _metric_entry(
            findings,
            outcome,
            trained,
            lambda run: None if run.train_loss is None else trained.from_loss(run.train_loss),
        ),
        *(_metric_entry(findings, outcome, metric, _held_out(metric)) for metric in results.metrics),
        verdict_entry(outcome),
        Entry(str(len(outcome.complete)) if outcome.complete else NOTHING),
        _cost(outcome, reference, lambda run: run.parameters, formatting.count, _change),
        _cost(outcome, None, lambda run: run.flops_per_item, formatting.count),
        # Runs that shared a device slowed each other.
        _cost(outcome, reference, lambda run: run.step_seconds, formatting.seconds, "{:.2f}×".format)
        if results.plan.jobs == 1
        else Entry(NOTHING),
        _cost(outcome, None, lambda run: run.peak_memory_bytes, formatting.memory),
    )


def _held_out(metric: Metric) -> Quantity:
    return lambda run: run.held_out.get(metric.name)


def _metric_entry(findings: Findings, outcome: Outcome, metric: Metric, quantity: Quantity) -> Entry:
    """Return *diverge* instead of a number, as the papers do, a mark on a spiked or unlearned run, the best in bold."""
    if outcome.all_diverged:
        return Entry("diverge", emphasis=True)
    estimate = outcome.estimate(quantity)
    if estimate is None:
        return Entry(NOTHING)
    mark = {SPIKED: "*", DIVERGED: "†", NOT_LEARNED: "‡"}.get(outcome.verdict or "", "")
    best = findings.is_best(outcome, quantity, lowest=metric.direction == "lower")
    return Entry(formatting.estimate(estimate, metric.format) + mark, strong=best)


def _cost(
    outcome: Outcome,
    reference: Outcome | None,
    quantity: Quantity,
    write: Callable[[float], str],
    write_ratio: Callable[[float], str] = str,
) -> Entry:
    """Return the median of a cost, with its ratio to that of the reference if there is one."""
    own = outcome.median(quantity)
    base = reference.median(quantity) if reference else None
    ratio = write_ratio(own / base) if own is not None and base else ""
    return Entry(_written(own, write) + (f" ({ratio})" if ratio else ""))


def _change(ratio: float) -> str:
    return "" if ratio == 1 else formatting.percent(ratio - 1)


def missing_choice(results: ExperimentResults, method: str) -> Entry:
    """Return the entry in place of a chosen rate: diverged at every rate, or no finished run."""
    lost = diverged_at_every_rate(results, method)
    return Entry(pill=Pill(DIVERGED, "diverged at every rate") if lost else Pill(UNFINISHED, "no finished run"))


def _choice_row(findings: Findings, method: str, noise: NoiseBand | None) -> Row:
    choice, metrics = findings.choices.get(method), findings.results.metrics
    sensitivity = Entry(_written(findings.sensitivities.get(method), "{:.4f}".format))
    if choice is None:
        why = missing_choice(findings.results, method)
        return (Entry(method), why, *[Entry(NOTHING)] * (len(metrics) + 2 + bool(noise)), sensitivity)
    leading = findings.same_seeds and findings.ranked()[:1] == [choice]
    return (
        Entry(method),
        Entry(formatting.rate(choice.learning_rate), None if choice.edge is None else Pill("edge", choice.edge)),
        Entry(_reported_seeds(choice)),
        *(
            Entry(estimate_text(choice.metric(each.name), each.format), strong=leading and each == metrics[0])
            for each in metrics
        ),
        verdict_entry(choice),
        *([_against_noise(choice, noise)] if noise else []),
        sensitivity,
    )


def _against_noise(choice: Choice, noise: NoiseBand) -> Entry:
    """Return where a method is against the noise band, for its baseline the band itself."""
    if choice.method == noise.baseline:
        return Entry(f"band {noise.low:.4f} to {noise.high:.4f}")
    loss = choice.held_out_loss
    if loss is None:
        return Entry(NOTHING)
    place = noise.place(loss.mean)
    return Entry(pill=Pill(place, place.removesuffix(" noise")))


def _reported_seeds(choice: Choice) -> str:
    if choice.on_selection_seed:
        return "1 (the selection seed)"
    return f"{len(choice.losses)} of {len(choice.runs)}" if choice.diverged else str(len(choice.runs))


def _written(value: T | None, how: Callable[[T], str]) -> str:
    return NOTHING if value is None else how(value)


def _run_record(run: RunResult) -> Record:
    return {
        "run": run.path.name,
        "method": run.method,
        "part": run.part,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "status": run.status,
        "verdict": run.word,
        "reason": run.verdict and run.verdict.sentence(),
        "spikes": run.verdict and len(run.verdict.spikes),
        "skipped_steps": run.verdict and len(run.verdict.skipped),
        "train_loss": run.train_loss,
        **{f"held_out_{metric.name}": run.held_out.get(metric.name) for metric in run.metrics},
        **{name: getattr(run, name) for name in RUN_COLUMNS},
    }


def _ends(value: Estimate | None) -> tuple[float | None, float | None]:
    return (value.ends if value else None) or (None, None)


def _csv(columns: Sequence[str], rows: Sequence[Record]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
