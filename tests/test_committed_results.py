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
from siamesenorm.comparison.experiment_plan import Part, read_plan
from siamesenorm.comparison.experiment_runner import Experiment
from siamesenorm.comparison.findings import find
from siamesenorm.comparison.report_writer import table_in_markdown
from siamesenorm.comparison.results import read_experiment
from siamesenorm.comparison.sweep_grid import comparisons_of, configured
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loss_curve import read_loss_curve
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import judge

ROOT = Path(__file__).parents[1]
BOOKS, DIGITS = ROOT / "benchmarks/books", ROOT / "benchmarks/digits"
SAFE = sorted((ROOT / "benchmarks").glob("safe*/runs/*"))
RUNS = sorted([*BOOKS.glob("runs/*"), *DIGITS.glob("runs/*"), *SAFE])
COMMITTED = sorted((ROOT / "benchmarks").glob("*/runs/*"))


def test_the_committed_runs_are_there() -> None:
    assert len(RUNS) > 50


@pytest.mark.parametrize("run", COMMITTED, ids=lambda run: run.name)
def test_a_committed_run_keeps_its_identity(run: Path) -> None:
    assert RunDirectory(run).read_config().identity[:12] == run.name


@pytest.mark.parametrize(("name", "directory"), [("comparison", BOOKS), ("digits", DIGITS)])
def test_the_tables_of_a_comparison_are_those_of_its_runs(name: str, directory: Path) -> None:
    page, results = (ROOT / f"docs/{name}.md").read_text(), read_experiment(directory)
    for table in comparison_tables(find(results)):
        assert table_in_markdown(table) in page
    assert not results.unfinished and not results.missing


def printed_arguments(page: str) -> SweepArguments:
    """Return the arguments of the command that a page prints."""
    (command,) = re.findall(r"^ {4}siamesenorm (sweep .*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    words = shlex.split(command)
    arguments: SweepArguments = parse(Arguments, words[1:], words[0])
    return arguments


@pytest.mark.parametrize(("page", "directory"), [("docs/comparison.md", BOOKS), ("docs/digits.md", DIGITS)])
def test_the_printed_command_finds_every_run_finished(
    page: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs have the identities of the committed ones; a digest stands in for the books, which are not here."""
    if directory is BOOKS:
        monkeypatch.setattr(RunConfig, "resolved", resolved_without_data)
    printed = printed_arguments(page)
    template = template_of(printed.run)
    plan = read_plan(directory)
    assert plan is not None
    assert Experiment(directory=directory, template=template, jobs=1).record == plan.template
    choices = find(read_experiment(directory)).choices
    asked = {
        Part.SELECTION: {config.identity for _, config in printed.grid.selection_runs(template)},
        Part.REPORT: {
            configured(template, method, choices[method].learning_rate, seed).identity
            for method in printed.grid.reported_methods
            for seed in printed.grid.seeds
        },
    }
    for part, identities in asked.items():
        runs = [RunDirectory(directory / "runs" / name) for name, run in plan.runs.items() if run.part is part]
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
    words = {run.name: judge(read_loss_curve(run / "metrics.jsonl")).label for run in SAFE}
    assert words and set(words.values()) == {"stable"}
