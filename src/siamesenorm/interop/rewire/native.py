"""Rewire a language model of this library: its residual path and its configuration are exchanged together.

Nothing is packed and no class changes: the result is the model that its new configuration describes.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.rewire.report import (
    NormFate,
    RewireReport,
    describe_move,
    fates_of_new_norms,
    norms_of,
)
from siamesenorm.models.config import inherited_operator
from siamesenorm.models.conversion import ResidualPath, convert, converted_config
from siamesenorm.models.language import LanguageModel, LanguageModelConfig
from siamesenorm.norms import NORMS, Norm, NormSpec
from siamesenorm.topologies import Topology


def rewire_native(
    model: LanguageModel, topology: str | Topology, *, preserve: bool, norm: str | NormSpec | None
) -> RewireReport:
    """Give a Pre-Norm model of this library, in place, another topology, operator, or both, keeping its function.

    Raises UserError, with the model untouched, where its function cannot be kept, and for `preserve=False`.
    """
    if not preserve:
        raise UserError(
            "preserve=False on a model of this library: build the new one with build_language_model, which has every "
            "topology from scratch"
        )
    target = converted_config(model.config, topology, norm)
    old = norms_of(model)
    differences = convert(model, target)
    return RewireReport(topology=target.topology, blocks="blocks", norms=_fates(model, old), differences=differences)


def refuse_native_inside(model: nn.Module, operation: str) -> None:
    """Raise UserError for a language model of this library inside of a module, which would go on describing it."""
    for name, module in model.named_modules():
        if name and isinstance(module, LanguageModel):
            raise UserError(
                f"{name} is a LanguageModel of this library inside a {type(model).__name__}, which would not know: "
                f"{operation} it by itself, and wrap it then"
            )


def on_the_residual_path(model: LanguageModel) -> set[str]:
    """Return the names of the norms that a topology made, which are of the configuration's operator."""
    inside = {id(norm) for part in ResidualPath.of(model).parts for norm in norms_of(part).values()}
    return {name for name, norm in norms_of(model).items() if id(norm) in inside}


def swapped_config(config: LanguageModelConfig, norm: NormSpec) -> LanguageModelConfig:
    """Return the configuration of a model whose norms on the residual path were replaced, weights staying.

    Raises UserError for an operator with which the configuration would say something else of the model as well.
    """
    swapped = dataclasses.replace(config, norm=inherited_operator(config.norm, norm))
    if NORMS[norm.name].scales_embedding != NORMS[config.norm.name].scales_embedding:
        raise UserError(f"norm {norm} comes with another scale of the embedding: build the model with it")
    if swapped.attention_shape != config.attention_shape:
        raise UserError(f"norm {norm} comes with other norms in the attention: build the model with it")
    return swapped


def _fates(model: LanguageModel, old: dict[str, Norm]) -> tuple[NormFate, ...]:
    """Say of every norm of the model before, and of every new one, what became of it."""
    new = norms_of(model)
    fates = []
    for name, norm in old.items():
        stays = new.get(name) is norm
        detail = "in the attention" if stays else describe_move(norm.function(), "a new norm")
        fates.append(NormFate(name=name, outcome="kept" if stays else "moved", detail=detail))
    return (*fates, *fates_of_new_norms(model, old.values(), preserve=True))
