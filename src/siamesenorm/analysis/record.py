"""The record of a monitor: lines of a `metrics.jsonl`, and the losses in them with the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from siamesenorm.analysis.measurements import Key
from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors
from siamesenorm.training.loss_curve import LossCurve
from siamesenorm.training.run_record import MetricsLog, read_metrics
from siamesenorm.training.verdict import StabilityMonitor, Thresholds, Verdict, judge

Line = dict[str, Any]


class Record:
    """Lines in order of their steps: in the file at `path`, passed to `write`, or in memory."""

    def __init__(self, path: Path | None, *, resume: bool, write: Callable[[Line], None] | None = None) -> None:
        """Open a record; without `resume` a file that is there is renamed to `<name>.old`."""
        self.path, self._write = path, write
        self._lines: list[Line] = []
        self._log: MetricsLog | None = None
        if path is not None:
            with disk_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                if not resume and path.is_file() and path.stat().st_size:
                    path.replace(path.with_name(f"{path.name}.old"))
            self._log = MetricsLog(path)
        self.is_empty = not self.lines

    @property
    def lines(self) -> list[Line]:
        """All lines that were kept, those of the process before a resume included."""
        return list(self._lines) if self.path is None else read_metrics(self.path)

    def append(self, line: Line) -> None:
        """Add a line; a file that was closed is opened again."""
        self.is_empty = False
        if self._write is not None:
            self._write(line)
        elif self.path is None:
            self._lines.append(line)
        else:
            self._log = self._log or MetricsLog(self.path)
            self._log.append(line)

    def cut_back(self, after: int) -> None:
        """Drop the lines after a step; raises UserError where a file would keep no step: it is of another run."""
        lines = self.lines
        steps = [line["step"] for line in lines if "step" in line]
        if self.path is None:
            self._lines = [line for line in lines if line.get("step", after) <= after]
        elif steps and steps[0] > after:
            raise UserError(
                f"{self.path} has steps {steps[0]} to {steps[-1]} and this run begins at step {after + 1}: leave "
                "resume out to start a new file"
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


class LossHistory:
    """Losses by step, what is known about the run, and the verdict.

    `facts` has the fields of `LossCurve` that describe a run, None where unknown.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.facts: dict[str, Any] = dict.fromkeys(("steps_total", "warmup_steps", "floor", "scale"))
        self._points: list[tuple[int, float, float | None]] = []
        self._monitor: StabilityMonitor | None = None
        self._observed = 0

    def expect(self, facts: Mapping[str, Any]) -> None:
        """Add facts that are not known yet; raises TypeError for one of another name."""
        if others := facts.keys() - self.facts.keys():
            raise TypeError(f"unknown facts {sorted(others)}: give {', '.join(self.facts)}")
        self.facts |= {name: value for name, value in facts.items() if self.facts.get(name) is None}

    @property
    def last_step(self) -> int | None:
        """The last step with a loss."""
        return self._points[-1][0] if self._points else None

    def add(self, step: int, loss: float, gradient_norm: float | None) -> None:
        """Add the loss of a later step."""
        self._points.append((step, loss, gradient_norm))

    def restore(self, lines: Iterable[Line]) -> None:
        """Add the record of the process before."""
        for line in lines:
            if line.get("kind") == "train":
                self.add(line["step"], line["loss"], line.get("gradient_norm"))
            elif line.get("kind") == "model":
                self.expect({name: line.get("steps" if name == "steps_total" else name) for name in self.facts})

    def cut_back(self, after: int) -> None:
        """Drop what came after a step."""
        self._points = [point for point in self._points if point[0] <= after]
        self._monitor, self._observed = None, 0

    def verdict(self) -> Verdict:
        """Return the verdict on the losses so far; raises UserError without losses."""
        return judge(self._curve(), self.thresholds)

    def should_stop(self) -> bool:
        """Whether the run has been lost for longer than the patience.

        Raises UserError while the length of the run is unknown: the patience is a part of it.
        """
        if self.facts["steps_total"] is None:
            raise UserError("should_stop needs the length of the run: give the monitor its steps_total")
        if len(self._points) < 2:
            return False
        if self._monitor is None:
            # Losses may be logged every n steps: the monitor counts points.
            curve = self._curve()
            points = len(self._points) + curve.missing_points
            self._monitor = StabilityMonitor(steps_total=points, scale=curve.scale, thresholds=self.thresholds)
        for _, loss, _ in self._points[self._observed :]:
            self._monitor.observe(loss)
        self._observed = len(self._points)
        return self._monitor.should_stop

    def _curve(self) -> LossCurve:
        steps, losses, norms = zip(*self._points, strict=True) if self._points else ((), (), ())
        known = {name: value for name, value in self.facts.items() if value is not None}
        return LossCurve(steps=steps, losses=losses, gradient_norms=norms, **known)


def streams_line(step: int, values: Mapping[Key, float]) -> Line:
    """Return the line of a measured step; see `StreamMonitor` for its fields."""
    line: Line = {"kind": "streams", "step": step, "sublayers": {}, "end": {}, "blocks": {}}
    for (*path, quantity), value in values.items():
        entry = line
        for name in path:
            entry = entry.setdefault(name, {})
        entry[quantity] = value
    line.pop("train", None)
    for sublayer in line["sublayers"].values():
        for stream in sublayer.setdefault("streams", {}).values():
            if "output" in sublayer:
                stream["ratio"] = quotient(sublayer["output"], stream["rms"])
            if "change" in stream:
                stream["change"] = quotient(stream["change"], stream["rms"])
    for block in line["blocks"].values():
        if "update_norm" in block:
            block["update_ratio"] = quotient(block["update_norm"], block["weight_norm"])
    norm = gradient_norm(values)
    return line if norm is None else {**line, "gradient_norm": norm}


def gradient_norm(values: Mapping[Key, float]) -> float | None:
    """Return the norm of the whole gradient from those of its blocks, if they were measured."""
    norms = [value for key, value in values.items() if (key[0], key[-1]) == ("blocks", "gradient_norm")]
    return math.hypot(*norms) if norms else None


def quotient(part: float, of: float) -> float:
    """Return part / of: infinite for something of nothing, NaN for nothing of nothing."""
    if of:
        return part / of
    return math.inf if part > 0 else math.nan


def summary(lines: Iterable[Line]) -> str:
    """Return a text table of the streams in the last measured step, with the first one beside it."""
    measured = [line for line in lines if line["kind"] == "streams"]
    if not measured:
        return "no step was measured"
    first, last = measured[0], measured[-1]
    rows: list[tuple[str, ...]] = [
        ("stream", f"rms, step {first['step']}", f"step {last['step']}", "max", "output / stream", "change")
    ]
    for name, sublayer in last["sublayers"].items():
        for stream, entry in sublayer["streams"].items():
            before = first["sublayers"].get(name, {"streams": {}})["streams"].get(stream, {}).get("rms")
            numbers = (before, *(entry.get(quantity) for quantity in ("rms", "max", "ratio", "change")))
            rows.append((f"{name} {stream}", *("" if number is None else f"{number:.4g}" for number in numbers)))
    first_width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join("  ".join([name.ljust(first_width), *map(str.rjust, cells, widths)]) for name, *cells in rows)
