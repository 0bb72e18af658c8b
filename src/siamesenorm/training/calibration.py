"""How far the verdict can be trusted: false positives on safe runs, and detection of faults injected into them.

Everything is deterministic: faults are added to recorded curves, so their noise is that of real batches. Heights are in
units of the task's scale (1 nat for language).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError
from siamesenorm.files import encode_json, write_atomically
from siamesenorm.training.curves import LossCurve, read_loss_curve
from siamesenorm.training.stability import centred_medians
from siamesenorm.training.verdict import DEFAULT_THRESHOLDS, DETECTOR, Label, Thresholds, Verdict, judge

LOCAL_WINDOW = 51
TENTHS = 10


class Fault(StrEnum):
    """What is done to a curve."""

    SPIKE = "spike"
    STAYS = "rises and stays"
    RISES = "rises to the end"
    NAN = "becomes NaN"
    OFTEN_HIGH = "is high in part of the steps"
    PLATEAU = "stays near the floor"
    SHORT = "ends above the floor, still falling"


def inject_spike(losses: Sequence[float], *, at: int, height: float, width: int) -> list[float]:
    """Return the losses with `height` more on `width` steps from step `at` (counted from 1)."""
    return [loss + height if at <= step < at + width else loss for step, loss in enumerate(losses, start=1)]


def inject_rise(losses: Sequence[float], *, at: int, height: float) -> list[float]:
    """Return the losses with a rise from step `at` (counted from 1) that reaches `height` at the last step."""
    slope = height / (len(losses) - at + 1)
    return [loss + slope * max(0, step - at + 1) for step, loss in enumerate(losses, start=1)]


def inject_high_part(losses: Sequence[float], *, part: float, height: float) -> list[float]:
    """Return the losses with `height` more on this part of the steps, chosen at random with a fixed seed."""
    generator = random.Random(0)
    return [loss + height * (generator.random() < part) for loss in losses]


def inject_plateau(losses: Sequence[float], *, level: float) -> list[float]:
    """Return the losses of a run that falls to `level` and stays there, with its own noise."""
    medians = centred_medians(losses, LOCAL_WINDOW // 2)
    return [loss + max(0.0, level - middle) for loss, middle in zip(losses, medians, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The faults to inject: heights and offsets in units of the scale, widths in steps.

    Faults with a place begin at `places` of them, from the first step after the warm-up to the last, and are counted
    by the tenth of the run they begin in. Plateaus are at the floor plus an offset.
    """

    spike_heights: tuple[float, ...] = (0.5, 1.0, 2.0)
    spike_widths: tuple[int, ...] = (1, 2, 3)
    spike_places: int = 41
    divergence_heights: tuple[float, ...] = (0.75, 1.0, 2.0)
    divergence_places: int = 21
    high_heights: tuple[float, ...] = (0.75, 1.0, 1.5)
    high_parts: tuple[float, ...] = (0.1, 0.25, 0.5)
    plateau_offsets: tuple[float, ...] = (-0.2, -0.15, -0.1, 0.0, 0.1)

    @property
    def cells(self) -> int:
        """How many detections a calibration has."""
        spikes = len(self.spike_heights) * len(self.spike_widths)
        divergences = 2 * len(self.divergence_heights) + 1
        others = len(self.high_heights) * len(self.high_parts) + len(self.plateau_offsets) + 1
        return TENTHS * (spikes + divergences) + others


