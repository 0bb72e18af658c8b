"""Replace the residual path of a trained Pre-Norm language model, in place, and keep its function.

Attention, MLP, embedding and head stay; connections, opening and closing are replaced. The new ones start with the
gains and biases of the replaced norms (`init_as_pre_norm` of the topologies).
"""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

import torch
from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.models.block import Block, ResidualPath, build_drop_path, build_residual_path
from siamesenorm.models.language import LanguageModel, LanguageModelConfig
from siamesenorm.models.transformer import inherited_operator
from siamesenorm.norms import NORMS, Inexact, Norm, NormFunction, NormSpec
from siamesenorm.topologies import Topology, build_topology, topology_name, transformer_places
from siamesenorm.topologies.pre_norm_family import PreNorm

FREE = (
    "context", "dropout", "drop_path", "document_mask", "residual_dtype", "compute_dtype", "load_balancing_weight",
    "router_z_weight",
)  # fmt: skip
"""Fields of a configuration that change neither the weights nor, up to rounding, the function of one document."""
PATH = ("topology", "norm")
"""Fields of the residual path, which a conversion replaces."""
MOVABLE = ("rmsnorm", "layernorm", "scalenorm")
"""Operators whose parameters are a gain and a bias, which another norm can have."""


def converted_config(
    source: LanguageModelConfig,
    topology: str | Topology | None = None,
    norm: str | NormSpec | None = None,
    **changes: Any,
) -> LanguageModelConfig:
    """Return the configuration of a trained model of `source` after a change of topology, operator, or both.

    The topology has the options that it needs to start with the model's function; the attention norm stays; an
    operator given as text inherits eps and offset. `changes` are fields in `FREE`. Raises UserError where the model's
    function cannot be kept.
    """
    for name in changes:
        if name not in FREE:
            raise UserError(f"{name} belongs to the weights, which stay: leave it out")
    wanted = build_topology(topology) if isinstance(topology, str) else topology or source.topology
    operator = inherited_operator(source.norm, norm) if isinstance(norm, str) else norm or source.norm
    fields = {**changes, "attention_norm": source.attention_shape.attention_norm}
    if (wanted, operator) == (source.topology, source.norm):
        return dataclasses.replace(source, **fields)
    _refuse_source(source)
    resolved = wanted.preserving()
    needed, has = resolved.attention_norm, source.attention_shape.attention_norm
    if needed not in ("auto", has):
        raise UserError(
            f"topology {topology_name(resolved)} needs attention norm {needed!r}, and the model has {has!r}, which "
            f"stays: use siamese-post-pre, or a Pre-Norm model with attention norm {needed!r}"
        )
    target = dataclasses.replace(source, topology=resolved, norm=operator, **fields)
    _refuse_operator(source, target)
    return target


def require_convertible(source: LanguageModelConfig, target: LanguageModelConfig) -> None:
    """Raise UserError unless a trained model of `source` can be converted to one of `target`."""
    free = {name: getattr(target, name) for name in FREE}
    reached = converted_config(source, target.topology, target.norm, **free)
    for field in dataclasses.fields(LanguageModelConfig):
        there, here = reached.to_json()[field.name], target.to_json()[field.name]
        if there != here:
            raise UserError(f"{field.name} of a model that is converted is {there}, not {here}: leave it out")


@torch.no_grad()
def convert(model: LanguageModel, target: LanguageModelConfig) -> tuple[Inexact, ...]:
    """Replace the residual path of `model` by that of `target`; return the differences of its function, each once.

    There are none where the function is the same up to rounding. Raises UserError, before any change, where it cannot
    be kept. Build the optimizer afterwards: the new modules have new parameters.
    """
    source = model.config
    require_convertible(source, target)
    if all(getattr(source, name) == getattr(target, name) for name in (*PATH, *FREE)):
        model.config = target
        return ()
    spec, like, old = target.residual_spec(model.kernels), model.embedding.weight, path_of(model)
    path = build_residual_path(target.topology, spec, transformer_places(target.depth))
    for part in path.parts:
        part.to(device=like.device, dtype=like.dtype)
    differences: dict[Inexact, None] = {}
    if all(getattr(source, name) == getattr(target, name) for name in PATH):
        for part, replaced in zip(path.parts, old.parts, strict=True):
            part.load_state_dict(replaced.state_dict())
    else:
        path.opening.init_as_pre_norm()
        for part, replaced in zip((*chain(*path.connections), path.closing), old.parts[1:], strict=True):
            differences |= dict.fromkeys(part.init_as_pre_norm(_norm_of(replaced)))  # type: ignore[operator]
    for part, replaced in zip(path.parts, old.parts, strict=True):
        part.train(replaced.training)
    model.opening, model.closing = path.opening, path.closing
    for index, (block, connections) in enumerate(zip(model.blocks, path.connections, strict=True)):
        block.set_connections(connections)  # type: ignore[operator]
        drop_path = build_drop_path(target.drop_path, index, target.depth)
        block.drop_path = drop_path.to(like.device).train(block.training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = target.dropout
    model.config = target
    return tuple(differences)


def path_of(model: LanguageModel) -> ResidualPath:
    """Return the modules of a model's residual path."""
    connections = tuple(block.connections for block in model.blocks if isinstance(block, Block))
    return ResidualPath(model.opening, connections, model.closing)


def _norm_of(part: nn.Module) -> NormFunction:
    """Return the function of the norm of a Pre-Norm connection or closing."""
    assert isinstance(part.norm, Norm)
    return part.norm.function()


def _refuse_source(source: LanguageModelConfig) -> None:
    name = topology_name(source.topology)
    if type(source.topology) is not PreNorm or source.topology.embedding_norm:
        raise UserError(f"a model of {name} cannot be converted, only one of pre: leave the topology out to keep it")
    if source.norm.name not in MOVABLE:
        raise UserError(f"a model with norm {source.norm} cannot be converted: convert one with {', '.join(MOVABLE)}")


def _refuse_operator(source: LanguageModelConfig, target: LanguageModelConfig) -> None:
    """Raise UserError for an operator that cannot have the old one's functions, or that changes the attention."""
    old, new = (config.norm.build(config.dim) for config in (source, target))
    for parameter in old.parameters():  # an arbitrary function of the kind
        nn.init.constant_(parameter, 0.5)
    lost = [str(found) for found in new.copy_from(old.function()) if not found.kind.is_tolerated]
    if not lost and NORMS[target.norm.name].scales_embedding != NORMS[source.norm.name].scales_embedding:
        lost = ["the embedding is scaled"]
    if lost:
        raise UserError(
            f"norm {target.norm} cannot keep the function of {source.norm} ({'; '.join(lost)}): leave norm out, or "
            "convert rmsnorm to seednorm"
        )
    if target.attention_shape != source.attention_shape:
        raise UserError(f"norm {target.norm} changes the attention's norms: keep the options of {source.norm}")
