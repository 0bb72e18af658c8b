"""What the documentation says was measured is what the committed runs say."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from siamesenorm.cli.parsing import parse
from siamesenorm.cli.sweep import Arguments, SweepArguments, template_of
from siamesenorm.comparison.comparison_tables import comparison_tables
from siamesenorm.comparison.experiment import Experiment
from siamesenorm.comparison.findings import find
from siamesenorm.comparison.plan import Part, read_plan
from siamesenorm.comparison.report_writer import table_in_markdown
from siamesenorm.comparison.results import read_experiment
from siamesenorm.comparison.sweep import comparisons_of, configured
from siamesenorm.training.config import RunConfig
from siamesenorm.training.curves import read_loss_curve
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import judge

ROOT = Path(__file__).parents[1]
BOOKS, SAFE = ROOT / "benchmarks/books", ROOT / "benchmarks/safe"
RUNS = sorted([*BOOKS.glob("runs/*"), *SAFE.glob("runs/*")])
COMMITTED = sorted((ROOT / "benchmarks").glob("*/runs/*"))


def test_the_committed_runs_are_there() -> None:
    assert len(RUNS) > 50


@pytest.mark.parametrize("run", COMMITTED, ids=lambda run: run.name)
def test_a_committed_run_keeps_its_identity(run: Path) -> None:
    assert RunDirectory(run).read_config().identity[:12] == run.name


def test_the_tables_of_the_comparison_are_those_of_its_runs() -> None:
    page = (ROOT / "docs/comparison.md").read_text()
    for table in comparison_tables(find(read_experiment(BOOKS))):
        assert table_in_markdown(table) in page


@pytest.fixture
def printed() -> SweepArguments:
    """The arguments of the command that docs/comparison.md prints."""
    page = (ROOT / "docs/comparison.md").read_text()
    (command,) = re.findall(r"^ {4}siamesenorm (sweep .*)$", page, flags=re.MULTILINE)
    words = shlex.split(command)
    arguments: SweepArguments = parse(Arguments, words[1:], words[0])
    return arguments


def test_the_printed_command_finds_every_run_finished(printed: SweepArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs have the identities of the committed ones; the digest stands in for the data, which are not here."""
    monkeypatch.setattr(RunConfig, "resolved", resolved_without_data)
    template = template_of(printed.run)
    plan = read_plan(BOOKS)
    assert plan is not None
    assert Experiment(directory=BOOKS, template=template, jobs=1).record == plan.template
    choices = find(read_experiment(BOOKS)).choices
    asked = {
        Part.SELECTION: {config.identity for _, config in printed.grid.selection_runs(template)},
        Part.REPORT: {
            configured(template, method, choices[method].learning_rate, seed).identity
            for method in printed.grid.reported_methods
            for seed in printed.seeds
        },
    }
    for part, identities in asked.items():
        runs = [RunDirectory(BOOKS / "runs" / name) for name, run in plan.runs.items() if run.part is part]
        assert {run.read_config().identity for run in runs} == identities
        assert all(run.read_verdict() for run in runs)
    assert set(comparisons_of(printed.grid.all_methods, template)) == set(plan.comparisons)


def resolved_without_data(run: RunConfig) -> RunConfig:
    """Return what `RunConfig.resolved` does on the books."""
    digest = run.task.digest or RunDirectory(next(BOOKS.glob("runs/*"))).read_config().task.digest
    model = dataclasses.replace(run.task.model, vocabulary=run.task.model.vocabulary or 1024)
    task = dataclasses.replace(run.task, digest=digest, model=model)
    return dataclasses.replace(run, task=task.resolved(run.precision))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_verdict_of_a_run_follows_from_its_record(run: Path) -> None:
    stored = RunDirectory(run).read_verdict()
    now = judge(read_loss_curve(run / "metrics.jsonl"))
    assert stored is not None and (now.label, now.reasons) == (stored.label, stored.reasons)


def test_no_run_that_is_called_safe_is_flagged() -> None:
    words = {run.name: judge(read_loss_curve(run / "metrics.jsonl")).label for run in SAFE.glob("runs/*")}
    assert words and set(words.values()) == {"stable"}
