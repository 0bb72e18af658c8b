"""Recipes by name with every field overridable, for the commands that train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import tyro

from siamesenorm.cli.parsing import PRESETS
from siamesenorm.training.plan import RunPlan, presets


def recipe_arguments(command: type[RunPlan]) -> Any:
    """Return the type of a command's arguments: the name of a recipe, then overrides of its fields."""

    def defaults(plan: RunPlan) -> RunPlan:
        fields = {each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)}
        return command(**{**fields, "data": tyro.MISSING})

    return tyro.extras.subcommand_type_from_defaults(
        {name: defaults(plan) for name, plan in presets(Path()).items()},
        PRESETS,
        prefix_names=False,
    )
