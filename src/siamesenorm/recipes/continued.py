"""Continue pre-training a converted model: its plan (bases, each continued unchanged and converted) and its report.

A pair shares its base, its seed, its learning rate and every batch: only the residual path differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import tyro

from siamesenorm.comparison import comparison_report, comparison_tables, formatting
from siamesenorm.comparison.experiment_plan import ComparisonKind, Part, PlannedComparison, PlannedRun
from siamesenorm.comparison.experiment_runner import Experiment, Planned
from siamesenorm.comparison.findings import Comparison, Conclusion, Outcome, compare, corrected_together
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import LOWER, Column, Entry, Report, RowGroup, Statement, Statements, Table
from siamesenorm.comparison.results import ExperimentResults, RunResult
from siamesenorm.comparison.sweep_grid import configured
from siamesenorm.errors import UserError
from siamesenorm.training.config import RunConfig
from siamesenorm.training.warm_start import start_after

BASE = Column("Base", "the trained Pre-Norm model, and its attention norm where it is not the usual one", numeric=False)
CONTINUED_AS = Column("Continued as", "topology, and operator where it changes", numeric=False)
SEEDS = Column("Seeds", "runs that have ended")
LOSS = Column(f"Held-out loss{LOWER}", "mean ± half width of the 95 % t interval over seeds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to continue a base, which is a method of a sweep ("pre", "pre + qkv").

    `method` is the topology, and the operator where it changes; empty continues the base unchanged.
    """

    base: str
    method: str = ""

    @property
    def label(self) -> str:
        """The method with which the base continues."""
        return self.method or "unchanged"

    @property
    def name(self) -> str:
        """A name that no other variant has."""
        return f"{self.base} > {self.label}"


VARIANTS = (
    Variant(base="pre"),
    Variant(base="pre", method="siamese-post-pre:normalized_input=false"),
    Variant(base="pre", method="siamese-post-pre"),
    Variant(base="pre", method="pre + seednorm"),
    Variant(base="pre + qkv"),
    Variant(base="pre + qkv", method="siamese"),
)
"""Post-Pre keeps the function exactly without input norm, and up to an eps with it; Hybrid-Pre's base has QKV-norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedPlan:
    """The variants over seeds and learning rates of the continuation; the base has one rate, and steps of its own."""

    variants: tyro.conf.Suppress[tuple[Variant, ...]] = VARIANTS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds, each of a base and of everything that continues it."""
    learning_rates: tuple[float, ...] = (8e-3, 2e-3)
    """Peak learning rates of the continuation, the main one first."""
    base_learning_rate: float = 8e-3
    """Peak learning rate of the bases."""
    base_steps: int = 300
    """Steps of a base."""
    steps: int = 150
    """Steps of a continuation."""
    warmup_fraction: tyro.conf.Suppress[float] = 0.1

    def __post_init__(self) -> None:
        if not self.seeds or not self.learning_rates:
            raise UserError("nothing to train: give at least one seed and one learning rate")
        if min(self.base_steps, self.steps) < 2:
            raise UserError(f"{min(self.base_steps, self.steps)} steps: choose at least 2")
        if not 0 <= self.warmup_fraction < 1:
            raise UserError(f"warmup_fraction is {self.warmup_fraction}: choose a number from 0 to below 1")

    @property
    def comparisons(self) -> tuple[PlannedComparison, ...]:
        """Every converted variant against its base continued unchanged."""
        pairs = [(each.name, Variant(base=each.base).name) for each in self.variants if each.method]
        return tuple(PlannedComparison(method=m, baseline=b, kind=ComparisonKind.CONVERSION) for m, b in pairs)

    @property
    def common(self) -> dict[str, Any]:
        """The settings that all runs of a directory share; seeds, rates and variants may be added."""
        names = ("base_learning_rate", "base_steps", "steps", "warmup_fraction")
        return {"continued": {name: getattr(self, name) for name in names}}

    def template(self, run: RunConfig) -> RunConfig:
        """Return the template of the experiment: a run of the length of a base."""
        return _of_length(run, self.base_steps, self.warmup_fraction)

    def stages(self, experiment: Experiment) -> Iterator[Sequence[Planned]]:
        """Yield the bases, then their continuations; raises UserError where a base cannot be converted."""
        bases: list[Planned] = []
        for seed, base in product(self.seeds, dict.fromkeys(variant.base for variant in self.variants)):
            rate = self.base_learning_rate
            run = PlannedRun(method=base, learning_rate=rate, seed=seed, part=Part.BASE, label=base)
            bases.append((run, configured(experiment.template, base, rate, seed)))
        continued = [
            self._continued(experiment, variant, source, rate)
            for rate, (base, source), variant in product(self.learning_rates, bases, self.variants)
            if variant.base == base.method
        ]
        yield bases
        yield continued

    def _continued(self, experiment: Experiment, variant: Variant, source: RunConfig, rate: float) -> Planned:
        run = PlannedRun(
            method=variant.name, learning_rate=rate, seed=source.seed, part=Part.CONTINUED, label=variant.label
        )
        target = _of_length(source, self.steps, self.warmup_fraction)
        target = target.with_method(variant.method) if variant.method else target
        optimizer = dataclasses.replace(target.optimizer, learning_rate=rate)
        task = target.resolved().task.continued(source.task)
        config = dataclasses.replace(target, task=task, optimizer=optimizer)
        return run, start_after(source, experiment.run_directory(source), config)


