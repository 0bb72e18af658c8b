"""The record of what was done to a foreign model, so that it can be saved, and done again to a fresh one when it loads.

A step is a JSON object whose "operation" names the function that made it. Models of libraries that save and load by
class get a class and a configuration of their own: what was operated on must never load as the model it was.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from siamesenorm.errors import UserError, unknown

Step = dict[str, Any]

OPERATIONS = {"rewire": "siamesenorm.interop.rewire.operation", "swap_norms": "siamesenorm.interop.swap_norms"}
"""Modules whose `replay(model, step)` repeats the structural part of a step."""
LIBRARIES = {
    ("transformers", "PreTrainedModel"): "siamesenorm.interop.huggingface.operated",
    ("diffusers", "ModelMixin"): "siamesenorm.interop.diffusers",
}
"""Base classes by which libraries save and load, and the modules whose `adopt(model, steps)` gives a class of ours."""


def steps_of(model: nn.Module) -> list[Step]:
    """Return the steps recorded on a model."""
    return list(getattr(model, "siamesenorm_steps", ()))


def record_step(model: nn.Module, step: Step) -> None:
    """Add a step to a model's record, and give a Hugging Face or diffusers model the class that saves it."""
    steps = [*steps_of(model), step]
    model.siamesenorm_steps = steps  # type: ignore[assignment]
    for (library, base), adapter in LIBRARIES.items():
        # Only where the caller's model already brought the library: this package itself imports torch alone.
        if library in sys.modules and isinstance(model, getattr(sys.modules[library], base)):
            importlib.import_module(adapter).adopt(model, steps)


def replay_steps(model: nn.Module, steps: Sequence[Step]) -> None:
    """Repeat recorded steps on a freshly built model, for weights to be loaded into; raises UserError if unknown."""
    for step in steps:
        name = step.get("operation", "")
        if name not in OPERATIONS:
            raise unknown("operation of siamesenorm", str(name), OPERATIONS)
        try:
            importlib.import_module(OPERATIONS[name]).replay(model, step)
        except KeyError as missing:
            raise UserError(f"the record of {name} lacks {missing}: the configuration is damaged") from missing
    model.siamesenorm_steps = list(steps)  # type: ignore[assignment]
