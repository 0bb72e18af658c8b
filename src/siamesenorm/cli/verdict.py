"""siamesenorm verdict: stable, spiked or diverged, for any loss curve."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.files import encode_json
from siamesenorm.training.curves import read_loss_curve
from siamesenorm.training.stability import judge_curve
from siamesenorm.training.verdict import Thresholds


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Say whether a loss curve was stable, spiked or diverged, and why.

    Reads a run's metrics.jsonl, CSV with or without a header, JSON, JSON lines, or trainer_state.json.
    """

    curve: Annotated[Path, tyro.conf.Positional]
    """The file, or the directory of a run."""
    column: str = "loss"
    """Column or field that holds the loss, in nats."""
    steps_total: int | None = None
    """Planned steps, if the curve stops before them."""
    warmup_steps: int | None = None
    """Steps of warm-up, in which spikes do not count."""
    unigram_entropy: float | None = None
    """Unigram entropy of the data in nats; without it, not learned cannot be told."""
    thresholds: Thresholds = Thresholds()
    """What the words mean."""
    json: bool = False
    """Print JSON."""


def run(arguments: Arguments) -> None:
    """Judge the curve."""
    curve = read_loss_curve(arguments.curve, column=arguments.column)
    given = {
        name: getattr(arguments, name)
        for name in ("steps_total", "warmup_steps", "unigram_entropy")
        if getattr(arguments, name) is not None
    }
    verdict = judge_curve(dataclasses.replace(curve, **given), arguments.thresholds)
    print(encode_json(verdict.to_json(), indent=1) if arguments.json else verdict.sentence())
