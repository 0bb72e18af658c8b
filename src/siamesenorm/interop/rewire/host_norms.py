"""The norms of a host as functions, and the operator that takes their place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.foreign_norms import Unreadable, read_norm
from siamesenorm.interop.rewire.anatomy import Host
from siamesenorm.norms import NORMS, Norm, NormFunction, NormSpec
from siamesenorm.topologies.upcycling import EPS_TWICE, SCALED


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNorms:
    """The functions of a host's norms: one a connection, None where the sublayer keeps its own, and the final one.

    `first` is one that is there, which tells the width; `operator` is that one's, with its eps, offset and options.
    """

    inputs: tuple[NormFunction | None, ...]
    final: NormFunction | None
    first: NormFunction
    operator: NormSpec


def read_norms(host: Host) -> HostNorms:
    """Return the functions of the norms on the residual path; raises UserError, naming the norm that has none."""
    anatomy, found = host.anatomy, dict[str, tuple[nn.Module, NormFunction]]()

    def read(owner: nn.Module, path: str, name: str) -> NormFunction:
        try:
            module = owner.get_submodule(path)
            found[name] = module, read_norm(module)
        except (Unreadable, AttributeError) as reason:
            raise UserError(f"{name} is no norm that rewire understands: {reason}") from reason
        return found[name][1]

    inputs: list[NormFunction | None] = []
    for index, block in enumerate(host.blocks):
        for slot in anatomy.slots:
            inputs.append(read(block, slot.norm, f"{host.name}.{index}.{slot.norm}") if slot.norm else None)
            for path in slot.kept:
                read(block, path, f"{host.name}.{index}.{path}")
    final = read(host.backbone, anatomy.final_norm, host.final_norm)
    module, first = next(iter(found.values()))
    return HostNorms(
        inputs=tuple(inputs),
        final=None if anatomy.keeps_final_norm else final,
        first=first,
        operator=operator_of(module, first),
    )


def operator_of(module: nn.Module, function: NormFunction) -> NormSpec:
    """Return the operator that computes what a norm does, with the norm's own options where it is one of ours."""
    if isinstance(module, Norm):
        name = next(name for name, operator in NORMS.items() if type(module) is operator)
        return NormSpec.parse(name, **module.settings())
    return inheriting(NormSpec(function.statistic), function, bias=True)


def new_norm(chosen: str | NormSpec | None, old: HostNorms) -> NormSpec:
    """Return the operator of the new norms: the host's own, or the chosen one with what it inherits of the host's."""
    if chosen is None:
        return old.operator
    return inheriting(NormSpec.parse(chosen) if isinstance(chosen, str) else chosen, old.first)


def inheriting(spec: NormSpec, function: NormFunction, *, bias: bool = False) -> NormSpec:
    """Return an operator with eps and offset of a norm, where it has none of its own; with `bias`, its lack of one."""
    inherited = {"eps": function.eps, "offset": function.offset if function.gain is not None else None}
    if bias and function.gain is not None and function.bias is None:
        inherited["bias"] = False
    known, given = NORMS[spec.name].option_defaults(), dict(spec.options)
    return spec.with_options(**{k: v for k, v in inherited.items() if v is not None and k in known and k not in given})


def refuse_other_functions(norm: NormSpec, differences: tuple[str, ...]) -> None:
    """Raise UserError if the new norms differ from the host's by more than eps and rounding."""
    allowed = (EPS_TWICE, SCALED)
    for difference in differences:
        if difference not in allowed and not difference.startswith(("eps ", "the gain is rounded to ")):
            raise UserError(
                f"norm {norm} cannot keep the function of the host's norms ({difference}): leave norm out, or use "
                "preserve=False"
            )
