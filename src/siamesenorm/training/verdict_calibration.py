"""How far the verdict can be trusted: false positives on safe runs, and detection of faults injected into them.

Everything is deterministic: faults are added to recorded curves, so their noise is that of real batches. Heights are in
units of the task's scale, which the runs' records give (1 nat for language).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError
from siamesenorm.files import encode_json, write_atomically
from siamesenorm.training.loss_curve import LossCurve, read_loss_curve
from siamesenorm.training.robust_statistics import centred_medians
from siamesenorm.training.verdict import DEFAULT_THRESHOLDS, DETECTOR, Thresholds, Verdict, judge

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
class Injection:
    """One fault: its height, or its offset from the floor, the width of a spike (steps), the part of the steps."""

    fault: Fault
    height: float | None = None
    width: int | None = None
    part: float | None = None

    @property
    def has_place(self) -> bool:
        """Whether the fault begins at a step; the others concern the whole run."""
        return self.fault in (Fault.SPIKE, Fault.STAYS, Fault.RISES, Fault.NAN)

    @property
    def needs_floor(self) -> bool:
        """Whether the fault is defined by the floor, and by a run that fell below it."""
        return self.fault in (Fault.PLATEAU, Fault.SHORT)

    def apply(self, curve: LossCurve, at: int) -> LossCurve:
        """Return the curve with the fault at step `at`; a short run ends there."""
        height = math.nan if self.height is None else self.height * curve.scale
        losses: Sequence[float] = curve.losses
        match self.fault:
            case Fault.SPIKE:
                losses = inject_spike(losses, at=at, height=height, width=self.width or 1)
            case Fault.STAYS | Fault.NAN:
                losses = inject_spike(losses, at=at, height=height, width=len(losses))
            case Fault.RISES:
                losses = inject_rise(losses, at=at, height=height)
            case Fault.OFTEN_HIGH:
                losses = inject_high_part(losses, part=self.part or 0.0, height=height)
            case Fault.PLATEAU:
                level = (curve.floor or 0.0) + height
                return dataclasses.replace(curve, losses=tuple(inject_plateau(losses, level=level)), held_out=level)
            case Fault.SHORT:
                facts = {"warmup_steps": min(curve.warmup_steps, at // 10), "floor": curve.floor, "scale": curve.scale}
                return LossCurve.of(losses[:at], **facts)
        return dataclasses.replace(curve, losses=tuple(losses))

    def is_detected(self, verdict: Verdict, at: int) -> bool:
        """Whether the verdict on the curve is the one that the fault should get."""
        if self.fault is Fault.SPIKE:
            # The batch before may have been a little bad already.
            return any(at - 1 <= step < at + (self.width or 1) for step in verdict.spikes)
        if self.fault is Fault.OFTEN_HIGH:
            return verdict.label != "stable"
        return verdict.label == ("not learned" if self.needs_floor else "diverged")

    def __str__(self) -> str:
        """Return the fault in a few words."""
        height = "" if self.height is None else f"{self.height:+g}"
        if self.fault is Fault.SPIKE:
            return f"{height}, {self.width} step{'s' * (self.width != 1)}"
        if self.part is not None:
            return f"{100 * self.part:.0f} % of the steps {height}"
        return f"{self.fault} {height}".strip()


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
        return sum(TENTHS if each.has_place else 1 for each in self.injections())

    def injections(self) -> Iterator[Injection]:
        """Yield every fault of the grid."""
        for height, width in product(self.spike_heights, self.spike_widths):
            yield Injection(fault=Fault.SPIKE, height=height, width=width)
        for fault, height in product((Fault.STAYS, Fault.RISES), self.divergence_heights):
            yield Injection(fault=fault, height=height)
        yield Injection(fault=Fault.NAN)
        for part, height in product(self.high_parts, self.high_heights):
            yield Injection(fault=Fault.OFTEN_HIGH, height=height, part=part)
        for offset in self.plateau_offsets:
            yield Injection(fault=Fault.PLATEAU, height=offset)
        yield Injection(fault=Fault.SHORT)

    def places(
        self, injection: Injection, curves: Sequence[LossCurve], thresholds: Thresholds
    ) -> dict[int | None, list[tuple[LossCurve, int]]]:
        """Return the curves and steps to inject a fault at, by the tenth of the run; None where it has no place."""
        if injection.needs_floor:
            passed = ((curve, _passes_floor(curve, thresholds)) for curve in curves)
            return {None: [(curve, step) for curve, step in passed if step is not None]}
        if not injection.has_place:
            return {None: [(curve, 1) for curve in curves]}
        found: dict[int | None, list[tuple[LossCurve, int]]] = {tenth: [] for tenth in range(TENTHS)}
        count = self.spike_places if injection.fault is Fault.SPIKE else self.divergence_places
        for curve, index in product(curves, range(count)):
            first, last = curve.warmup_steps + 1, len(curve.losses) - (injection.width or 1) + 1
            part = index / (count - 1) if count > 1 else 0.5
            found[min(TENTHS - 1, int(TENTHS * part))].append((curve, first + round(part * (last - first))))
        return found


DEFAULT_GRID = Grid()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection(Injection):
    """How many injections of one fault were detected.

    `tenth` is the tenth of the run after the warm-up, from 0, in which the fault begins. `noticed` counts runs that
    were not called stable, whatever else.
    """

    tenth: int | None = None
    trials: int
    detected: int
    noticed: int

    def rate(self, count: int) -> str:
        """Return the part of the trials as text."""
        return f"{100 * count / self.trials:.0f} %" if self.trials else "no trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What `calibrate` measured.

    `flagged` has the verdict's sentence of every safe run that was not called stable: the false positives.
    `gradient_spiked` counts the safe runs that a rule on gradient norms would have called spiked. Heights are in units
    of `scale`, in the `unit` of the losses.
    """

    runs: tuple[str, ...]
    flagged: Mapping[str, str]
    gradient_spiked: int
    detections: tuple[Detection, ...]
    thresholds: Thresholds
    unit: str = ""
    scale: float = 1.0
    detector: int = DETECTOR

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, without the fields that a fault does not have."""
        record = {"schema": 3, **dataclasses.asdict(self)}
        record["detections"] = [{k: v for k, v in each.items() if v is not None} for each in record["detections"]]
        return record

    def write(self, path: Path) -> None:
        """Write the report as JSON; a crash leaves the old file or the new one."""
        write_atomically(path, (encode_json(self.to_json(), indent=1) + "\n").encode())

    def markdown(self) -> str:
        """Return the report as Markdown: false positives, and a table for every fault."""
        flagged = "".join(f"\n* `{name}`: {sentence}" for name, sentence in self.flagged.items())
        unit = f"Heights are in units of the scale, {self.scale:.4g} {self.unit}."
        return "\n\n".join(
            [
                f"Safe runs called stable: {len(self.runs) - len(self.flagged)} of {len(self.runs)}. A rule on "
                f"gradient norms would have called {self.gradient_spiked} of them spiked.{flagged}",
                *([unit] if self.unit else []),
                self.table(Fault.SPIKE),
                self.table(Fault.STAYS, Fault.RISES, Fault.NAN),
                self.table(Fault.OFTEN_HIGH),
                self.table(Fault.PLATEAU, Fault.SHORT),
            ]
        )

    def table(self, *faults: Fault) -> str:
        """Return the rates of detection as a Markdown table: a row for every tenth of the run, or for every fault."""
        found = [each for each in self.detections if each.fault in faults]
        if any(each.has_place for each in found):
            columns = list(dict.fromkeys(map(str, found)))
            rates = {(each.tenth, str(each)): each.rate(each.detected) for each in found}
            head = ["begins at, of the run after warm-up", *columns]
            rows = [
                [f"{10 * tenth} to {10 * tenth + 10} %", *(rates.get((tenth, column), "") for column in columns)]
                for tenth in range(TENTHS)
            ]
        else:
            head = ["fault", "trials", "called so", "not called stable"]
            rows = [[str(each), str(each.trials), each.rate(each.detected), each.rate(each.noticed)] for each in found]
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
    Raises UserError without curves, and for curves of losses in different units, which are runs of different tasks.
    """
    if not curves:
        raise UserError("there are no runs to calibrate on: name the directories of runs that are known to be safe")
    kinds = {(curve.unit, curve.scale): name for name, curve in curves.items()}
    (unit, scale), *others = kinds
    if others:
        other, other_scale = others[0]
        raise UserError(
            f"{kinds[unit, scale]} has losses in {scale:g} {unit or 'of no unit'}, {kinds[other, other_scale]} in "
            f"{other_scale:g} {other or 'of no unit'}: calibrate each task by itself"
        )
    verdicts = {name: judge(curve, thresholds) for name, curve in curves.items()}
    stable = [_by_points(curves[name]) for name, verdict in verdicts.items() if verdict.label == "stable"]
    detections = []
    for injection in grid.injections():
        for tenth, places in grid.places(injection, stable, thresholds).items():
            outcomes = [(at, judge(injection.apply(curve, at), thresholds)) for curve, at in places]
            detection = Detection(
                **dataclasses.asdict(injection),
                tenth=tenth,
                trials=len(outcomes),
                detected=sum(injection.is_detected(verdict, at) for at, verdict in outcomes),
                noticed=sum(verdict.label != "stable" for _, verdict in outcomes),
            )
            detections.append(detection)
            on_detection(detection)
    return CalibrationReport(
        runs=tuple(curves),
        flagged={name: verdict.sentence() for name, verdict in verdicts.items() if verdict.label != "stable"},
        gradient_spiked=sum(verdict.gradient_spikes > 0 for verdict in verdicts.values()),
        detections=tuple(detections),
        thresholds=thresholds,
        unit=unit,
        scale=scale,
    )


def _by_points(curve: LossCurve) -> LossCurve:
    """Return a curve with its points for steps, so that places and widths are those of the losses."""
    points = len(curve.losses)
    facts = {"floor": curve.floor, "scale": curve.scale, "held_out": curve.held_out}
    return LossCurve.of(curve.losses, steps_total=points, warmup_steps=curve.warmup_points, **facts)


def _passes_floor(curve: LossCurve, thresholds: Thresholds) -> int | None:
    """Return the step at which the loss passes the line below which a run has learned, if it does."""
    if curve.floor is None:
        return None
    line = curve.floor - thresholds.floor_margin * curve.scale
    medians = centred_medians(curve.losses, LOCAL_WINDOW // 2)
    return next((step for step, middle in enumerate(medians, start=1) if middle < line), None)
