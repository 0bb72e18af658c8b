"""How far the verdict can be trusted: false positives on safe runs, and detection of disturbances put into them.

Everything is deterministic: the disturbances are added to recorded curves, so their noise is the noise of real batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from siamesenorm.errors import UserError
from siamesenorm.files import encode_json, write_atomically
from siamesenorm.training.curves import LossCurve, read_loss_curve
from siamesenorm.training.running_median import RunningMedian
from siamesenorm.training.stability import judge_curve
from siamesenorm.training.verdict import DEFAULT_THRESHOLDS, Thresholds, Verdict

Divergence = Literal["stay", "rise", "nan"]

_LOCAL_WINDOW = 51


def inject_spike(losses: Sequence[float], *, at: int, height: float, width: int) -> list[float]:
    """Return the losses with `height` nats more on `width` steps from step `at` (counted from 1)."""
    return [loss + height if at <= step < at + width else loss for step, loss in enumerate(losses, start=1)]


def inject_divergence(losses: Sequence[float], *, at: int, height: float, kind: Divergence = "stay") -> list[float]:
    """Return the losses diverging from step `at` (counted from 1) to their end.

    "stay": `height` nats more at once. "rise": more and more, `height` nats at the last step. "nan": NaN, no height.
    """
    if kind == "nan":
        return [*losses[: at - 1], *[math.nan] * (len(losses) - at + 1)]
    if kind == "stay":
        return inject_spike(losses, at=at, height=height, width=len(losses))
    slope = height / (len(losses) - at + 1)
    return [loss + slope * max(0, step - at + 1) for step, loss in enumerate(losses, start=1)]


def inject_plateau(losses: Sequence[float], *, level: float) -> list[float]:
    """Return the losses of a run that falls to `level` nats and hovers there, with its own noise."""
    recent = RunningMedian(_LOCAL_WINDOW)
    plateau: list[float] = []
    for loss in losses:
        recent.push(loss)
        plateau.append(loss + max(0.0, level - recent.median))
    return plateau


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The disturbances to try; heights and offsets in nats, widths in steps, places as parts of the run after warm-up.

    `late` is the place of divergences too close to the end to stay for 5 % of the run. Plateaus lie at the unigram
    entropy plus an offset.
    """

    spike_heights: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
    spike_widths: tuple[int, ...] = (1, 2, 3, 5, 10)
    divergence_heights: tuple[float, ...] = (0.25, 0.75, 1.0, 2.0)
    plateau_offsets: tuple[float, ...] = (-0.2, -0.15, -0.1, 0.0, 0.1)
    places: tuple[float, ...] = (0.25, 0.5, 0.75)
    late: float = 0.96


