"""The norms of a host as functions, and the operator that takes their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.foreign_norms import Unreadable, read_norm
from siamesenorm.interop.rewire.anatomy import Host
from siamesenorm.norms import NORMS, Inexact, Norm, NormFunction, NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNorms:
    """The functions of a host's norms: one a connection, None where the sublayer keeps its own, and the final one.

    `inputs` go by the name of the norm, or of the connection where there is none to take over. `first` is one that is
    there, which tells the width; `operator` is that one's, with its eps, offset and options.
    """

    inputs: Mapping[str, NormFunction | None]
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

    inputs: dict[str, NormFunction | None] = {}
    for index, block in enumerate(host.blocks):
        for slot in anatomy.slots:
            name = f"{host.name}.{index}.{slot.norm or slot.connection}"
            inputs[name] = read(block, slot.norm, name) if slot.norm else None
            for path in slot.kept:
                read(block, path, f"{host.name}.{index}.{path}")
    final = read(host.backbone, anatomy.final_norm, host.final_norm)
    module, first = next(iter(found.values()))
    return HostNorms(
        inputs=inputs,
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


def refuse_other_functions(
    operator: NormSpec, found: Mapping[str, Iterable[Inexact]], *, chosen: str | NormSpec | None
) -> None:
    """Raise UserError, naming the norm, if a new one differs by more than rounding and the eps of a norm of a norm.

    `found` are the differences by the name of the host's norm; `chosen` is the operator that was asked for, if any.
    """
    remedy = "make them alike with swap_norms first" if chosen is None else "leave norm out"
    for name, differences in found.items():
        for difference in differences:
            if not difference.kind.only_eps_or_rounding:
                raise UserError(
                    f"norm {operator} cannot keep the function of the host's norms ({name}: {difference.detail}): "
                    f"{remedy}, or use preserve=False"
                )
