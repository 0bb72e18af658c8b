"""siamesenorm report: tables, figures and a page of a sweep."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from siamesenorm.comparison.findings import find
from siamesenorm.comparison.renderings import for_terminal
from siamesenorm.comparison.report import write_report
from siamesenorm.comparison.results import read_sweep
from siamesenorm.comparison.tables import at_chosen_rates, by_learning_rate


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Make the report of a sweep, finished or not."""

    sweep: Annotated[Path, tyro.conf.Positional]
    """Directory of the sweep."""
    out: Path | None = None
    """Directory of the report; SWEEP/report if not given."""


def run(arguments: Arguments) -> None:
    """Write the report and print its table and its path."""
    show_report(arguments.sweep, arguments.out or arguments.sweep / "report")


def show_report(sweep: Path, out: Path) -> None:
    """Write the report of a sweep, print its tables, and say where the page is."""
    findings = find(read_sweep(sweep))
    paths = write_report(findings, out)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for table in (by_learning_rate(findings), at_chosen_rates(findings)):
        console.print(for_terminal(table, console.width))
    print(f"report: {paths.page}")
