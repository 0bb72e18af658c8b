"""Evaluations of the runs of an item: each run that has weights, by what its grid names, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from siamesenorm.analysis import available_analyses, build_analysis
from siamesenorm.comparison.results import RunResult
from siamesenorm.errors import UserError
from siamesenorm.evaluation.choice_items import read_tasks
from siamesenorm.evaluation.evaluation import Evaluation, TrainedRun
from siamesenorm.evaluation.multiple_choice import MultipleChoice
from siamesenorm.evaluation.perplexity import Perplexity
from siamesenorm.recipes.item_results import ItemResults
from siamesenorm.training.run_directory import RunDirectory


def build_evaluations(tasks: Path | None, limit: int) -> dict[str, Evaluation]:
    """Return what grids can name, by name; multiple-choice only with the directory of its tasks.

    Raises UserError for a directory without tasks, and for a limit of items that is negative or without tasks.
    """
    if limit < 0 or (limit and tasks is None):
        raise UserError(f"--task-limit is {limit}: write a number of items, with the directory of --tasks")
    built: dict[str, Evaluation] = {name: build_analysis(name) for name in available_analyses()}
    built["perplexity"] = Perplexity()
    if tasks is not None:
        built["multiple-choice"] = MultipleChoice(tasks=read_tasks(tasks, limit=limit))
    return built


def missing_evaluations(
    results: ItemResults, evaluations: Mapping[str, Evaluation]
) -> Iterator[tuple[RunResult, list[Evaluation]]]:
    """Yield the finished runs that have weights, each with what it has no record of with the same options."""
    for name, each in results.grids.items():
        wanted = [evaluations[key] for key in results.grid(name).evaluations if key in evaluations]
        for run in each.runs:
            if run.complete and wanted and any(RunDirectory(run.path).checkpoints.glob("*")):
                there = [(e["evaluation"], e["options"]) for e in run.evaluations if e["step"] == run.steps_done]
                missing = [one for one in wanted if (one.name, dict(one.options())) not in there]
                if missing:
                    yield run, missing


def evaluate_item(
    results: ItemResults,
    evaluations: Mapping[str, Evaluation],
    data_of: Callable[[RunResult], Path | None],
    device: str,
    on_run: Callable[[str], None],
) -> None:
    """Make the evaluations of an item that are not there, on the data that `data_of` names or those of the run."""
    for run, missing in list(missing_evaluations(results, evaluations)):
        on_run(f"{run.name}: {', '.join(each.name for each in missing)}")
        data = data_of(run)
        TrainedRun(run.path, device=device, data=None if data is None else str(data)).evaluate(missing)
