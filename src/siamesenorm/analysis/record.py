"""The record of a monitor: lines of a `metrics.jsonl`, or a list in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siamesenorm.analysis.measurements import Key
from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors
from siamesenorm.training.metrics import MetricsLog, read_metrics

Line = dict[str, Any]


class Record:
    """Lines in order of their steps, at once in the file at `path`, or without a path in memory."""

    def __init__(self, path: Path | None) -> None:
        """Open a record, new or to go on; raises UserError when it cannot be written."""
        self.path = path
        self._lines: list[Line] = []
        self._log: MetricsLog | None = None
        if path is not None:
            with disk_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            self._log = MetricsLog(path)
        self.is_empty = not self.lines

    @property
    def lines(self) -> list[Line]:
        """All lines, those of earlier processes included."""
        return list(self._lines) if self.path is None else read_metrics(self.path)

    def append(self, line: Line) -> None:
        """Add a line; a file that was closed is opened again."""
        self.is_empty = False
        if self.path is None:
            self._lines.append(line)
            return
        self._log = self._log or MetricsLog(self.path)
        self._log.append(line)

    def cut_back(self, after: int) -> None:
        """Forget the lines after a step; raises UserError where a file would keep no step: it is of another run."""
        lines = self.lines
        steps = [line["step"] for line in lines if "step" in line]
        if self.path is None:
            self._lines = [line for line in lines if line.get("step", after) <= after]
        elif steps and steps[0] > after:
            raise UserError(
                f"{self.path} holds steps {steps[0]} to {steps[-1]} and this run begins at step {after + 1}: give "
                "another path, or remove that file"
            )
        elif any(step > after for step in steps):
            self._log = self._log or MetricsLog(self.path)
            self._log.truncate(_end_of_step(self.path, after))

    def close(self) -> None:
        """Wait until the file is on the disk, and close it."""
        if self._log is not None:
            self._log.sync()
            self._log.close()
            self._log = None


def _end_of_step(path: Path, step: int) -> int:
    """Return the number of bytes before the first line of a later step."""
    end = 0
    for line in path.read_bytes().split(b"\n"):
        if line.strip() and decode_json(line).get("step", step) > step:
            break
        end += len(line) + 1
    return end


def streams_line(step: int, values: Mapping[Key, float]) -> Line:
    """Return the line of a measured step; see `StreamMonitor` for its fields."""
    sublayers: dict[str, dict[str, Any]] = {}
    end: dict[str, dict[str, float]] = {}
    blocks: dict[str, dict[str, float]] = {}
    for (part, *names, quantity), value in values.items():
        if part == "sublayer":
            sublayers.setdefault(names[0], {"streams": {}})[quantity] = value
        elif part == "stream":
            entry = sublayers.setdefault(names[0], {"streams": {}})
            entry["streams"].setdefault(names[1], {})[quantity] = value
        elif part == "end":
            end.setdefault(names[0], {})[quantity] = value
        elif part == "block":
            blocks.setdefault(names[0], {})[quantity] = value
    for sublayer in sublayers.values():
        for stream in sublayer["streams"].values():
            if "output" in sublayer:
                stream["ratio"] = quotient(sublayer["output"], stream["rms"])
            if "change" in stream:
                stream["change"] = quotient(stream["change"], stream["rms"])
    for block in blocks.values():
        if "update_norm" in block:
            block["update_ratio"] = quotient(block["update_norm"], block["weight_norm"])
    line: Line = {"kind": "streams", "step": step, "sublayers": sublayers, "end": end, "blocks": blocks}
    norm = gradient_norm(values)
    return line if norm is None else {**line, "gradient_norm": norm}


def gradient_norm(values: Mapping[Key, float]) -> float | None:
    """Return the norm of the whole gradient from those of its blocks, if they were measured."""
    norms = [value for (part, *_, quantity), value in values.items() if (part, quantity) == ("block", "gradient_norm")]
    return math.hypot(*norms) if norms else None


def quotient(part: float, of: float) -> float:
    """Return part / of: infinite for something of nothing, NaN for nothing of nothing."""
    if of:
        return part / of
    return math.inf if part > 0 else math.nan
