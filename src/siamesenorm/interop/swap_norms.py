"""Replace the norms of any model by another operator, and report what became of the function of each."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.converted_models import record_step, refuse_unsavable
from siamesenorm.interop.shadow import share_copy, small_inputs, undisturbed
from siamesenorm.models.conversion import path_of
from siamesenorm.models.language import LanguageModel, LanguageModelConfig
from siamesenorm.models.transformer import inherited_operator
from siamesenorm.norms import NORMS, Inexact, Norm, NormSpec
from siamesenorm.norms.foreign_norms import Unreadable, looks_like_norm, norms_of, read_norm, replacement
from siamesenorm.topologies.boundary_family import BoundaryConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One norm that was replaced: its name, its class before and after, and how its function changed."""

    name: str
    was: str
    now: str
    differences: tuple[Inexact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """The norms that `swap_norms` replaced, kept and refused, the last two as (name, reason)."""

    replaced: tuple[Replacement, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def function_kept(self) -> bool:
        """Whether the whole model computes what it did, up to rounding."""
        return not any(one.differences for one in self.replaced)

    def __str__(self) -> str:
        """Return the report as a table, one norm a line."""
        rows = [("norm", "outcome", "detail")]
        for one in self.replaced:
            changes = "; ".join(map(str, one.differences))
            function = f"function changed: {changes}" if changes else "function kept"
            rows.append((one.name, "replaced", f"{one.was} -> {one.now}, {function}"))
        for outcome, entries in (("kept", self.kept), ("refused", self.refused)):
            rows.extend((name, outcome, reason) for name, reason in entries)
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {outcome:<{widths[1]}}  {detail}" for name, outcome, detail in rows)


def swap_norms(
    model: nn.Module,
    norm: str | NormSpec,
    where: Callable[[str], bool] | str | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
) -> SwapReport:
    """Replace the norms of `model` in place by `norm` ("seednorm", "rmsnorm:eps=1e-6", ...) and return a report.

    Supports LayerNorm and RMSNorm of torch, timm (channels-first too) and Hugging Face (Gemma's 1 + w too), and this
    library's norms. Gain, bias, eps, axis, dtype, device, training flag and requires_grad are carried over, and with
    them the function, where the new formula allows it: RMSNorm -> SeeDNorm keeps it, LayerNorm -> RMSNorm does not. An
    `eps` given in `norm` wins. The parameters are new: build the optimizer afterwards.

    `where` selects by qualified name: a predicate or a glob pattern ("*.input_layernorm"). A `LanguageModel` of this
    library has one operator on its residual path and RMSNorm or LayerNorm in its attention: the former is replaced as a
    whole, and the model's configuration says so. A Hugging Face or diffusers model gets a class and a copy of its
    configuration that save it as what it is.

    A model of transformers, timm's ViT or diffusers' DiT runs with the new norms first, on a copy and small inputs, or
    any model on `inputs`, arguments of its forward. Norms with which it fails, since the model reads `weight` itself or
    needs contiguous output, are refused; the others are replaced.

    Raises UserError for an unknown norm or option, a pattern that selects nothing, and a model that no configuration
    would describe afterwards; the model is then unchanged.
    """
    spec = NormSpec.parse(norm) if isinstance(norm, str) else norm
    refuse_unsavable(model, "swap the norms of")
    names = {name: one for name, one in model.named_modules(remove_duplicate=False) if looks_like_norm(one)}
    if isinstance(model, LanguageModel):
        if where is not None:
            raise UserError(f"where={where!r}: a LanguageModel has one operator on its residual path: leave it out")
        swapped = _swapped_config(model.config, spec)
        inside = {id(norm) for part in path_of(model).parts for norm in norms_of(part).values()}
        new, report = _plan(model, names, spec, lambda name: id(names[name]) in inside)
        if report.refused:
            name, reason = report.refused[0]
            raise UserError(f"{name} cannot be replaced, and the model has one operator: {reason}")
        model.config = swapped
    else:
        if isinstance(where, str):
            chosen = set(fnmatch.filter(names, where))
            if not chosen:
                some = ", ".join([*islice(names, 4), *(["..."] if len(names) > 4 else [])])
                raise UserError(f"where={where!r} selects no norm: the model has {some or 'none'}")
            where = chosen.__contains__
        new, report = _plan(model, names, spec, where or (lambda name: True))
        new, report = _keep_what_runs(model, new, report, inputs)
    for name, module in new.items():
        model.set_submodule(name, module)
    if new and not isinstance(model, LanguageModel):
        record_step(model, {"operation": "swap_norms", "norm": spec.to_json(), "names": list(new)})
    return report


def _keep_what_runs(
    model: nn.Module, new: dict[str, Norm], report: SwapReport, inputs: Mapping[str, Any] | None
) -> tuple[dict[str, Norm], SwapReport]:
    """Return the new norms with which a copy of the model runs, and the report with the others refused."""
    with undisturbed(model):
        given = small_inputs(model) if inputs is None else dict(inputs)
    if given is None or not new or any(parameter.is_meta for parameter in model.parameters()):
        return new, report
    if _error_with(model, {}, given) is not None or _error_with(model, new, given) is None:
        return new, report
    alike: dict[str, dict[str, Norm]] = {}
    for name, module in new.items():
        alike.setdefault(re.sub(r"\d+", "*", name), {})[name] = module
    errors = {name: error for part in alike.values() if (error := _error_with(model, part, given)) for name in part}
    kept = {name: module for name, module in new.items() if name not in errors}
    if kept and (error := _error_with(model, kept, given)):
        raise UserError(f"{type(model).__name__} does not run with these norms ({error}): select some with where")
    refused = tuple((name, f"the model fails with the new norm: {error}") for name, error in errors.items())
    replaced = tuple(one for one in report.replaced if one.name in kept)
    return kept, dataclasses.replace(report, replaced=replaced, refused=(*report.refused, *refused))


def _error_with(model: nn.Module, new: Mapping[str, Norm], inputs: Mapping[str, Any]) -> str | None:
    """Return the error of a copy of a model with new norms, None if it runs."""
    with undisturbed(model):
        shadow = share_copy(model)
        for name, module in new.items():
            shadow.set_submodule(name, copy.deepcopy(module))
        try:
            shadow.eval()(**inputs)
        except Exception as error:  # a model of unknown origin may raise anything
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.120}"
    return None


def _plan(
    model: nn.Module, names: dict[str, nn.Module], spec: NormSpec, selects: Callable[[str], bool]
) -> tuple[dict[str, Norm], SwapReport]:
    """Return the new norms by name, and the report; the model is not changed."""
    parents = dict(model.named_modules(remove_duplicate=False))
    new: dict[str, Norm] = {}
    replaced: list[Replacement] = []
    kept: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    for name, module in names.items():
        if not selects(name):
            kept.append((name, "not selected"))
            continue
        try:
            _refuse_place(name, parents[name.rpartition(".")[0]], names)
            function = read_norm(module)
        except Unreadable as reason:
            refused.append((name, str(reason)))
            continue
        if type(module) is NORMS[spec.name] and dict(spec.options).items() <= module.settings().items():
            kept.append((name, f"is {spec} already"))
            continue
        new[name], differences = replacement(module, function, spec, model)
        was, now = type(module).__name__, type(new[name]).__name__
        replaced.append(Replacement(name=name, was=was, now=now, differences=tuple(differences)))
    return new, SwapReport(replaced=tuple(replaced), kept=tuple(kept), refused=tuple(refused))


def _refuse_place(name: str, parent: nn.Module, names: dict[str, nn.Module]) -> None:
    """Raise Unreadable for a norm that cannot be exchanged where it is."""
    mine = {id(names[name]), *map(id, names[name].parameters())}
    for other, candidate in names.items():
        if other != name and mine & {id(candidate), *map(id, candidate.parameters())}:
            raise Unreadable(f"shared with {other}")
    if not name:
        raise Unreadable("the model itself is a norm: use build_norm")
    if isinstance(parent, nn.TransformerEncoderLayer):
        raise Unreadable("torch's TransformerEncoderLayer computes its norms itself on its fast path")
    if isinstance(parent, BoundaryConnection) and parent.previous is not None:
        raise Unreadable("a fused connection computes its norms itself: build the model with kernels='plain'")


def _swapped_config(config: LanguageModelConfig, norm: NormSpec) -> LanguageModelConfig:
    """Return the configuration after a swap; raises UserError where it would describe another model."""
    swapped = dataclasses.replace(config, norm=inherited_operator(config.norm, norm))
    if NORMS[norm.name].scales_embedding or NORMS[config.norm.name].scales_embedding:
        raise UserError(f"norm {norm} comes with a scale of the embedding and values by place: build the model with it")
    if swapped.attention_shape != config.attention_shape:
        raise UserError(f"norm {norm} comes with other norms in the attention: build the model with it")
    return swapped
