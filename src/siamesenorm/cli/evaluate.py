"""siamesenorm evaluate: metrics of a trained run on held-out data, and what else its task can be evaluated by."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation import Evaluation, Record, TaskMetrics, TrainedRun
from siamesenorm.evaluation.images import FrechetEvaluation, LinearProbe, NearestNeighbours, choose_features
from siamesenorm.files import encode_json
from siamesenorm.progress import ProgressDisplay


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Evaluate a trained run at its newest checkpoint, with its weights and, where it has one, their average.

    Always by the metrics of its task on the held-out data. The results are also kept in the run's evaluations.jsonl.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run, with a checkpoint."""
    knn: int = 0
    """Accuracy of so many nearest neighbours by the features of images; 0 leaves it out."""
    linear_probe: bool = False
    """Accuracy of logistic regression on the features of images."""
    frechet: bool = False
    """Frechet distance of generated images to the training images."""
    samples: int = 1000
    """Generated images for the Frechet distance."""
    sample_file: Path | None = None
    """Images that were generated before, as .npz; otherwise they are drawn from the run's model."""
    guidance: float = 1.0
    """Guidance by the class with which images are drawn; 1 is none."""
    sampling_steps: int = 0
    """Steps of the sampler; 0 is its default."""
    seed: int = 0
    """Seed of the generated images."""
    features: str = "pixels"
    """Features of the Frechet distance: pixels, or the directory of a run whose model gives some."""
    inception_weights: Path | None = None
    """File weights-inception-2015-12-05-6726825d.pth of torch-fidelity, with which the distance is FID."""
    data: str | None = None
    """Data of the run, where they were moved."""
    device: str = "cpu"
    """Device: cpu, or one that torch finds."""
    json: bool = False
    """Print the records as JSON."""


def run(arguments: Arguments) -> None:
    """Evaluate and print."""
    trained = TrainedRun(arguments.run, device=arguments.device, data=arguments.data)
    chosen = tuple(evaluations(arguments))
    with ProgressDisplay(len(chosen) * len(trained.kinds)) as progress:
        records = trained.evaluate(chosen, progress.update)
    for damaged in trained.checkpoint.skipped:
        print(f"siamesenorm: note: skipped the damaged checkpoint {damaged}", file=sys.stderr)
    if arguments.json:
        print(encode_json(records, indent=1))
    else:
        show(records)


def evaluations(arguments: Arguments) -> Iterator[Evaluation]:
    """Yield what is asked for; raises UserError for an option without the one it belongs to."""
    yield TaskMetrics()
    if arguments.knn:
        yield NearestNeighbours(neighbours=arguments.knn)
    if arguments.linear_probe:
        yield LinearProbe()
    if arguments.frechet:
        features = choose_features(arguments.features, arguments.inception_weights, arguments.device)
        yield FrechetEvaluation(
            features=features,
            samples=arguments.samples,
            file=arguments.sample_file,
            guidance=arguments.guidance,
            seed=arguments.seed,
            sampling=(("steps", arguments.sampling_steps),) if arguments.sampling_steps else (),
        )
    elif arguments.sample_file or arguments.inception_weights or arguments.features != "pixels":
        raise UserError("--sample-file, --features and --inception-weights belong to the distance: add --frechet")


def show(records: Sequence[Record]) -> None:
    """Print a row for each result."""
    table = Table(header_style="bold")
    for column in ("evaluation", "weights", "result", "value"):
        table.add_column(column, overflow="fold")
    for record in records:
        for name, value in record["results"].items():
            table.add_row(record["evaluation"], record["weights"], name, _cell(value))
    Console(width=None if Console().is_terminal else 140).print(table)


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