def _of_length(run: RunConfig, steps: int, warmup_fraction: float) -> RunConfig:
    """Return a run of so many steps, with its part of warm-up, evaluated at its end."""
    optimizer = dataclasses.replace(run.optimizer, warmup_steps=math.floor(warmup_fraction * steps))
    return dataclasses.replace(run, steps=steps, validation_every=steps, optimizer=optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedVariant:
    """A variant at a rate, and the jump of its loss: before the first step minus that of the base, the largest."""

    base: str
    label: str
    outcome: Outcome
    jump: float | None
    """None where no base has a result."""


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
    complete = [run for run in results.runs if run.complete]
    bases = _outcomes([run for run in complete if run.part is Part.BASE])
    continued = _outcomes([run for run in complete if run.part is Part.CONTINUED])
    if not continued:
        raise UserError(f"no continuation in {results.path} has ended: train it with --data")
    by_id = {run.identity: run for run in results.runs}
    return ContinuedFindings(
        results=results,
        bases=tuple(bases.values()),
        continuations=tuple(_variant(outcome, by_id) for outcome in continued.values()),
        comparisons=corrected_together(_comparisons(results, continued)),
    )


def continued_report(findings: ContinuedFindings, *, title: str = "") -> Report:
    """Return the report as a list of sections."""
    results = findings.results
    groups = {
        _title(rate): [each for each in findings.comparisons if each.learning_rate == rate] for rate in findings.rates
    }
    bases = tuple((Entry(base.method), *_seeds_and_loss(base)) for base in findings.bases)
    tables = (
        Table("The models to continue", (BASE, SEEDS, LOSS), (RowGroup("", bases),)),
        continuations_table(findings),
        comparison_tables.against_baselines(groups, results.unit),
    )
    return Report(
        title=title or "A Pre-Norm model, converted and continued",
        subject=(comparison_report.data_sentence(results), comparison_report.budget_sentence(results.runs[-1])),
        sections={
            "What came out": Statements(conclusions(findings), tone="conclusions"),
            **{table.title: table for table in tables},
            "The verdicts": Statements(comparison_report.VERDICTS),
            **comparison_report.closing_sections(results),
        },
        records={
            "runs.csv": comparison_tables.runs_csv(results),
            "comparisons.csv": comparison_tables.comparisons_csv(findings.comparisons),
        },
    )


def continuations_table(findings: ContinuedFindings) -> Table:
    """Build the table of every variant at every rate."""
    jump = Column(
        "Jump",
        "held-out loss before the first step minus that of the base, the largest of all seeds "
        f"({findings.results.unit})",
    )
    groups = tuple(
        RowGroup(_title(rate), tuple(map(_row, (e for e in findings.continuations if e.outcome.learning_rate == rate))))
        for rate in findings.rates
    )
    columns = (BASE, CONTINUED_AS, jump, comparison_tables.VERDICT, SEEDS, LOSS)
    return Table("Continued, converted and unchanged", columns, groups)


def conclusions(findings: ContinuedFindings) -> tuple[Statement, ...]:
    """Return a statement for every comparison, in the words that its interval allows."""
    statements = [_statement(each, findings.results.unit) for each in findings.comparisons]
    if absent := len(findings.results.unfinished) + len(findings.results.missing):
        statements.append(Statement("Unfinished", f"{formatting.plural(absent, 'run')}."))
    return tuple(statements)


def _outcomes(runs: Sequence[RunResult]) -> dict[tuple[float, str], Outcome]:
    """Return the outcomes by learning rate and method, in the order of the runs."""
    groups: dict[tuple[float, str], list[RunResult]] = {}
    for run in runs:
        groups.setdefault((run.learning_rate, run.method), []).append(run)
    return {key: Outcome(method=key[1], learning_rate=key[0], runs=tuple(group)) for key, group in groups.items()}


def _variant(outcome: Outcome, by_id: Mapping[str, RunResult]) -> ContinuedVariant:
    starts = [(run, by_id.get((run.facts.get("start") or {}).get("run", ""))) for run in outcome.runs]
    return ContinuedVariant(
        base=next((base.label for _, base in starts if base), NOTHING),
        label=outcome.runs[0].label,
        outcome=outcome,
        jump=max((jump for run, base in starts if (jump := _jump(run, base)) is not None), key=abs, default=None),
    )


def _jump(run: RunResult, base: RunResult | None) -> float | None:
    """Return the held-out loss of a run before its first step minus that of its base at its end."""
    if "loss" not in run.first_held_out:
        raise UserError(f"{run.path} has no evaluation before its first step: train it again")
    return run.first_held_out["loss"] - base.held_out["loss"] if base and "loss" in base.held_out else None


def _comparisons(results: ExperimentResults, outcomes: Mapping[tuple[float, str], Outcome]) -> Iterator[Comparison]:
    """Yield the comparisons of the plan at every rate, over the seeds that both have."""
    for rate, planned in product(dict.fromkeys(rate for rate, _ in outcomes), results.plan.comparisons):
        pair = [outcomes[rate, name] for name in (planned.method, planned.baseline) if (rate, name) in outcomes]
        seeds = set.intersection(*({run.seed for run in outcome.runs} for outcome in pair)) if len(pair) == 2 else set()
        if seeds:
            yield compare(
                planned,
                *(
                    dataclasses.replace(outcome, runs=tuple(run for run in outcome.runs if run.seed in seeds))
                    for outcome in pair
                ),
            )


def _row(each: ContinuedVariant) -> tuple[Entry, ...]:
    jump = NOTHING if each.jump is None else f"{each.jump:+.0e}".replace("-", formatting.MINUS) if each.jump else "0"
    entries = (Entry(each.base), Entry(each.label), Entry(jump), comparison_tables.verdict_entry(each.outcome))
    return (*entries, *_seeds_and_loss(each.outcome))


def _seeds_and_loss(outcome: Outcome) -> tuple[Entry, Entry]:
    return Entry(str(len(outcome.complete))), Entry(comparison_tables.estimate_text(outcome.held_out_loss, ".4f"))


def _statement(comparison: Comparison, unit: str) -> Statement:
    topic, corrected = f"{comparison.method}, {formatting.rate(comparison.learning_rate)}", comparison.corrected
    if corrected is None:
        return Statement(topic, f"No conclusion: {comparison.conclusion}.")
    end = {Conclusion.CONFIRMED_LOWER: "lower", Conclusion.CONFIRMED_HIGHER: "higher"}.get(comparison.conclusion)
    word = f"Ends {end} than unchanged, confirmed" if end else "No difference from unchanged is confirmed"
    numbers = f"{formatting.signed(corrected.mean)} {unit}, Holm {formatting.interval(corrected)}"
    return Statement(topic, f"{word}: {numbers}, {formatting.plural(corrected.count, 'seed')}.")


def _title(rate: float) -> str:
    return f"Continued at learning rate {formatting.rate(rate)}"