DEFAULT_GRID = Grid()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """How many injections of one disturbance were found, where they were put; spikes have a width (steps)."""

    disturbance: str
    height: float | None
    width: int | None
    trials: int
    detected: int

    @property
    def rate(self) -> float:
        """The part of the trials that was detected; NaN without trials."""
        return self.detected / self.trials if self.trials else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What `calibrate` measured: the words on the safe runs as they are, and on the disturbed ones.

    `flagged` has the verdict's sentence of every safe run that was not called stable: the false positives.
    `gradient_spiked` counts the safe runs that a rule on gradient norms would have called spiked.
    """

    runs: tuple[str, ...]
    flagged: Mapping[str, str]
    gradient_spiked: int
    detections: tuple[Detection, ...]
    thresholds: Thresholds

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return dataclasses.asdict(self) | {"schema": 1}

    def write(self, path: Path) -> None:
        """Write the report as JSON; a crash leaves the old file or the new one."""
        write_atomically(path, (encode_json(self.to_json(), indent=1) + "\n").encode())

    def markdown(self) -> str:
        """Return the report as Markdown: one paragraph, the rates of spikes by height and width, and the others."""
        flagged = "".join(f"\n* `{name}`: {sentence}" for name, sentence in self.flagged.items())
        spikes = [detection for detection in self.detections if detection.width is not None]
        widths = sorted({detection.width for detection in spikes if detection.width is not None})
        rates = {(detection.height, detection.width): _percent(detection) for detection in spikes}
        rows = [
            [f"{height:g}", *(rates[height, width] for width in widths)]
            for height in sorted({detection.height for detection in spikes if detection.height is not None})
        ]
        others = [
            [each.disturbance, "" if each.height is None else f"{each.height:+g}", str(each.trials), _percent(each)]
            for each in self.detections
            if each.width is None
        ]
        return "\n\n".join(
            [
                f"False positives: {len(self.flagged)} of {len(self.runs)} safe runs were not called stable; by "
                f"gradient norms {self.gradient_spiked} would have been called spiked.{flagged}",
                _table(["spike, nats", *(f"{width} step{'s' * (width > 1)}" for width in widths)], rows),
                _table(["disturbance", "nats", "trials", "detected"], others),
            ]
        )


def _percent(detection: Detection) -> str:
    return f"{100 * detection.rate:.0f} %" if detection.trials else "no trial"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def read_runs(paths: Iterable[Path]) -> dict[str, LossCurve]:
    """Return the curves of run directories (or loss curve files) by the name of each.

    Raises `UserError` as `read_loss_curve`, and when two have the same name.
    """
    curves: dict[str, LossCurve] = {}
    for path in paths:
        name = path.resolve().name
        if name in curves:
            raise UserError(f"two runs are called {name}, the second is {path}: rename one of them")
        curves[name] = read_loss_curve(path)
    return curves


def calibrate(
    curves: Mapping[str, LossCurve], *, thresholds: Thresholds = DEFAULT_THRESHOLDS, grid: Grid = DEFAULT_GRID
) -> CalibrationReport:
    """Judge safe curves as they are, and those called stable again with every disturbance of the grid.

    Plateaus need the unigram entropy and a run that fell below them. Raises `UserError` without curves.
    """
    if not curves:
        raise UserError("there are no runs to calibrate on: name the directories of runs that are known to be safe")
    verdicts = {name: judge_curve(curve, thresholds) for name, curve in curves.items()}
    stable = [_by_points(curves[name]) for name, verdict in verdicts.items() if verdict.word == "stable"]
    return CalibrationReport(
        runs=tuple(curves),
        flagged={name: verdict.sentence() for name, verdict in verdicts.items() if verdict.word != "stable"},
        gradient_spiked=sum(verdict.gradient_spikes > 0 for verdict in verdicts.values()),
        detections=(
            *_spike_detections(stable, thresholds, grid),
            *_divergence_detections(stable, thresholds, grid),
            *_plateau_detections(stable, thresholds, grid),
        ),
        thresholds=thresholds,
    )


def _by_points(curve: LossCurve) -> LossCurve:
    """Return a curve with its points for steps, so that places and widths are those of the losses."""
    points = len(curve.losses)
    steps = tuple(range(1, points + 1))
    return dataclasses.replace(curve, steps=steps, steps_total=points, warmup_steps=curve.warmup_points)


def _spike_detections(curves: Sequence[LossCurve], thresholds: Thresholds, grid: Grid) -> Iterator[Detection]:
    for height, width in product(grid.spike_heights, grid.spike_widths):
        outcomes = []
        for curve, place in product(curves, grid.places):
            at = _step(curve, place)
            verdict = _judged(curve, inject_spike(curve.losses, at=at, height=height, width=width), thresholds)
            # The batch before may have been a little bad already; a high and wide spike is a divergence by definition.
            here = any(at - 1 <= step < at + width for step in verdict.spikes)
            outcomes.append(here or verdict.word == "diverged")
        yield _detection("spike", outcomes, height=height, width=width)


def _divergence_detections(curves: Sequence[LossCurve], thresholds: Thresholds, grid: Grid) -> Iterator[Detection]:
    def detection(name: str, kind: Divergence, height: float, places: Sequence[float]) -> Detection:
        disturbed = [
            (curve, inject_divergence(curve.losses, at=_step(curve, place), height=height, kind=kind))
            for curve, place in product(curves, places)
        ]
        outcomes = [_judged(curve, losses, thresholds).word == "diverged" for curve, losses in disturbed]
        return _detection(name, outcomes, height=None if kind == "nan" else height)

    for height in grid.divergence_heights:
        yield detection("rises and stays", "stay", height, grid.places)
    for height in grid.divergence_heights:
        yield detection("rises to the end", "rise", height, grid.places)
    for height in grid.divergence_heights:
        yield detection("rises shortly before the end", "stay", height, [grid.late])
    yield detection("becomes NaN", "nan", 0.0, grid.places)


def _plateau_detections(curves: Sequence[LossCurve], thresholds: Thresholds, grid: Grid) -> Iterator[Detection]:
    for offset in grid.plateau_offsets:
        outcomes = []
        for curve in curves:
            level = math.nan if curve.unigram_entropy is None else curve.unigram_entropy + offset
            verdict = _judged(curve, curve.losses, thresholds)
            if verdict.final < level:
                plateau = _judged(curve, inject_plateau(curve.losses, level=level), thresholds)
                outcomes.append(plateau.reason == "not learned")
        yield _detection("stays at the unigram entropy plus", outcomes, height=offset)


def _step(curve: LossCurve, place: float) -> int:
    return curve.warmup_steps + 1 + math.floor(place * (len(curve.losses) - curve.warmup_steps))


def _judged(curve: LossCurve, losses: Sequence[float], thresholds: Thresholds) -> Verdict:
    return judge_curve(dataclasses.replace(curve, losses=tuple(losses), gradient_norms=None), thresholds)


def _detection(
    disturbance: str, outcomes: Sequence[bool], *, height: float | None, width: int | None = None
) -> Detection:
    return Detection(disturbance=disturbance, height=height, width=width, trials=len(outcomes), detected=sum(outcomes))
