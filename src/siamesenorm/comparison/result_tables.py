"""The tables of a comparison: results by learning rate, every method at its own rate, and methods against baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import Choice, Comparison, Findings, Outcome
from siamesenorm.comparison.plan import ComparisonKind
from siamesenorm.comparison.quantities import NOTHING
from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, SPIKED, UNFINISHED, RunResult
from siamesenorm.comparison.statistics import Estimate
from siamesenorm.comparison.tables import HIGHER, LOWER, Column, Entry, Group, Pill, Table
from siamesenorm.tasks.task import Metric

T = TypeVar("T")
Quantity = Callable[[RunResult], float | None]

METHOD = Column("Method", "topology, and attention norm or operator where they are not the usual ones", numeric=False)
VERDICT = Column("Verdict", "the worst verdict of the seeds", numeric=False)

KIND_TITLES = {
    ComparisonKind.TOPOLOGY: "Topology: against Pre-Norm with the same operator",
    ComparisonKind.CONTROL: "Topology: against Pre-Norm with the same operator and QKV-norm",
    ComparisonKind.OPERATOR: "Operator: against the same topology with the usual operator",
    ComparisonKind.ABLATION: "One part changed: against the same method without the change",
}


def by_learning_rate(findings: Findings) -> Table:
    """Build the papers' table: methods under each learning rate, with metrics, verdict, spread and cost."""
    results = findings.results
    metrics = [
        (f"Train {metric.label}" if trained else _title(metric), metric, trained)
        for metric, trained in _columns(findings)
    ]
    item = results.runs[0].facts.get("item", "sample")
    columns = (
        METHOD,
        *(Column(title + _arrow(metric), _explanation(metric, trained)) for title, metric, trained in metrics),
        VERDICT,
        Column("Seeds", "the seeds that every method has finished at this rate"),
        Column("Parameters", "all parameters, and the change against the baseline if there is one"),
        Column(f"FLOPs/{item}", f"training on one {item}, three times the forward pass; norms are not counted"),
        Column("Step time", "median over the faster half of the steps, and the ratio to the baseline"),
        Column("Memory", "peak memory of the process or the device"),
    )
    groups = []
    for rate in results.learning_rates:
        outcomes = [outcome for (at, _), outcome in findings.outcomes.items() if at == rate]
        rows = tuple(_outcome_row(findings, outcome, outcomes) for outcome in outcomes)
        groups.append(Group(title=f"Learning rate {quantities.rate(rate)}", rows=rows))
    table = Table(title="Results by learning rate", columns=columns, groups=tuple(groups))
    return table.without_empty_columns(NOTHING)


def at_chosen_rates(findings: Findings) -> Table:
    """Build the table of every method at the rate that its selection runs chose."""
    columns = (
        METHOD,
        Column("Chosen rate", "lowest held-out loss of the selection runs that did not diverge"),
        Column("Seeds", "reported seeds, the selection seed left out where there are others"),
        *(Column(_title(each) + _arrow(each), _explanation(each, False)) for each in findings.results.metrics),
        VERDICT,
        Column(f"Rate sensitivity{LOWER}", "mean excess loss over the grid of rates"),
    )
    rows = tuple(_choice_row(findings, method) for method in findings.results.methods)
    return Table(title="Every method at its own best rate", columns=columns, groups=(Group(rows=rows),))


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
        Column("Holm interval", "widened so that all tests of the table together are wrong at most once in 20"),
        Column("Conclusion", "confirmed where the Holm interval excludes zero", numeric=False),
    )
    rows = {title: tuple(map(_comparison_row, comparisons)) for title, comparisons in groups.items()}
    return Table(
        title="Against the baselines",
        columns=columns,
        groups=tuple(Group(title=title, rows=group) for title, group in rows.items()),
    )


def _comparison_row(comparison: Comparison) -> tuple[Entry, ...]:
    """Return the row of a comparison."""
    conclusion = comparison.conclusion
    return (
        Entry(text=comparison.method),
        Entry(text=comparison.baseline),
        Entry(text=str(len(comparison.difference.by_seed))),
        Entry(text=_written(comparison.interval, lambda value: quantities.signed(value.mean))),
        Entry(text=_written(comparison.interval, quantities.interval)),
        Entry(text=_written(comparison.corrected, quantities.interval)),
        Entry(pill=Pill(kind=conclusion, text=conclusion)),
    )


def verdict_pill(outcome: Outcome) -> Pill:
    """Return the verdict of an outcome, with the number of seeds where they disagree."""
    if not outcome.complete:
        return Pill(kind=UNFINISHED, text=UNFINISHED)
    if outcome.verdict is None:
        return Pill(kind="none", text="no verdict")
    total = len(outcome.complete)
    share = "" if outcome.with_verdict == total else f" {outcome.with_verdict}/{total}"
    return Pill(kind=outcome.verdict, text=f"{outcome.verdict}{share}")


def _columns(findings: Findings) -> list[tuple[Metric, bool]]:
    """Return the metrics of a row, and whether they are of training: the last one that follows from the loss, first."""
    metrics = findings.results.metrics
    return [([each for each in metrics if each.of_loss][-1], True), *((each, False) for each in metrics)]


