"""siamesenorm evaluate: metrics of a trained run on held-out data, and what else its task can be evaluated by."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, cast

import tyro

from siamesenorm.cli.evaluation_tables import show
from siamesenorm.cli.output import print_notes
from siamesenorm.errors import UserError
from siamesenorm.evaluation.causal_models import LibraryCausalModel, NativeCausalModel, model_digest
from siamesenorm.evaluation.evaluation import Evaluation, Record, TaskMetrics, TrainedRun, keep_records
from siamesenorm.evaluation.images import FrechetEvaluation, LinearProbe, NearestNeighbours, choose_features
from siamesenorm.evaluation.language import LanguageEvaluation, OtherModel
from siamesenorm.evaluation.multiple_choice import MultipleChoice, TaskSelection
from siamesenorm.evaluation.paired_tests import paired_record
from siamesenorm.evaluation.perplexity import Perplexity, require_texts
from siamesenorm.evaluation.scorer import LanguageScorer
from siamesenorm.files import encode_json
from siamesenorm.interop.language_models import open_language_model
from siamesenorm.models.language import LanguageModel
from siamesenorm.progress import ProgressDisplay
from siamesenorm.training.execution import find_device
from siamesenorm.training.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(TaskSelection):
    """What language models are evaluated by."""

    perplexity: bool = False
    """Perplexity of a run's training and of its held-out data."""
    text: tuple[Path, ...] = ()
    """Text files for perplexity and bits per byte."""

    def evaluations(self) -> Iterator[LanguageEvaluation]:
        """Yield the chosen evaluations."""
        if self.choice:
            yield self.choice
        if self.perplexity or self.text:
            yield Perplexity(files=self.text)

    @cached_property
    def choice(self) -> MultipleChoice | None:
        """The evaluation by tasks, if chosen; raises UserError for tasks that are not there."""
        if self.tasks is None and not self.task_names:
            return None
        return self.read()


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What models of images are evaluated by."""

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

    def evaluations(self, device: str) -> Iterator[Evaluation]:
        """Yield the chosen evaluations; raises UserError for an option without the one it belongs to."""
        if self.knn:
            yield NearestNeighbours(neighbours=self.knn)
        if self.linear_probe:
            yield LinearProbe()
        if self.frechet:
            yield FrechetEvaluation(
                features=choose_features(self.features, self.inception_weights, device),
                samples=self.samples,
                file=self.sample_file,
                guidance=self.guidance,
                seed=self.seed,
                sampling=(("steps", self.sampling_steps),) if self.sampling_steps else (),
            )
        elif dataclasses.replace(self, knn=0, linear_probe=False) != ImageOptions():
            raise UserError("options of generated images and of their features belong to the distance: add --frechet")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Evaluate a trained run at its newest checkpoint, with its weights and, where it has one, their average.

    Always by the metrics of its task on the held-out data. The results are also kept in the run's evaluations.jsonl.
    Any other causal language model is evaluated by tasks and texts.
    """

    model: Annotated[str, tyro.conf.Positional]
    """Directory of a run with a checkpoint; or of an exported model or one of transformers, or its name on the Hub."""
    against: str | None = None
    """Another model, for a paired test of both on the same items of --tasks."""
    language: Annotated[LanguageOptions, tyro.conf.arg(name="")] = LanguageOptions()
    images: Annotated[ImageOptions, tyro.conf.arg(name="")] = ImageOptions()
    data: str | None = None
    """Data of the run, where they were moved."""
    device: str = "cpu"
    """Device: cpu, or one that torch finds."""
    out: Path = Path("evaluations")
    """Directory for the results of a model that is no run."""
    json: bool = False
    """Print the records as JSON."""


def run(arguments: Arguments) -> None:
    """Evaluate and print."""
    choice = arguments.language.choice if arguments.against else None
    if arguments.against and choice is None:
        raise UserError(f"--against {arguments.against} compares both on items: give their files with --tasks")
    model = open_model(arguments, arguments.model)
    other = open_model(arguments, arguments.against) if arguments.against else None
    if isinstance(other, TrainedRun) and choice is not None:
        choice.require(other.task)
    records = evaluate(model, evaluations(arguments, model))
    if other is not None and choice is not None:
        evaluate(other, [choice])
        paired = [paired_record(model, other, choice, weights=kind) for kind in model.kinds if kind in other.kinds]
        keep_records(model.directory.evaluations_file, paired)
        records += paired
    if arguments.json:
        print(encode_json(records, indent=1))
    else:
        show(records)


def open_model(arguments: Arguments, path: str) -> TrainedRun | OtherModel:
    """Return the run in a directory, or any other language model; raises UserError for what cannot be evaluated."""
    if RunDirectory(Path(path)).is_run:
        trained = TrainedRun(Path(path), device=arguments.device, data=arguments.data)
        print_notes([f"skipped the damaged checkpoint {damaged}" for damaged in trained.checkpoint.skipped])
        return trained
    device, data = find_device(arguments.device), arguments.data
    opened = open_language_model(path, device=device, data=Path(data) if data else None)
    print_notes(opened.notes)
    model = opened.model
    scorer = LanguageScorer(
        model=NativeCausalModel(model) if isinstance(model, LanguageModel) else LibraryCausalModel(model),
        encode=opened.encode,
        start=opened.start,
        identity=model_digest(model, device=device.type),
        device=device,
    )
    name = re.sub(r"[^\w.-]+", "-", opened.name)
    return OtherModel(scorer, arguments.out / f"{name}-{scorer.identity[:12]}")


def evaluations(arguments: Arguments, model: TrainedRun | OtherModel) -> list[Evaluation]:
    """Return the chosen evaluations; raises UserError for what the model does not have."""
    of_images = list(arguments.images.evaluations(arguments.device))
    of_language = list(arguments.language.evaluations())
    if isinstance(model, TrainedRun):
        return [TaskMetrics(), *of_language, *of_images]
    if of_images or arguments.language.perplexity:
        asked = of_images[0].name if of_images else "--perplexity"
        raise UserError(f"{arguments.model} is no run, so it has no {asked}: leave it out")
    if not of_language:
        raise UserError(f"{arguments.model} is no run, so it has no held-out data: give --tasks or --text")
    require_texts(arguments.language.text)
    return list(of_language)


def evaluate(model: TrainedRun | OtherModel, chosen: Sequence[Evaluation]) -> list[Record]:
    """Return the records, showing progress."""
    with ProgressDisplay(len(chosen) * len(model.kinds)) as progress:
        if isinstance(model, TrainedRun):
            return model.evaluate(chosen, progress.update)
        return model.evaluate(cast(Sequence[LanguageEvaluation], chosen), progress.update)
