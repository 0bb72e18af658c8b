"""siamesenorm verdict: stable, spiked, diverged or not learned, for runs and for any loss curve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.cli.runs import runs_below
from siamesenorm.errors import UserError
from siamesenorm.files import encode_json
from siamesenorm.training.loss_curve import read_loss_curve
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import Thresholds, judge

FACTS = ("steps_total", "warmup_steps", "floor", "scale", "held_out")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Classify loss curves as stable, spiked, diverged or not learned, and say why.

    Reads directories of runs, metrics.jsonl, CSV with or without a header, JSON, JSON lines, and trainer_state.json.
    """

    curves: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files, directories of runs, or directories that contain runs."""
    column: str = "loss"
    """Column or field of the loss."""
    steps_total: int | None = None
    """Planned steps, if the curve stops before them."""
    warmup_steps: int | None = None
    """Steps of warm-up, in which spikes do not count."""
    floor: float | None = None
    """Loss of a model that has learned nothing, such as the unigram entropy; without it, learning is not checked."""
    scale: float | None = None
    """Unit of the thresholds, in units of the loss; that of the record, else 1 (nats of a language model)."""
    held_out: float | None = None
    """Last held-out loss."""
    thresholds: Thresholds = Thresholds()
    """Numbers in the definitions of the four labels."""
    write: bool = False
    """Write the verdict of every finished run into its directory, in place of the one there."""
    json: bool = False
    """Print JSON: the verdict, or for several curves an object with the verdict of each."""


def run(arguments: Arguments) -> None:
    """Judge the curves."""
    paths = [path for given in arguments.curves for path in curves_at(given)]
    if not paths:
        raise UserError("no curve is given: name files, or directories of runs")
    given = {name: getattr(arguments, name) for name in FACTS if getattr(arguments, name) is not None}
    curves = {path: read_loss_curve(path, column=arguments.column) for path in paths}
    verdicts = {path: judge(replace(curve, **given), arguments.thresholds) for path, curve in curves.items()}
    if arguments.write:
        for path in paths:
            if not RunDirectory(path).verdict_file.is_file():
                raise UserError(f"{path} is not the directory of a finished run: --write replaces verdicts")
        for path, verdict in verdicts.items():
            RunDirectory(path).write_verdict(verdict)
    if len(arguments.curves) == len(paths) == 1:
        (verdict,) = verdicts.values()
        print(encode_json(verdict.to_json(), indent=1) if arguments.json else verdict.sentence())
    elif arguments.json:
        print(encode_json({str(path): verdict.to_json() for path, verdict in verdicts.items()}, indent=1))
    else:
        for path, verdict in verdicts.items():
            print(f"{path}: {verdict.sentence()}")


def curves_at(path: Path) -> list[Path]:
    """Return a file or the directory of a run as it is, and the runs in any other directory."""
    if not path.is_dir() or (path / "metrics.jsonl").exists():
        return [path]
    runs = runs_below(path)
    if not runs:
        raise UserError(f"{path} has no metrics.jsonl: name a run, a directory of runs, or the file of a curve")
    return runs
