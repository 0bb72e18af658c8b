"""Record a conversion on a model, and give it the class of its library that saves it as what it is now.

A converted model must never load as what it was: where libraries save by class, it gets a class and configuration.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.native_models import MODEL_TYPE
from siamesenorm.interop.stored_model import Step
from siamesenorm.interop.wiring import steps_of
from siamesenorm.models.language import LanguageModel

Adopt = Callable[[nn.Module, Sequence[Step]], None]


def record_step(model: nn.Module, step: Step) -> None:
    """Add a step to a model's record, and give a Hugging Face or diffusers model the class that saves it."""
    steps = [*steps_of(model), step]
    model.siamesenorm_steps = steps  # type: ignore[assignment]
    if adopt := _adopt(model):
        adopt(model, steps)


def refuse_unsavable(model: nn.Module, verb: str) -> None:
    """Raise UserError for what would not save a conversion: no module, a wrapped model, adapters of PEFT."""
    if not isinstance(model, nn.Module):
        raise UserError(f"{model!r:.80} is a {type(model).__name__}, not a model: {verb} the loaded torch.nn.Module")
    adopt = _adopt(model)  # an import that fails must fail here, before anything is changed
    whole = type(model).__name__
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name and isinstance(module, LanguageModel):
            raise UserError(f"{name} is a LanguageModel inside a {whole}: {verb} it by itself, and wrap it then")
        if _adopter(module) and getattr(module.config, "model_type", None) == MODEL_TYPE:
            raise UserError(f"{name or 'it'} is a {kind}: {verb} the LanguageModel, and build it with from_native then")
        if name and not adopt and _adopter(module):
            raise UserError(f"{name} is a {kind} inside a {whole}, and saves by itself: {verb} it before it is wrapped")
        if type(module).__module__.startswith("peft.tuners."):
            raise UserError(f"{name} is a {kind} of PEFT: merge and unload it, {verb} the model, and attach it again")


BASES = {
    "transformers.modeling_utils": ("PreTrainedModel", "siamesenorm.interop.huggingface.converted"),
    "diffusers.models.modeling_utils": ("ModelMixin", "siamesenorm.interop.diffusers"),
}
"""Base classes by which libraries save and load, and our module with `adopt`; what is not imported has no models."""


def _adopter(model: nn.Module) -> str | None:
    """Return our module that gives a model of its library a class of ours, None where the library saves no classes."""
    loaded = ((getattr(sys.modules[name], base), ours) for name, (base, ours) in BASES.items() if name in sys.modules)
    return next((ours for base, ours in loaded if isinstance(model, base)), None)


def _adopt(model: nn.Module) -> Adopt | None:
    """Return the function that gives a model of its library a class of ours, None where there is none."""
    ours = _adopter(model)
    adopt: Adopt | None = importlib.import_module(ours).adopt if ours else None
    return adopt
