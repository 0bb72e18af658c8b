"""siamesenorm report: tables, figures and a page of a sweep, of another experiment, or of a single run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.cli.output import console
from siamesenorm.comparison.comparison_report import comparison_report, run_report
from siamesenorm.comparison.experiment_plan import Part, read_plan
from siamesenorm.comparison.findings import find
from siamesenorm.comparison.report_parts import Report
from siamesenorm.comparison.report_writer import table_on_terminal, write_report
from siamesenorm.comparison.results import read_experiment, read_single_run
from siamesenorm.recipes.continued import continued_report, find_continued
from siamesenorm.recipes.item_report import item_report
from siamesenorm.recipes.item_results import ITEM_FILE, read_item
from siamesenorm.training.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Make the report of a sweep, of another experiment, or of a single run, finished or not."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory of the experiment or of the run."""
    out: Path | None = None
    """Directory of the report; DIRECTORY/report if not given."""
    title: str = ""
    """Title of the report; methods and data if not given."""
    mixed: bool = False
    """Allow runs that were computed with different kernels, or partly compiled."""


Arguments = ReportArguments


def run(arguments: ReportArguments) -> None:
    """Write the report and print its tables and its path."""
    report = build_report(arguments.directory, title=arguments.title, mixed=arguments.mixed)
    show_report(report, arguments.out or arguments.directory / "report")


def build_report(directory: Path, *, title: str = "", mixed: bool = False) -> Report:
    """Return the report that suits a directory; raises UserError where it has nothing to report."""
    plan = read_plan(directory)
    if (directory / ITEM_FILE).is_file():
        return item_report(read_item(directory), title=title)
    if plan is None and RunDirectory(directory).is_run:
        return run_report(read_single_run(directory), title=title)
    results = read_experiment(directory, mixed=mixed)
    if any(run.part is Part.CONTINUED for run in results.plan.runs.values()):
        return continued_report(find_continued(results), title=title)
    return comparison_report(find(results), title=title)


def show_report(report: Report, out: Path) -> None:
    """Write a report, print its tables, and where the page is."""
    page = write_report(report, out)
    output = console()
    for table in report.tables:
        output.print(table_on_terminal(table, output.width))
    print(f"report: {page}")
