"""Evaluations of the runs of an item: each run that has weights, by what its grid names, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from siamesenorm.analysis import available_analyses, build_analysis
from siamesenorm.comparison.results import RunResult
from siamesenorm.errors import UserError
from siamesenorm.evaluation.choice_items import read_tasks
from siamesenorm.evaluation.evaluation import Evaluation, TrainedRun
from siamesenorm.evaluation.multiple_choice import MultipleChoice
from siamesenorm.evaluation.perplexity import Perplexity
from siamesenorm.files import encode_json
from siamesenorm.progress import Progress
from siamesenorm.recipes.item_results import ItemResults
from siamesenorm.training.run_directory import RunDirectory


def build_evaluations(tasks: Path | None, limit: int) -> dict[str, Evaluation]:
    """Return the available evaluations by name; multiple choice needs the directory of its tasks.

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
                there = {
                    encode_json([e["evaluation"], e["options"]]) for e in run.evaluations if e["step"] == run.steps_done
                }
                missing = [one for one in wanted if encode_json([one.name, one.options()]) not in there]
                if missing:
                    yield run, missing


def evaluate_item(
    waiting: Sequence[tuple[RunResult, Sequence[Evaluation]]],
    data_of: Callable[[RunResult], Path | None],
    device: str,
    on_progress: Progress,
) -> None:
    """Make the missing evaluations of an item, on the data that `data_of` returns or on those of the run.

    `on_progress` is called with how many are done, and parts of one.
    """
    before = 0
    for run, missing in waiting:
        data = data_of(run)
        trained = TrainedRun(run.path, device=device, data=None if data is None else str(data))

        def show(
            done: float, what: str, name: str = run.name, before: int = before, trained: TrainedRun = trained
        ) -> None:
            on_progress(before + done / len(trained.kinds), f"{name}: {what}")

        trained.evaluate(missing, show)
        before += len(missing)