DEFAULT_GRID = Grid()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """How many injections of one fault were detected.

    `width` is that of spikes (steps), `part` the part of the steps that is high, and `tenth` the tenth of the run after
    the warm-up, from 0, in which the fault begins. `noticed` counts runs that were not called stable, whatever else.
    """

    fault: Fault
    height: float | None = None
    width: int | None = None
    part: float | None = None
    tenth: int | None = None
    trials: int
    detected: int
    noticed: int

    @property
    def rate(self) -> float:
        """The part of the trials that was detected; NaN without trials."""
        return self.detected / self.trials if self.trials else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What `calibrate` measured.

    `flagged` has the verdict's sentence of every safe run that was not called stable: the false positives.
    `gradient_spiked` counts the safe runs that a rule on gradient norms would have called spiked.
    """

    runs: tuple[str, ...]
    flagged: Mapping[str, str]
    gradient_spiked: int
    detections: tuple[Detection, ...]
    thresholds: Thresholds
    detector: int = DETECTOR

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, without the fields that a fault does not have."""
        detections = [
            {name: value for name, value in dataclasses.asdict(each).items() if value is not None}
            for each in self.detections
        ]
        return dataclasses.asdict(self) | {"schema": 2, "detections": detections}

    def write(self, path: Path) -> None:
        """Write the report as JSON; a crash leaves the old file or the new one."""
        write_atomically(path, (encode_json(self.to_json(), indent=1) + "\n").encode())

    def markdown(self) -> str:
        """Return the report as Markdown: false positives, and a table for every fault."""
        flagged = "".join(f"\n* `{name}`: {sentence}" for name, sentence in self.flagged.items())
        return "\n\n".join(
            [
                f"False positives: {len(self.flagged)} of {len(self.runs)} safe runs were not called stable; by "
                f"gradient norms {self.gradient_spiked} would have been called spiked.{flagged}",
                self.table(Fault.SPIKE),
                self.table(Fault.STAYS, Fault.RISES, Fault.NAN),
                self.table(Fault.OFTEN_HIGH),
                self.table(Fault.PLATEAU, Fault.SHORT),
            ]
        )

    def table(self, *faults: Fault) -> str:
        """Return the rates of detection as a Markdown table: a row for every tenth of the run, or for every fault."""
        found = [each for each in self.detections if each.fault in faults]
        if any(each.tenth is not None for each in found):
            columns = list(dict.fromkeys(_injection(each) for each in found))
            rates = {(each.tenth, _injection(each)): _percent(each) for each in found}
            rows = [
                [f"{10 * tenth} to {10 * tenth + 10} %", *(rates.get((tenth, column), "") for column in columns)]
                for tenth in range(TENTHS)
            ]
            return _table(["begins at, of the run after warm-up", *columns], rows)
        return _table(
            ["fault", "trials", "called so", "not called stable"],
            [[_injection(each), str(each.trials), _percent(each), _rate(each.noticed, each.trials)] for each in found],
        )


def _injection(detection: Detection) -> str:
    """Return what was injected, in a few words."""
    height = "" if detection.height is None else f"{detection.height:+g}"
    if detection.fault is Fault.SPIKE:
        return f"{height}, {detection.width} step{'s' * (detection.width != 1)}"
    if detection.part is not None:
        return f"{100 * detection.part:.0f} % of the steps {height}"
    return f"{detection.fault} {height}".strip()


def _percent(detection: Detection) -> str:
    return _rate(detection.detected, detection.trials)


def _rate(count: int, trials: int) -> str:
    return f"{100 * count / trials:.0f} %" if trials else "no trial"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def read_runs(paths: Iterable[Path]) -> dict[str, LossCurve]:
    """Return the curves of run directories (or loss curve files) by the name of each.

    Raises UserError as `read_loss_curve`, and when two have the same name.
    """
    curves: dict[str, LossCurve] = {}
    for path in paths:
        name = path.resolve().name
        if name in curves:
            raise UserError(f"two runs are called {name}, the second is {path}: rename one of them")
        curves[name] = read_loss_curve(path)
    return curves


def calibrate(
    curves: Mapping[str, LossCurve],
    *,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    grid: Grid = DEFAULT_GRID,
    on_detection: Callable[[Detection], None] = lambda detection: None,
) -> CalibrationReport:
    """Judge safe curves as they are, and those called stable again with every fault of the grid.

    Plateaus and short runs need the floor and a run that fell below it. `on_detection` is called after every fault.
    Raises UserError without curves.
    """
    if not curves:
        raise UserError("there are no runs to calibrate on: name the directories of runs that are known to be safe")
    verdicts = {name: judge(curve, thresholds) for name, curve in curves.items()}
    trials = _Trials(
        [_by_points(curves[name]) for name, verdict in verdicts.items() if verdict.label == "stable"], thresholds, grid
    )
    detections = []
    for detection in chain(trials.spikes(), trials.divergences(), trials.high_parts(), trials.plateaus()):
        detections.append(detection)
        on_detection(detection)
    return CalibrationReport(
        runs=tuple(curves),
        flagged={name: verdict.sentence() for name, verdict in verdicts.items() if verdict.label != "stable"},
        gradient_spiked=sum(verdict.gradient_spikes > 0 for verdict in verdicts.values()),
        detections=tuple(detections),
        thresholds=thresholds,
    )


def _by_points(curve: LossCurve) -> LossCurve:
    """Return a curve with its points for steps, so that places and widths are those of the losses."""
    points = len(curve.losses)
    facts = {"floor": curve.floor, "scale": curve.scale, "held_out": curve.held_out}
    return LossCurve.of(curve.losses, steps_total=points, warmup_steps=curve.warmup_points, **facts)


