"""The record of how a model of another library was converted: saved with it, and repeated on a fresh one at loading.

A step is a JSON object whose "operation" names the conversion: "rewire" or "swap_norms".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from siamesenorm.errors import UserError, unknown
from siamesenorm.interop import foreign_norms
from siamesenorm.interop.hosts import wiring
from siamesenorm.interop.stored_model import Step

OPERATIONS: dict[str, Callable[[nn.Module, Mapping[str, Any]], None]] = {
    "rewire": wiring.replay,
    "swap_norms": foreign_norms.replay,
}
"""Repeat the structural part of a step on a freshly built model."""


def steps_of(model: nn.Module) -> list[Step]:
    """Return the steps recorded on a model."""
    return list(getattr(model, "siamesenorm_steps", ()))


def replay_steps(model: nn.Module, steps: Sequence[Step]) -> None:
    """Repeat recorded steps on a freshly built model, for weights to be loaded into.

    Raises UserError for a record that is unknown or damaged.
    """
    if not steps or not isinstance(steps, (list, tuple)) or not all(isinstance(step, Mapping) for step in steps):
        raise UserError("siamesenorm in the configuration is no list of conversions: the configuration is damaged")
    for step in steps:
        name = step.get("operation", "")
        if name not in OPERATIONS:
            raise unknown("operation of siamesenorm", str(name), OPERATIONS)
        try:
            OPERATIONS[name](model, step)
        except KeyError as missing:
            raise UserError(f"the record of {name} lacks {missing}: the configuration is damaged") from missing
    model.siamesenorm_steps = list(steps)  # type: ignore[assignment]