def _title(metric: Metric) -> str:
    return f"Held-out {metric.label}"


def _arrow(metric: Metric) -> str:
    return LOWER if metric.direction == "lower" else HIGHER


def _explanation(metric: Metric, trained: bool) -> str:
    if trained:
        return f"{metric.label} of the mean training loss over the last 10 % of steps"
    return f"{metric.label} at the last validation, mean ± half width of the 95 % t interval over seeds"


def _outcome_row(findings: Findings, outcome: Outcome, beside: Sequence[Outcome]) -> tuple[Entry, ...]:
    baselines = [each.baseline for each in findings.results.plan.comparisons if each.method == outcome.method]
    reference = next((other for name in baselines for other in beside if other.method == name), None)
    metrics = (
        _metric_entry(outcome, beside, metric, _trained(metric) if trained else _held_out(metric))
        for metric, trained in _columns(findings)
    )
    return (
        Entry(text=outcome.method),
        *metrics,
        Entry(pill=verdict_pill(outcome)),
        Entry(text=str(len(outcome.complete)) if outcome.complete else NOTHING),
        Entry(text=_parameters(outcome, reference)),
        Entry(text=_written(outcome.median(lambda run: run.flops_per_item), quantities.count)),
        Entry(text=_step_time(outcome, reference) if findings.results.measured_alone else NOTHING),
        Entry(text=_written(outcome.median(lambda run: run.peak_memory_bytes), quantities.memory)),
    )


def _trained(metric: Metric) -> Quantity:
    return lambda run: None if run.train_loss is None else metric.from_loss(run.train_loss)


def _held_out(metric: Metric) -> Quantity:
    return lambda run: run.held_out.get(metric.name)


def _metric_entry(outcome: Outcome, beside: Sequence[Outcome], metric: Metric, quantity: Quantity) -> Entry:
    """Return *diverge* instead of a number, as the papers do, a mark on a spiked or unlearned run, the best in bold."""
    if outcome.all_diverged:
        return Entry(text="diverge", emphasis=True)
    estimate = outcome.estimate(quantity)
    if estimate is None:
        return Entry(text=NOTHING)
    best = min if metric.direction == "lower" else max
    leading = best(
        (value.mean for other in beside if other.whole and (value := other.estimate(quantity))), default=None
    )
    mark = {SPIKED: "*", DIVERGED: "†", NOT_LEARNED: "‡"}.get(outcome.verdict or "", "")
    text = quantities.estimate(estimate, metric.format) + mark
    return Entry(text=text, strong=outcome.whole and estimate.mean == leading)


def _parameters(outcome: Outcome, reference: Outcome | None) -> str:
    own = outcome.median(lambda run: run.parameters)
    base = reference.median(lambda run: run.parameters) if reference else None
    if own is None or not base or own == base:
        return _written(own, quantities.count)
    return f"{quantities.count(own)} ({quantities.percent(own / base - 1)})"


def _step_time(outcome: Outcome, reference: Outcome | None) -> str:
    own = outcome.median(lambda run: run.step_seconds)
    base = reference.median(lambda run: run.step_seconds) if reference else None
    if own is None or not base:
        return _written(own, quantities.seconds)
    return f"{quantities.seconds(own)} ({own / base:.2f}×)"


def _choice_row(findings: Findings, method: str) -> tuple[Entry, ...]:
    choice, metrics = findings.choices.get(method), findings.results.metrics
    sensitivity = Entry(text=_written(findings.sensitivities.get(method), lambda value: f"{value:.4f}"))
    if choice is None:
        nothing = [Entry(text=NOTHING)] * (len(metrics) + 2)
        return (Entry(text=method), _why_no_choice(findings, method), *nothing, sensitivity)
    leading = findings.same_seeds and findings.ranked()[:1] == [choice]
    return (
        Entry(text=method),
        Entry(text=quantities.rate(choice.learning_rate), pill=_edge_pill(choice)),
        Entry(text=_reported_seeds(choice)),
        *(
            Entry(text=_estimate(choice.outcome.metric(each.name), each), strong=leading and each == metrics[0])
            for each in metrics
        ),
        Entry(pill=verdict_pill(choice.outcome)),
        sensitivity,
    )


def _estimate(value: Estimate | None, metric: Metric) -> str:
    return NOTHING if value is None else quantities.estimate(value, metric.format)


def _why_no_choice(findings: Findings, method: str) -> Entry:
    complete = [run for run in findings.results.runs_of(method) if run.complete]
    if complete and all(run.diverged for run in complete):
        return Entry(pill=Pill(kind=DIVERGED, text="diverged at every rate"))
    return Entry(pill=Pill(kind=UNFINISHED, text="no finished run"))


def _edge_pill(choice: Choice) -> Pill | None:
    return None if choice.edge is None else Pill(kind="edge", text=choice.edge)


def _reported_seeds(choice: Choice) -> str:
    if choice.on_selection_seed:
        return "1 (the selection seed)"
    return f"{len(choice.losses)} of {len(choice.reported)}" if choice.diverged else str(len(choice.reported))


def _written(value: T | None, how: Callable[[T], str]) -> str:
    return NOTHING if value is None else how(value)