@dataclass(frozen=True, slots=True)
class _Trials:
    """Injections into safe curves, and what the verdict says of them."""

    curves: Sequence[LossCurve]
    thresholds: Thresholds
    grid: Grid

    def spikes(self) -> Iterator[Detection]:
        for height in self.grid.spike_heights:
            for width in self.grid.spike_widths:
                for tenth, places in self._places(self.grid.spike_places, room=width):
                    outcomes = []
                    for curve, at in places:
                        added = height * curve.scale
                        verdict = self._judge(curve, inject_spike(curve.losses, at=at, height=added, width=width))
                        # The batch before may have been a little bad already.
                        here = any(at - 1 <= step < at + width for step in verdict.spikes)
                        outcomes.append((here, verdict.label))
                    yield _detection(Fault.SPIKE, outcomes, height=height, width=width, tenth=tenth)

    def divergences(self) -> Iterator[Detection]:
        for fault in (Fault.STAYS, Fault.RISES):
            for height in self.grid.divergence_heights:
                yield from self._divergences(fault, height)
        yield from self._divergences(Fault.NAN, None)

    def _divergences(self, fault: Fault, height: float | None) -> Iterator[Detection]:
        for tenth, places in self._places(self.grid.divergence_places):
            outcomes = []
            for curve, at in places:
                added = math.nan if height is None else height * curve.scale
                if fault is Fault.RISES:
                    losses = inject_rise(curve.losses, at=at, height=added)
                else:
                    losses = inject_spike(curve.losses, at=at, height=added, width=len(curve.losses))
                label = self._judge(curve, losses).label
                outcomes.append((label == "diverged", label))
            yield _detection(fault, outcomes, height=height, tenth=tenth)

    def high_parts(self) -> Iterator[Detection]:
        for part in self.grid.high_parts:
            for height in self.grid.high_heights:
                labels = [
                    self._judge(each, inject_high_part(each.losses, part=part, height=height * each.scale)).label
                    for each in self.curves
                ]
                outcomes = [(label != "stable", label) for label in labels]
                yield _detection(Fault.OFTEN_HIGH, outcomes, height=height, part=part)

    def plateaus(self) -> Iterator[Detection]:
        """Yield detections of runs that stay near the floor, and of runs cut short where they pass it."""
        fallen = [curve for curve in self.curves if curve.floor is not None and self._passes(curve) is not None]
        for offset in self.grid.plateau_offsets:
            labels = []
            for curve in fallen:
                level = (curve.floor or 0.0) + offset * curve.scale
                plateau = inject_plateau(curve.losses, level=level)
                labels.append(self._judge(curve, plateau, held_out=level).label)
            yield _detection(Fault.PLATEAU, [(label == "not learned", label) for label in labels], height=offset)
        labels = []
        for curve in fallen:
            end = self._passes(curve) or 1
            short = LossCurve.of(curve.losses[:end], warmup_steps=min(curve.warmup_steps, end // 10), floor=curve.floor)
            labels.append(judge(dataclasses.replace(short, scale=curve.scale), self.thresholds).label)
        yield _detection(Fault.SHORT, [(label == "not learned", label) for label in labels])

    def _passes(self, curve: LossCurve) -> int | None:
        """Return the step at which the loss passes the line below which a run has learned, if it does."""
        line = (curve.floor or 0.0) - self.thresholds.floor_margin * curve.scale
        medians = centred_medians(curve.losses, LOCAL_WINDOW // 2)
        return next((step for step, middle in enumerate(medians, start=1) if middle < line), None)

    def _places(self, count: int, *, room: int = 1) -> Iterator[tuple[int, list[tuple[LossCurve, int]]]]:
        """Yield every tenth of the run with the curves and steps to inject at, `room` steps from the end at least."""
        tenths: dict[int, list[tuple[LossCurve, int]]] = {tenth: [] for tenth in range(TENTHS)}
        for curve in self.curves:
            first, last = curve.warmup_steps + 1, len(curve.losses) - room + 1
            for index in range(count):
                part = index / (count - 1) if count > 1 else 0.5
                tenths[min(TENTHS - 1, int(TENTHS * part))].append((curve, first + round(part * (last - first))))
        yield from tenths.items()

    def _judge(self, curve: LossCurve, losses: Sequence[float], held_out: float | None = None) -> Verdict:
        held_out = curve.held_out if held_out is None else held_out
        return judge(dataclasses.replace(curve, losses=tuple(losses), held_out=held_out), self.thresholds)


def _detection(fault: Fault, outcomes: Sequence[tuple[bool, Label]], **injected: Any) -> Detection:
    return Detection(
        fault=fault,
        trials=len(outcomes),
        detected=sum(hit for hit, _ in outcomes),
        noticed=sum(label != "stable" for _, label in outcomes),
        **injected,
    )
