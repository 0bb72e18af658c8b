"""What the documentation says was measured is what the committed runs say."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections import defaultdict
from functools import partialmethod
from pathlib import Path
from statistics import fmean

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
from siamesenorm.tasks.task import TaskConfig
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loss_curve import read_loss_curve
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import read_metrics
from siamesenorm.training.verdict import judge

ROOT = Path(__file__).parents[1]
PAGES = {"comparison": "books", "digits": "digits", "moe": "moe", "diffusion": "mnist_dit", "vision": "cifar"}
"""Directories of experiments in benchmarks/, by the page in docs/ that has their tables."""
over_pages = pytest.mark.parametrize("page", PAGES)
SAFE = sorted((ROOT / "benchmarks").glob("safe*/runs/*"))
RUNS = sorted([*SAFE, *(run for name in PAGES.values() for run in (ROOT / "benchmarks" / name).glob("runs/*"))])


def test_the_committed_runs_are_there() -> None:
    assert len(RUNS) > 50


def test_committed_records_name_no_path_of_a_machine() -> None:
    for file in (ROOT / "benchmarks").glob("*/**/*.json*"):
        text = file.read_text()
        assert not re.search(r'"(?:data|vae|path|name|source)": "/|/(?:home|root|work)/', text), file


@over_pages
def test_the_tables_of_a_comparison_are_those_of_its_runs(page: str) -> None:
    text, results = (ROOT / f"docs/{page}.md").read_text(), read_experiment(ROOT / "benchmarks" / PAGES[page])
    for table in comparison_tables(find(results)):
        assert table_in_markdown(table) in text
    assert not results.unfinished and not results.missing


def printed_arguments(page: str) -> SweepArguments:
    """Return the arguments of the command that a page prints."""
    (command,) = re.findall(r"^ {4}siamesenorm (sweep .*)$", (ROOT / f"docs/{page}.md").read_text(), flags=re.MULTILINE)
    words = shlex.split(command)
    arguments: SweepArguments = parse(Arguments, words[1:], words[0])
    return arguments


@over_pages
def test_the_printed_command_finds_every_run_finished(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs have the identities of the committed ones; their digest stands in for data that are not here."""
    directory = ROOT / "benchmarks" / PAGES[page]
    task = RunDirectory(next(directory.glob("runs/*"))).read_config().task
    monkeypatch.setattr(RunConfig, "resolved", partialmethod(resolved_with, task))
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


def resolved_with(run: RunConfig, committed: TaskConfig) -> RunConfig:
    """Return what `RunConfig.resolved` does on the data of a committed run."""
    model = run.task.model
    if hasattr(model, "vocabulary"):
        model = dataclasses.replace(model, vocabulary=model.vocabulary or committed.model.vocabulary)
    task = dataclasses.replace(run.task, digest=run.task.digest or committed.digest, model=model)
    return dataclasses.replace(run, task=task.resolved(run.precision))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_verdict_of_a_run_follows_from_its_record(run: Path) -> None:
    stored = RunDirectory(run).read_verdict()
    now = judge(read_loss_curve(run / "metrics.jsonl"))
    assert stored is not None and (now.label, now.reasons) == (stored.label, stored.reasons)


def test_no_run_that_is_called_safe_is_flagged() -> None:
    words = {run.name: judge(read_loss_curve(run / "metrics.jsonl")).label for run in SAFE}
    assert words and set(words.values()) == {"stable"}


def test_the_routers_of_the_committed_mixtures_stay_even() -> None:
    """The numbers of docs/moe.md, means over the last tenth of a run's steps."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in (ROOT / "benchmarks/moe").glob("runs/*"):
        records = [record for record in read_metrics(RunDirectory(run).metrics_file) if record["kind"] == "train"]
        for name in ("load_balancing_loss", "largest_expert_load", "expert_load_entropy"):
            found[name].append(fmean(record[name] for record in records[-len(records) // 10 :]))
        assert all(record["dropped_tokens"] == 0 for record in records)
        assert 7.3 < records[0]["loss"] < 8.5 and records[-1]["loss"] < 4.8
    ranges = {name: (round(min(values), 2), round(max(values), 2)) for name, values in found.items()}
    assert ranges["load_balancing_loss"] == (1.02, 1.17)
    assert ranges["largest_expert_load"] == (1.71, 2.27)
    assert ranges["expert_load_entropy"][0] == 0.94
