"""The machine-readable side of a report: every run and every comparison with every number, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from siamesenorm.comparison.findings import Comparison, Findings
from siamesenorm.comparison.results import RunResult, SweepResults

Row = dict[str, object]

COMPARISON_COLUMNS = [
    *("method", "baseline", "method_learning_rate", "baseline_learning_rate", "seeds"),
    *("difference", "low", "high", "p_value", "holm_low", "holm_high", "holm_p_value", "conclusion"),
]


def runs_csv(sweep: SweepResults) -> str:
    """Return one row a run, the unfinished and the missing included; an unknown number is an empty field."""
    missing: list[Row] = [{"run": run.path.name, "status": "missing", "reason": run.reason} for run in sweep.missing]
    rows = [_run_row(run) for run in sweep.runs]
    return _csv(list(rows[0]), [*rows, *missing])


def comparisons_csv(findings: Findings) -> str:
    """Return one row a comparison: paired difference in nats, both intervals, Holm's p-value, conclusion."""
    return _csv(COMPARISON_COLUMNS, [_comparison_row(findings, each) for each in findings.comparisons])


def _run_row(run: RunResult) -> Row:
    return {
        "run": run.path.name,
        "method": run.method.name,
        "topology": run.method.topology,
        "norm": run.method.norm,
        "attention_norm": run.method.attention_norm,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "status": run.status,
        "verdict": run.word,
        "reason": run.verdict and run.verdict.sentence(),
        "spikes": run.verdict and len(run.verdict.spikes),
        "train_loss": run.train_loss,
        "train_perplexity": run.train_perplexity,
        "held_out_loss": run.held_out_loss,
        "held_out_perplexity": run.held_out_perplexity,
        "held_out_step": run.held_out_step,
        "steps": run.steps,
        "steps_done": run.steps_done,
        "batch_tokens": run.batch_tokens,
        "train_tokens_available": run.train_tokens_available,
        "seen_at_most_once": run.saw_data_at_most_once,
        "parameters": run.parameters,
        "flops_per_token": run.flops_per_token,
        "step_seconds": run.step_seconds,
        "peak_memory_bytes": run.peak_memory_bytes,
    }


def _comparison_row(findings: Findings, comparison: Comparison) -> Row:
    estimate = comparison.difference.estimate if comparison.difference.by_seed else None
    corrected = comparison.interval if comparison.decision else None
    return {
        "method": comparison.method.name,
        "baseline": comparison.baseline.name,
        "method_learning_rate": findings.choices[comparison.method].learning_rate,
        "baseline_learning_rate": findings.choices[comparison.baseline].learning_rate,
        "seeds": " ".join(str(seed) for seed in comparison.difference.by_seed),
        "difference": estimate and estimate.mean,
        "low": estimate and estimate.low,
        "high": estimate and estimate.high,
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
