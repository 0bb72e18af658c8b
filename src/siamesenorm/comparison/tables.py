"""The tables of a report: the papers' table by learning rate, and every method at its own best rate.

A table is built once, as text cells with a little meaning, and written for the terminal, for Markdown and (by
`page`) for HTML; the files of `records` hold every number behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import (
    CONFIRMED_HIGHER,
    CONFIRMED_LOWER,
    Choice,
    Findings,
    Outcome,
    baseline_of,
    control_of,
)
from siamesenorm.comparison.quantities import NOTHING
from siamesenorm.comparison.results import DIVERGED, SPIKED, STABLE, UNFINISHED, Method
from siamesenorm.comparison.statistics import Estimate

T = TypeVar("T")

EDGE = "edge"
LOWER = "\N{NO-BREAK SPACE}↓"
"""Follows the title of a quantity that had better be low."""

MARKS = {
    STABLE: "●",
    SPIKED: "▲",
    DIVERGED: "✕",
    UNFINISHED: "○",
    CONFIRMED_LOWER: "✓",
    CONFIRMED_HIGHER: "✓",
    EDGE: "!",
}
"""The mark that goes with a word, so that nothing is said by colour alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pill:
    """A word that stands out, of the kind that gives it its mark and its colour."""

    kind: str
    text: str

    def __str__(self) -> str:
        """Write the mark and the word."""
        return f"{MARKS.get(self.kind, '–')} {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One cell: text, a pill or both, and a detail that may stand below them."""

    text: str = ""
    pill: Pill | None = None
    detail: str = ""
    strong: bool = False
    emphasis: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column heading with a sentence that explains it."""

    title: str
    explanation: str
    numeric: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows under one heading; the first entry of a row is the method."""

    title: str
    rows: tuple[tuple[Entry, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with its groups of rows."""

    title: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]


METHOD = Column("Method", "topology, and attention norm or operator where they are not the usual ones", numeric=False)

RATE_COLUMNS = (
    METHOD,
    Column(f"Train PPL{LOWER}", "exp of the mean training loss over the last 10 % of steps"),
    Column(f"Held-out PPL{LOWER}", "exp of the held-out loss, mean ± half width of the 95 % t interval over seeds"),
    Column("Verdict", "the worst verdict of the seeds", numeric=False),
    Column("Seeds", "the seeds that every method has finished at this rate"),
    Column("Parameters", "all parameters, and the change against pre if there is one"),
    Column("FLOPs/token", "training on one token, three times the forward pass; norms are not counted"),
    Column("Step time", "median over the faster half of the steps, and the ratio to pre"),
    Column("Memory", "peak memory of the process or the device"),
)

CONTROL = Column("Against pre + qkv (nats)", "the same against the control row, Pre-Norm with QKV-norm", numeric=False)

CHOICE_COLUMNS = (
    METHOD,
    Column("Chosen rate", "lowest held-out loss of the selection seed among runs that did not diverge"),
    Column("Seeds", "reported seeds, the selection seed left out where there are others"),
    Column(f"Held-out loss{LOWER}", "nats per token, mean ± half width of the 95 % t interval over seeds"),
    Column(f"Held-out PPL{LOWER}", "mean over the same seeds"),
    Column("Against pre (nats)", "paired by seed, with the Holm-corrected 95 % interval", numeric=False),
    CONTROL,
    Column(f"Rate sensitivity{LOWER}", "mean excess loss over the grid of rates (nats)"),
)


def by_learning_rate(findings: Findings) -> Table:
    """Build the papers' table: methods under each learning rate, with verdict, spread and cost."""
    groups = []
    for rate in findings.sweep.learning_rates:
        outcomes = [outcome for (at, _), outcome in findings.outcomes.items() if at == rate]
        rows = tuple(_outcome_row(findings, outcome, outcomes) for outcome in outcomes)
        groups.append(Group(title=f"Learning rate {quantities.rate(rate)}", rows=rows))
    return Table(title="Results by learning rate", columns=RATE_COLUMNS, groups=tuple(groups))


def at_chosen_rates(findings: Findings) -> Table:
    """Build the table of every method at the rate its selection seed chose, against its baselines."""
    rows = [_choice_row(findings, method) for method in findings.sweep.methods]
    kept = list(range(len(CHOICE_COLUMNS)))
    if not any(control_of(method, findings.sweep.methods) for method in findings.sweep.methods):
        kept = [index for index in kept if CHOICE_COLUMNS[index] is not CONTROL]
    group = Group(title="", rows=tuple(tuple(row[index] for index in kept) for row in rows))
    columns = tuple(CHOICE_COLUMNS[index] for index in kept)
    return Table(title="Every method at its own best rate", columns=columns, groups=(group,))


def verdict_pill(outcome: Outcome) -> Pill:
    """Return the verdict of an outcome, with the number of seeds where they disagree."""
    if not outcome.complete:
        return Pill(kind=UNFINISHED, text=UNFINISHED)
    if outcome.verdict is None:
        return Pill(kind="none", text="no verdict")
    total = len(outcome.complete)
    share = "" if outcome.with_verdict == total else f" {outcome.with_verdict}/{total}"
    return Pill(kind=outcome.verdict, text=f"{outcome.verdict}{share}")


def _outcome_row(findings: Findings, outcome: Outcome, beside: Sequence[Outcome]) -> tuple[Entry, ...]:
    baseline = baseline_of(outcome.method, findings.sweep.methods)
    reference = next((other for other in beside if other.method == baseline and other is not outcome), None)
    return (
        Entry(text=outcome.method.name),
        _perplexity_entry(outcome, beside, lambda each: each.train_perplexity),
        _perplexity_entry(outcome, beside, lambda each: each.held_out_perplexity),
        Entry(pill=verdict_pill(outcome)),
        Entry(text=str(len(outcome.complete)) if outcome.complete else NOTHING),
        Entry(text=_parameters(outcome, reference)),
        Entry(text=_written(outcome.median(lambda run: run.flops_per_token), quantities.count)),
        Entry(text=_step_time(outcome, reference)),
        Entry(text=_written(outcome.median(lambda run: run.peak_memory_bytes), quantities.memory)),
    )


def _perplexity_entry(
    outcome: Outcome, beside: Sequence[Outcome], perplexity: Callable[[Outcome], Estimate | None]
) -> Entry:
    """Print as the papers do: *diverge* instead of a number, a star on a spiked run, the lowest in bold."""
    if outcome.all_diverged:
        return Entry(text="diverge", emphasis=True)
    estimate = perplexity(outcome)
    if estimate is None:
        return Entry(text=NOTHING)
    lowest = min((value.mean for other in beside if other.whole and (value := perplexity(other))), default=None)
    mark = {SPIKED: "*", DIVERGED: "†"}.get(outcome.verdict or "", "")
    return Entry(text=quantities.perplexity_estimate(estimate) + mark, strong=outcome.whole and estimate.mean == lowest)


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


def _choice_row(findings: Findings, method: Method) -> tuple[Entry, ...]:
    choice = findings.choices.get(method)
    sensitivity = Entry(text=_written(findings.sensitivities.get(method), lambda value: f"{value:.4f}"))
    if choice is None:
        return (Entry(text=method.name), _why_no_choice(findings, method), *[Entry(text=NOTHING)] * 5, sensitivity)
    loss, perplexity = choice.outcome.held_out_loss, choice.outcome.held_out_perplexity
    leading = findings.same_seeds and findings.ranked()[:1] == [choice]
    return (
        Entry(text=method.name),
        Entry(text=quantities.rate(choice.learning_rate), pill=_edge_pill(choice)),
        Entry(text=_reported_seeds(choice)),
        Entry(text=_written(loss, quantities.loss_estimate), strong=leading),
        Entry(text=_written(perplexity, lambda estimate: quantities.perplexity(estimate.mean)), strong=leading),
        _comparison_entry(findings, method, baseline_of(method, findings.sweep.methods)),
        _comparison_entry(findings, method, control_of(method, findings.sweep.methods)),
        sensitivity,
    )


def _why_no_choice(findings: Findings, method: Method) -> Entry:
    complete = [run for run in findings.sweep.runs if run.method == method and run.complete]
    if complete and all(run.diverged for run in complete):
        return Entry(pill=Pill(kind=DIVERGED, text="diverged at every rate"))
    return Entry(pill=Pill(kind=UNFINISHED, text="no finished run"))


def _edge_pill(choice: Choice) -> Pill | None:
    return None if choice.edge is None else Pill(kind=EDGE, text=choice.edge)


def _reported_seeds(choice: Choice) -> str:
    if choice.on_selection_seed:
        return "1 (the selection seed)"
    return f"{len(choice.losses)} of {len(choice.reported)}" if choice.diverged else str(len(choice.reported))


def _comparison_entry(findings: Findings, method: Method, baseline: Method | None) -> Entry:
    comparison = findings.comparison(method, baseline)
    if comparison is None:
        return Entry(text=NOTHING)
    return Entry(
        text=quantities.signed(comparison.interval.mean) if comparison.interval else NOTHING,
        pill=Pill(kind=comparison.conclusion, text=comparison.conclusion),
        detail=quantities.interval(comparison.interval) if comparison.interval else "",
    )


def _written(value: T | None, how: Callable[[T], str]) -> str:
    return NOTHING if value is None else how(value)
