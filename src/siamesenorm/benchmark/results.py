"""Results of a benchmark: one JSON file with the environment, and a table made from its rows.

It needs only torch: the machine of a GPU may have nothing else but Triton.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from siamesenorm.benchmark.measurement import allow_many_graphs
from siamesenorm.errors import UserError
from siamesenorm.files import disk_errors, write_atomically
from siamesenorm.training.execution import describe_environment, version_of

Row = dict[str, Any]
Settings = TypeVar("Settings")
"""A dataclass."""
COLUMNS = {
    "boundary": (
        "topology", "dim", "streams", "candidate", "forward_ms", "backward_ms", "forward_share_of_copy_rate",
        "backward_share_of_copy_rate", "both_to_compiled", "kept_tensors", "kept_scalars_a_token",
    ),
    "step": (
        "topology", "candidate", "step_ms", "step_to_pre", "step_to_best_pre", "tokens_per_second", "utilisation",
        "peak", "kept_to_pre", "parameters_to_pre", "peak_bytes",
    ),
    "norms": (
        "norm", "dim", "candidate", "forward_ms", "backward_ms", "forward_share_of_copy_rate",
        "backward_share_of_copy_rate", "forward_to_rmsnorm", "backward_to_rmsnorm",
    ),
}  # fmt: skip
"""The columns of a benchmark's table; of another benchmark, all columns of its first row."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a benchmark measured: settings, rows, and why other rows are missing."""

    benchmark: str
    device: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the content of a file."""
        record = json.loads(path.read_text())
        return cls(device=record.pop("environment")["device"], **record)

    def write(self, path: Path) -> None:
        """Write everything with the environment, atomically; raises UserError if the file cannot be written."""
        compilers = {"triton": version_of("triton"), "cuda": torch.version.cuda}
        record = {
            "benchmark": self.benchmark,
            "environment": describe_environment(self.device) | compilers,
            "settings": self.settings,
            "rows": self.rows,
            "not_measured": self.not_measured,
        }
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())

    def show(self, out: Path | None) -> None:
        """Write the file if a path is given; print what was not measured, and last a table of the columns present."""
        if out is not None:
            self.write(out)
            print(f"results: {out}", file=sys.stderr)
        for line in self.not_measured:
            print(f"not measured: {line}", file=sys.stderr)
        if self.rows:
            columns = COLUMNS.get(self.benchmark, tuple(self.rows[0]))
            present = [name for name in columns if any(name in row for row in self.rows)]
            print(markdown(self.rows, present), flush=True)


def check_writable(path: Path) -> None:
    """Raise UserError unless a file can be written at `path`: minutes of measurement should not be lost."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    if path.is_dir():
        raise UserError(f"{path} is a directory: name a file for the results")


Progress = Callable[[Results], object]
"""Receives the results so far after each part."""


class Session(Generic[Settings]):
    """A benchmark while it runs: settings, device, the time after which nothing starts, and the results so far."""

    def __init__(
        self,
        benchmark: str,
        settings: Settings,
        device: torch.device,
        deadline: float = math.inf,
        progress: Progress = lambda results: None,
    ) -> None:
        self.settings, self.device, self.deadline, self.progress = settings, device, deadline, progress
        self.results = Results(benchmark=benchmark, device=str(device), settings=vars(settings))

    @contextmanager
    def part(self, what: str) -> Iterator[list[Row]]:
        """Return the list to which a part adds its rows; note a failure, and show the results so far."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with on_device, allow_many_graphs(), self.noting(what):
            yield self.results.rows
        self.progress(self.results)

    def noting(self, what: str) -> AbstractContextManager[None]:
        """Measure something that may fail; see `measuring`."""
        return measuring(what, self.results.not_measured)

    def note(self, line: str) -> None:
        """Add a line on what is not measured, once."""
        if line not in self.results.not_measured:
            self.results.not_measured.append(line)

    def check_time(self) -> None:
        """Raise UserError after the deadline."""
        if time.monotonic() > self.deadline:
            raise UserError("no time was left")


@contextmanager
def measuring(what: str, missing: list[str]) -> Iterator[None]:
    """Print on standard error what is measured; add an exception to `missing` and continue.

    In an unattended run one failure must not cost all results.
    """
    print(f"measuring {what}", file=sys.stderr, flush=True)
    try:
        yield
    except Exception as reason:
        first, *_ = str(reason).strip().splitlines() or [""]
        missing.append(f"{what}: {first if isinstance(reason, UserError) else f'{type(reason).__name__}: {first}'}")


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return rows as a Markdown table; a spread is shown as "median [quartiles]", a missing value as a dash."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines.extend(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows)
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return f"{value['median']:.3g} [{value['low']:.3g}, {value['high']:.3g}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
