"""The record of what was done to a foreign model, so that it can be saved, and done again to a fresh one when it loads.

A step is a JSON object whose "operation" names the function that made it. Models of libraries that save and load by
class get a class and a configuration of their own: what was operated on must never load as the model it was.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from siamesenorm.errors import UserError, unknown

Step = dict[str, Any]

OPERATIONS = {"rewire": "siamesenorm.interop.rewire.operation", "swap_norms": "siamesenorm.interop.swap_norms"}
"""Modules whose `replay(model, step)` repeats the structural part of a step."""
LIBRARIES = {
    ("transformers.modeling_utils", "PreTrainedModel"): "siamesenorm.interop.huggingface.operated",
    ("diffusers.models.modeling_utils", "ModelMixin"): "siamesenorm.interop.diffusers",
}
"""Base classes by which libraries save and load, and the modules whose `adopt(model, steps)` gives a class of ours."""


def steps_of(model: nn.Module) -> list[Step]:
    """Return the steps recorded on a model."""
    return list(getattr(model, "siamesenorm_steps", ()))


def record_step(model: nn.Module, step: Step) -> None:
    """Add a step to a model's record, and give a Hugging Face or diffusers model the class that saves it."""
    steps = [*steps_of(model), step]
    model.siamesenorm_steps = steps  # type: ignore[assignment]
    for kind, adapter in _library_classes():
        if isinstance(model, kind):
            importlib.import_module(adapter).adopt(model, steps)


def refuse_unsavable(model: nn.Module, operation: str) -> None:
    """Raise UserError for a model that would not save what is done to it.

    That is a model of a library inside of something else, for it saves and loads by itself, as the model it was; and
    one that holds adapters of PEFT, which are saved without it.
    """
    kinds = tuple(kind for kind, _ in _library_classes())
    for kind, adapter in _library_classes():
        if isinstance(model, kind):
            importlib.import_module(adapter)  # what cannot be imported fails here, where nothing is done yet
    for name, module in model.named_modules():
        if name and isinstance(module, kinds) and not isinstance(model, kinds):
            raise UserError(
                f"{name} is a {type(module).__name__} inside a {type(model).__name__}, and saves by itself: "
                f"{operation} it before it is wrapped"
            )
        if type(module).__module__.startswith("peft.tuners."):
            raise UserError(
                f"{name} is an adapter of PEFT ({type(module).__name__}), saved without its model: merge and unload "
                f"it, {operation} the model, and attach adapters then"
            )


def _library_classes() -> Iterator[tuple[type[nn.Module], str]]:
    """Yield those base classes that the caller's model can be of, for this package itself imports torch alone."""
    for (module, base), adapter in LIBRARIES.items():
        if module in sys.modules:
            yield getattr(sys.modules[module], base), adapter


def replay_steps(model: nn.Module, steps: Sequence[Step]) -> None:
    """Repeat recorded steps on a freshly built model, for weights to be loaded into.

    Raises UserError for a record that is unknown or damaged.
    """
    if not steps or not isinstance(steps, (list, tuple)) or not all(isinstance(step, Mapping) for step in steps):
        raise UserError("siamesenorm in the configuration is no list of operations: the configuration is damaged")
    for step in steps:
        name = step.get("operation", "")
        if name not in OPERATIONS:
            raise unknown("operation of siamesenorm", str(name), OPERATIONS)
        try:
            importlib.import_module(OPERATIONS[name]).replay(model, step)
        except KeyError as missing:
            raise UserError(f"the record of {name} lacks {missing}: the configuration is damaged") from missing
    model.siamesenorm_steps = list(steps)  # type: ignore[assignment]
