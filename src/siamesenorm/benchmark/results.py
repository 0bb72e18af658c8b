"""Results of a benchmark: one JSON file with the environment, and a table that is made from it alone.

It needs torch and nothing else, as a GPU's machine may have nothing else but Triton.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from siamesenorm.errors import UserError
from siamesenorm.training.environment import describe_environment, version_of

Row = dict[str, Any]
COLUMNS = {
    "boundary": (
        "topology", "dim", "streams", "candidate", "forward_ms", "backward_ms", "forward_share_of_copy_rate",
        "backward_share_of_copy_rate", "both_to_compiled", "kept_tensors", "kept_scalars_a_token",
    ),
    "step": (
        "topology", "candidate", "step_ms", "step_to_pre", "step_to_best_pre", "step_to_plain", "tokens_per_second",
        "kept_to_pre", "parameters_to_pre", "peak_bytes",
    ),
    "norms": (
        "norm", "dim", "candidate", "forward_ms", "backward_ms", "forward_share_of_copy_rate",
        "backward_share_of_copy_rate", "forward_to_rmsnorm", "backward_to_rmsnorm",
    ),
    "registers": ("boundary", "norm", "dim", "streams", "pass", "registers", "spilled_bytes", "threads", "loads_128"),
    "peers": ("stack", "compiled", "ms", "to_pre", "ours_to_peer", "kept_bytes"),
}  # fmt: skip
"""What a benchmark's table shows of its rows."""


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
        """Return what a file holds."""
        record = json.loads(path.read_text())
        return cls(device=record.pop("environment")["device"], **record)

    def to_json(self) -> dict[str, Any]:
        """Return everything with the environment."""
        compilers = {"triton": version_of("triton"), "cuda": torch.version.cuda}
        return {
            "benchmark": self.benchmark,
            "environment": describe_environment(self.device) | compilers,
            "settings": self.settings,
            "rows": self.rows,
            "not_measured": self.not_measured,
        }

    def write(self, path: Path) -> None:
        """Write the file whole, or not at all; raises UserError where that cannot be."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "w") as file:
                    file.write(json.dumps(self.to_json(), indent=1) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"results cannot be written to {path}: {error.strerror}: choose another --out") from error

    def table(self) -> str:
        """Return the rows as a Markdown table of those columns that any of them has."""
        return markdown(self.rows, [name for name in COLUMNS[self.benchmark] if any(name in row for row in self.rows)])

    def show(self, out: Path | None) -> None:
        """Write the file, if one is wanted, then say what was not measured, and print the table last."""
        if out is not None:
            self.write(out)
            print(f"results: {out}", file=sys.stderr)
        for line in self.not_measured:
            print(f"not measured: {line}", file=sys.stderr)
        if self.rows:
            print(self.table(), flush=True)


Progress = Callable[[Results], None]
"""Sees results while they come in."""


def unseen(results: Results) -> None:
    """Look at no results before their end."""


@contextmanager
def noting(missing: list[str], what: str) -> Iterator[None]:
    """Go on without what fails, and note it: of a run that nobody watches, one failure must not cost all results."""
    try:
        yield
    except Exception as reason:
        first, *_ = str(reason).strip().splitlines() or [""]
        missing.append(f"{what}: {first if isinstance(reason, UserError) else f'{type(reason).__name__}: {first}'}")


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return rows as a Markdown table; a spread is shown as "median [quartiles]", what is missing as a dash."""
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
