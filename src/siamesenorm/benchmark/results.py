"""Results of a benchmark: one JSON file with the environment, and a table that is made from it alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siamesenorm.data.storage import disk_errors_told
from siamesenorm.training.environment import describe_environment

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a benchmark measured: settings, rows, and why other rows are missing."""

    benchmark: str
    device: str
    settings: dict[str, Any]
    rows: list[Row]
    not_measured: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return everything with the environment."""
        return {
            "benchmark": self.benchmark,
            "environment": describe_environment(self.device),
            "settings": self.settings,
            "rows": self.rows,
            "not_measured": self.not_measured,
        }

    def write(self, path: Path) -> None:
        """Write the file whole, or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with disk_errors_told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n")
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)


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
