"""siamesenorm analyze: the streams, the depth and the numerics of trained models, compared in one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.analysis.analyses import available_analyses, build_analysis
from siamesenorm.analysis.held_out import Analysis
from siamesenorm.cli.output import command_line
from siamesenorm.cli.report import show_report
from siamesenorm.comparison.analysis_report import analysis_report
from siamesenorm.comparison.results import RunResult, read_run
from siamesenorm.errors import UserError, unknown
from siamesenorm.evaluation.evaluation import RAW, Record, TrainedRun
from siamesenorm.files import encode_json
from siamesenorm.interop.analysed_text import TextModel
from siamesenorm.progress import ProgressDisplay
from siamesenorm.training.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Analyse trained models on held-out samples: records in each run, and one report that compares them.

    Models are runs with a checkpoint, read on their own held-out samples, whose records are kept in their
    evaluations.jsonl; or, with --text, any language models, all read on that text: runs, exported models, and models of
    transformers that were rewired. Figures are of the weights as trained.
    """

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of runs, or of models."""
    what: tuple[str, ...] = ()
    """Analyses: hidden-magnitude, stream-share, fusion, logit-lens, pruning, effective-depth, outliers, quantisation,
    jacobians; without any, all that fit each model."""
    out: Path | None = None
    """Directory of the report; FIRST/analysis if not given."""
    samples: int = 64
    """Held-out samples; Jacobians are of one."""
    tokens: int = 4
    """Tokens of the Jacobians."""
    text: Path | None = None
    """Text, or token ids as .npy, on which to read all models."""
    context: int = 256
    """Tokens of a sample of the text."""
    data: str | None = None
    """Data of the runs, where they were moved."""
    device: str = "cpu"
    """Device: cpu, or one that torch finds."""
    json: bool = False
    """Print the records as JSON, and write no report."""

    def __post_init__(self) -> None:
        for name in self.what:
            if name not in available_analyses():
                raise unknown("analysis", name, available_analyses())


def run(arguments: Arguments) -> None:
    """Analyse, keep the records, and report."""
    labels = _labels(arguments.models)
    opened = {label: _open(path, arguments) for label, path in zip(labels, arguments.models, strict=True)}
    out = arguments.out or arguments.models[0] / "analysis"
    if not arguments.json and (out.exists() or out.parent.is_file()) and not out.is_dir():
        raise UserError(f"{out} is not a directory: name one for the report with --out")
    results: dict[str, RunResult] = {
        label: read_run(path) for label, path in zip(labels, arguments.models, strict=True) if RunDirectory(path).is_run
    }
    refused: dict[str, str] = {}
    chosen = {label: _fitting(model, label, arguments, refused) for label, model in opened.items()}
    records: dict[str, list[Record]] = {}
    total = sum(len(analyses) * len(opened[label].kinds) for label, analyses in chosen.items())
    with ProgressDisplay(total) as progress:
        for label, model in opened.items():
            before = sum(map(len, records.values()))

            def show(done: float, what: str, name: str = label, before: int = before) -> None:
                progress.update(before + done, f"{name}: {what}")

            records[label] = model.evaluate(chosen[label], show)
    if arguments.json:
        print(encode_json(records, indent=1))
        return
    shown = {label: [each for each in several if each["weights"] == RAW] for label, several in records.items()}
    report = analysis_report(
        shown,
        results,
        data="held-out samples" if arguments.text is None else f"samples of {arguments.text.name}",
        command=command_line(),
        refused=refused,
    )
    show_report(report, out)


def _open(path: Path, arguments: Arguments) -> TrainedRun | TextModel:
    if arguments.text is not None:
        return TextModel.open(path, arguments.text, context=arguments.context, device=arguments.device)
    if not RunDirectory(path).is_run:
        raise UserError(f"{path} is not the directory of a run: name one, or add --text FILE to analyse a model on it")
    return TrainedRun(path, device=arguments.device, data=arguments.data)


def _fitting(
    model: TrainedRun | TextModel, label: str, arguments: Arguments, refused: dict[str, str]
) -> Sequence[Analysis]:
    """Return the analyses of a model: those that were named, or all that fit; notes what is left out."""
    analyses = [_build(name, arguments) for name in arguments.what or available_analyses()]
    fitting = []
    for analysis in analyses:
        try:
            if isinstance(model, TrainedRun):
                analysis.require(model.task)
            else:
                analysis.require_model(model.model)
            fitting.append(analysis)
        except UserError as error:
            if arguments.what and len(arguments.models) == 1:
                raise
            refused[f"{label}, {analysis.name}"] = str(error)
    if not fitting:
        raise UserError(next(reversed(refused.values())))
    return fitting


def _build(name: str, arguments: Arguments) -> Analysis:
    options = {"tokens": arguments.tokens} if name == "jacobians" else {"samples": arguments.samples}
    return build_analysis(name, **options)


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return a name for each model: its method where those differ, else the name of its directory."""
    if not paths:
        raise UserError("no models given: name the directories of runs")
    methods = [
        RunDirectory(path).read_config().label if RunDirectory(path).is_run else path.resolve().name for path in paths
    ]
    if len(set(methods)) == len(methods):
        return methods
    names = [path.resolve().name for path in paths]
    labels = [m if Counter(methods)[m] == 1 else f"{m} ({n})" for m, n in zip(methods, names, strict=True)]
    return labels if len(set(labels)) == len(labels) else [f"{m} ({p})" for m, p in zip(methods, paths, strict=True)]
