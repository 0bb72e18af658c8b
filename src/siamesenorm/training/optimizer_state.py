"""AdamW's state as flat named tensors and plain values, for a checkpoint, and back to the bit.

`Optimizer.state_dict` numbers parameters by their order and loads hyper-parameters with the state. Here parameters go
by name, so that a reordered model is no silent mix-up; and hyper-parameters come from the configuration alone: the
stored ones are only compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from siamesenorm.errors import UserError

# The learning rate is set by the schedule at every step; the others say how to compute, not what.
NOT_COMPARED = frozenset({"params", "lr", "foreach", "fused", "capturable", "differentiable"})


def optimizer_tensors(optimizer: Optimizer, names: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state, and the rest of it as plain values for JSON.

    `names` is `dict(model.named_parameters())`. Tensors are called "<parameter>/<entry>", such as
    "head.weight/exp_avg", and are not copied. Raises `ValueError` when a parameter of the optimizer has no name.
    """
    name_of = _name_of(optimizer, names)
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, entries in optimizer.state.items():
        for entry, value in entries.items():
            key = f"{name_of[id(parameter)]}/{entry}"
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                scalars[key] = value
    return tensors, {"scalars": scalars, "groups": _groups(optimizer, name_of)}


def restore_optimizer(
    optimizer: Optimizer, names: Mapping[str, Tensor], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Give a newly made optimizer the state that `optimizer_tensors` returned, every bit and dtype as it was.

    Raises `UserError`, and changes nothing, when parameters, shapes or hyper-parameters (but the learning rate) differ.
    """
    groups = _groups(optimizer, _name_of(optimizer, names))
    _compare(groups, values["groups"])
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[Tensor, dict[str, Any]] = {}
    for key, value in {**tensors, **values["scalars"]}.items():
        name, _, entry = key.rpartition("/")
        parameter = names[name]
        if isinstance(value, Tensor):
            if value.ndim and value.shape != parameter.shape:
                raise UserError(
                    f"the checkpoint's {key} has shape {list(value.shape)}, the parameter {list(parameter.shape)}: "
                    "resume with the configuration the run was started with"
                )
            group = group_of[id(parameter)]
            # AdamW counts steps on the CPU, unless its kernel reads the count.
            on_cpu = entry == "step" and not (group.get("fused") or group.get("capturable"))
            value = value.to("cpu" if on_cpu else parameter.device, copy=True)
        state.setdefault(parameter, {})[entry] = value
    optimizer.state.clear()
    optimizer.state.update(state)


def _name_of(optimizer: Optimizer, names: Mapping[str, Tensor]) -> dict[int, str]:
    name_of = {id(parameter): name for name, parameter in names.items()}
    nameless = sum(id(p) not in name_of for group in optimizer.param_groups for p in group["params"])
    if nameless:
        raise ValueError(f"{nameless} parameters of the optimizer have no name: pass all of the model's")
    return name_of


def _groups(optimizer: Optimizer, name_of: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {
            "parameters": sorted(name_of[id(parameter)] for parameter in group["params"]),
            "hyperparameters": {key: _plain(value) for key, value in group.items() if key not in NOT_COMPARED},
        }
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _compare(ours: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    """Refuse other parameters and hyper-parameters; one that only one version of torch has does not count."""
    ours_by_name = [group["parameters"] for group in ours]
    stored_by_name = [group["parameters"] for group in stored]
    if ours_by_name != stored_by_name:
        differing = sorted({*sum(ours_by_name, [])} ^ {*sum(stored_by_name, [])}) or ["their groups"]
        raise UserError(
            f"the checkpoint's optimizer has other parameters than this model ({', '.join(differing[:3])}): "
            "resume with the configuration the run was started with"
        )
    for group, other in zip(ours, stored, strict=True):
        for key in group["hyperparameters"].keys() & other["hyperparameters"].keys():
            mine, theirs = group["hyperparameters"][key], other["hyperparameters"][key]
            if mine != theirs:
                raise UserError(
                    f"the checkpoint was made with {key} = {theirs}, this run has {mine}: "
                    "resume with the configuration the run was started with"
                )
