"""Record a conversion on a model, and give it the class of its library that saves it as what it is now.

A converted model must never load as the model it was: models of libraries that save and load by class get a class and a
configuration of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.conversion_log import steps_of
from siamesenorm.interop.stored_model import Step
from siamesenorm.models.language import LanguageModel

Adopt = Callable[[nn.Module, Sequence[Step]], None]


def _transformers() -> Adopt:
    from siamesenorm.interop.huggingface import converted

    return converted.adopt


def _diffusers() -> Adopt:
    from siamesenorm.interop import diffusers

    return diffusers.adopt


BASES: dict[tuple[str, str], Callable[[], Adopt]] = {
    ("transformers.modeling_utils", "PreTrainedModel"): _transformers,
    ("diffusers.models.modeling_utils", "ModelMixin"): _diffusers,
}
"""Base classes by which libraries save and load, and the import of what gives such a model a class of ours."""


def record_step(model: nn.Module, step: Step) -> None:
    """Add a step to a model's record, and give a Hugging Face or diffusers model the class that saves it."""
    steps = [*steps_of(model), step]
    model.siamesenorm_steps = steps  # type: ignore[assignment]
    for kind, adapter in _bases():
        if isinstance(model, kind):
            adapter()(model, steps)


def refuse_unsavable(model: nn.Module, verb: str) -> None:
    """Raise UserError for a model that would not save a conversion; `verb` names it in the remedy.

    That is a model of a library inside another module, since it saves and loads by itself; one that holds adapters of
    PEFT, which are saved without it; and what is no module.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{model!r:.80} is a {type(model).__name__}, not a model: {verb} the loaded torch.nn.Module, such as what "
            "from_pretrained of its library returns"
        )
    kinds = tuple(kind for kind, _ in _bases())
    for kind, adapter in _bases():
        if isinstance(model, kind):
            adapter()  # an import that fails must fail here, before anything is changed
    for name, module in model.named_modules():
        if name and isinstance(module, LanguageModel):
            raise UserError(
                f"{name} is a LanguageModel of this library inside a {type(model).__name__}, whose configuration would "
                f"no longer describe it: {verb} it by itself, and wrap it then"
            )
        if name and isinstance(module, kinds) and not isinstance(model, kinds):
            raise UserError(
                f"{name} is a {type(module).__name__} inside a {type(model).__name__}, and saves by itself: {verb} it "
                "before it is wrapped"
            )
        if type(module).__module__.startswith("peft.tuners."):
            raise UserError(
                f"{name} is an adapter of PEFT ({type(module).__name__}), saved without its model: merge and unload "
                f"it, {verb} the model, and attach adapters then"
            )


def _bases() -> Iterator[tuple[type[nn.Module], Callable[[], Adopt]]]:
    """Yield the base classes that the caller's model can have: those of libraries that were imported."""
    for (module, base), adapter in BASES.items():
        if module in sys.modules:
            yield getattr(sys.modules[module], base), adapter
