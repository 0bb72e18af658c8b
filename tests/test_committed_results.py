"""What the documentation says was measured is what the committed runs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from siamesenorm.comparison.findings import find
from siamesenorm.comparison.renderings import for_markdown
from siamesenorm.comparison.results import read_sweep
from siamesenorm.comparison.tables import at_chosen_rates, by_learning_rate
from siamesenorm.training.curves import read_loss_curve
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import judge

ROOT = Path(__file__).parents[1]
BOOKS, SAFE = ROOT / "benchmarks/books", ROOT / "benchmarks/safe"
RUNS = sorted([*BOOKS.glob("runs/*"), *SAFE.glob("runs/*")])


def test_the_committed_runs_are_there() -> None:
    assert len(RUNS) > 50


def test_the_tables_of_the_comparison_are_those_of_its_runs() -> None:
    findings = find(read_sweep(BOOKS))
    page = (ROOT / "docs/comparison.md").read_text()
    for table in (at_chosen_rates(findings), by_learning_rate(findings)):
        assert for_markdown(table) in page


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_verdict_of_a_run_follows_from_its_record(run: Path) -> None:
    stored = RunDirectory(run).read_verdict()
    now = judge(read_loss_curve(run / "metrics.jsonl"))
    assert stored is not None and now == stored


def test_no_run_that_is_called_safe_is_flagged() -> None:
    words = {run.name: judge(read_loss_curve(run / "metrics.jsonl")).label for run in SAFE.glob("runs/*")}
    assert words and set(words.values()) == {"stable"}
