"""siamesenorm runs: the runs below directories, whose own names are hashes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from siamesenorm.cli.output import console
from siamesenorm.errors import UserError
from siamesenorm.files import encode_json
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import read_metrics

COLUMNS = ("directory", "method", "learning_rate", "seed", "verdict", "step", "steps")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """List the runs below directories: directory, method, learning rate, seed, verdict and step."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),)
    """Directories to search, at any depth."""
    json: bool = False
    """Print JSON."""


def run(arguments: Arguments) -> None:
    """Print a row for each run."""
    rows = [describe(directory) for directory in find_runs(arguments.directories)]
    if arguments.json:
        print(encode_json(rows, indent=1))
        return
    table = Table(header_style="bold")
    for column in COLUMNS:
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column == "directory")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console().print(table)


def find_runs(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the directories of runs; raises UserError for a directory that does not exist or has none."""
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: name one that holds runs")
        found = [path for path in runs_below(directory) if RunDirectory(path).config_file.exists()]
        if not found:
            raise UserError(f"{directory} has no runs: `siamesenorm train` and `sweep` write them")
        yield from found


def runs_below(directory: Path) -> list[Path]:
    """Return the directories with a record of training at any depth."""
    return sorted(path.parent for path in directory.rglob("metrics.jsonl"))


def describe(path: Path) -> dict[str, Any]:
    """Return the row of one run; what cannot be read is None, and the verdict says so."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"directory": str(path)}
    try:
        directory = RunDirectory(path)
        config = directory.read_config()
        row |= {"method": config.label, "learning_rate": config.optimizer.learning_rate, "seed": config.seed}
        row["steps"] = config.steps
        verdict = directory.read_verdict()
        row["verdict"] = verdict and verdict.label
        row["step"] = max((each["step"] for each in read_metrics(directory.metrics_file) if "step" in each), default=0)
    except UserError as error:
        row["verdict"] = f"unreadable: {error}"
    return row


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
