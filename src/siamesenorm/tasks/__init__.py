"""Tasks: what a run trains, on which data, and how the result is evaluated; registered by their tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siamesenorm.errors import unknown
from siamesenorm.tasks.autoencoding import AutoencodingTaskConfig
from siamesenorm.tasks.classification import ClassificationTaskConfig
from siamesenorm.tasks.diffusion import DiffusionTaskConfig
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.tasks.task import TaskConfig

TASKS: dict[str, type[TaskConfig]] = {
    config.tag: config
    for config in (LanguageTaskConfig, ClassificationTaskConfig, AutoencodingTaskConfig, DiffusionTaskConfig)
}


def available_tasks() -> tuple[str, ...]:
    """Return the tags of all tasks."""
    return tuple(TASKS)


def task_from_json(record: Mapping[str, Any]) -> TaskConfig:
    """Read what `TaskConfig.to_json` wrote; raises UserError for an unknown task."""
    if record["tag"] not in TASKS:
        raise unknown("task", str(record["tag"]), TASKS)
    return TASKS[record["tag"]].from_json(record)
