"""Read what a norm of another library computes, without importing that library, and replace it by one of ours.

Class names are not enough: Gemma's RMSNorm multiplies by 1 + weight, Gemma 3n's by weight, and Nemotron's LayerNorm is
a subclass of torch's that multiplies by 1 + weight. So a copy of the module with known weights is run on known numbers,
and a formula is accepted only when it gives the same values.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.errors import UserError
from siamesenorm.norms.function import Inexact, NormFunction
from siamesenorm.norms.norm import Norm, Role
from siamesenorm.norms.registry import NORMS, NormSpec

_PER_TOKEN = re.compile(r"(rms|layer)_?norm", re.IGNORECASE)
_CHANNELS_FIRST = re.compile(r"2d", re.IGNORECASE)
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)


class Unreadable(Exception):
    """A module that looks like a norm and cannot be replaced; the message says why."""


def looks_like_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm by its class, or a leaf whose class name says so."""
    if isinstance(module, (Norm, nn.LayerNorm, nn.RMSNorm)):
        return True
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def norms_of(model: nn.Module) -> dict[str, Norm]:
    """Return the norms of this library in a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Norm)}


def read_norm(module: nn.Module, dim: int | None = None) -> NormFunction:
    """Return the function of a norm, with the module's own tensors; raises Unreadable where no formula fits.

    `dim` is its number of channels where the module does not declare it.
    """
    if isinstance(module, Norm):
        _refuse_attachments(module)
        return module.function()
    if not _PER_TOKEN.search(type(module).__name__):
        raise Unreadable("not a LayerNorm or RMSNorm of each token")
    _refuse_attachments(module)
    tensors = [name for tensors in (module.named_parameters(), module.named_buffers()) for name, _ in tensors]
    if others := [name for name in tensors if name not in ("weight", "bias")]:
        raise Unreadable(f"no formula explains its {others[0]}")
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    for name, value in (("weight", weight), ("bias", bias)):
        if not (value is None or isinstance(value, nn.Parameter)):
            raise Unreadable(f"its {name} is not a parameter")
    shape = getattr(module, "normalized_shape", None) if weight is None else weight.shape
    if shape is None and dim is not None:
        shape = (dim,)
    if shape is None:
        raise Unreadable("it has no weight and no normalized_shape: its width is not known")
    if len(shape) != 1:
        raise Unreadable(f"it normalises over {len(shape)} axes")
    named = _CHANNELS_FIRST.search(type(module).__name__)
    axis = 1 if named or getattr(module, "data_format", None) == "channels_first" else -1
    eps, statistic, offset = _identify(module, int(shape[0]), _eps_candidates(module, weight), axis)
    return NormFunction(
        statistic=statistic, dim=int(shape[0]), axis=axis, eps=eps, gain=weight, offset=offset, bias=bias
    )


def _refuse_attachments(module: nn.Module) -> None:
    """Refuse hooks, replaced forwards, submodules and further inputs: a new norm would not have them."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in hooks):
        raise Unreadable("it has hooks, which would be lost")
    if "forward" in vars(module):
        raise Unreadable("its forward was replaced on the instance")
    if next(module.children(), None) is not None:
        raise Unreadable("it has submodules, which would be lost")
    try:
        inputs = inspect.signature(module.forward).parameters
    except ValueError:
        raise Unreadable("its forward has no signature") from None
    if len(inputs) != 1:
        raise Unreadable(f"its forward takes {', '.join(inputs)}: a norm takes one tensor")


def _eps_candidates(module: nn.Module, weight: Tensor | None) -> tuple[float, ...]:
    """Return the eps that a module names, or those that its forward may hold as a number (OLMo's)."""
    name = next((name for name in EPS_NAMES if hasattr(module, name)), None)
    if name is None:
        return _USUAL_EPS
    eps = getattr(module, name)
    if eps is None:  # torch: the resolution of the dtype it computes in, which is never below fp32
        dtype = torch.get_default_dtype() if weight is None else weight.dtype
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return (float(eps),)


def _identify(module: nn.Module, dim: int, candidates: tuple[float, ...], axis: int) -> tuple[float, str, float]:
    """Return (eps, statistic, offset of the gain) whose values the module gives on known weights and inputs."""
    for eps in candidates:
        try:
            x, given, weight, bias = _run_copy(module, dim, eps, axis)
        except Exception as error:  # a class of unknown origin may raise anything
            kind = "channels-first images" if axis == 1 else "tokens"
            raise Unreadable(f"its forward does not take {kind}: {str(error).partition(chr(10))[0]}") from error
        for statistic in ("layernorm", "rmsnorm"):
            for offset in (0.0, 1.0):
                gain = None if weight is None else weight + offset
                expected = _evaluate(statistic, x.double(), gain, bias, eps)
                if given.shape == expected.shape and torch.allclose(given, expected, rtol=1e-5, atol=1e-5):
                    return eps, statistic, offset
    raise Unreadable("its values are those of no known formula")


@torch.no_grad()
def _run_copy(
    module: nn.Module, dim: int, eps: float, axis: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run a copy in fp32 with known weights on known tokens; return tokens, values, weight and bias."""
    probe = copy.deepcopy(module)
    if any(parameter.is_meta for parameter in probe.parameters()):
        probe.to_empty(device="cpu")
    probe.float().eval()
    device = next((parameter.device for parameter in probe.parameters()), torch.device("cpu"))
    channels = torch.linspace(-1.0, 1.0, dim, device=device)
    for name, parameter in probe.named_parameters():
        parameter.copy_(0.3 * channels + (0.9 if name == "weight" else 0.2))
    # Without the third, small token, eps inside, outside or absent from the root could not be distinguished.
    numbers = torch.arange(24 * dim, device=device, dtype=torch.float32).reshape(2, 3, 4, dim)
    scale = torch.tensor([1.0, 3.0, math.sqrt(eps) or 1.0], device=device)
    x = (torch.sin(numbers * 1.7 + 0.3) + 0.4) * scale.reshape(3, 1, 1)
    values = probe(x.movedim(-1, axis)).movedim(axis, -1).double()
    return x, values, getattr(probe, "weight", None), getattr(probe, "bias", None)


def _evaluate(statistic: str, x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    function = F.layer_norm if statistic == "layernorm" else F.rms_norm
    normalised = function(x, x.shape[-1:], eps=eps)
    return normalised * (1.0 if gain is None else gain.double()) + (0.0 if bias is None else bias.double())


# --- the norm of ours that replaces it


def inheriting(spec: NormSpec, function: NormFunction, *, bias: bool = False) -> NormSpec:
    """Return an operator with eps and offset of a norm, where it has none of its own; with `bias`, its lack of one."""
    inherited = {"eps": function.eps, "offset": function.offset if function.gain is not None else None}
    if bias and function.gain is not None and function.bias is None:
        inherited["bias"] = False
    known, given = NORMS[spec.name].option_defaults(), dict(spec.options)
    return spec.with_options(**{k: v for k, v in inherited.items() if v is not None and k in known and k not in given})


def replacement(
    module: nn.Module, function: NormFunction, spec: NormSpec, model: nn.Module, role: Role | None = None
) -> tuple[Norm, list[Inexact]]:
    """Return the new norm with the parameters of the old one, set up for its role, and the differences of the two."""
    old = next(module.parameters(), None)
    affine = module.affine if isinstance(module, Norm) else function.affine
    like = old if old is not None else next(filter(torch.is_floating_point, model.parameters()), torch.empty(0))
    new = inheriting(spec, function).build(function.dim, role=role, affine=affine, axis=function.axis)
    new = new.to(device=like.device, dtype=like.dtype).train(module.training)
    new.contiguous = isinstance(module, nn.LayerNorm) or getattr(module, "contiguous", False)
    if isinstance(module, Norm):
        new.select_kernels(module.kernels)
    differences = new.copy_from(function)
    if old is not None:
        new.requires_grad_(any(parameter.requires_grad for parameter in module.parameters()))
    return new, differences


def replace_norm(model: nn.Module, name: str, spec: NormSpec, role: Role | None = None) -> None:
    """Replace one norm of a model in place; raises UserError where it cannot be replaced."""
    module = model.get_submodule(name)
    try:
        new, _ = replacement(module, read_norm(module), spec, model, role)
    except Unreadable as reason:
        raise UserError(f"{name} is no norm that can be replaced: {reason}") from reason
    model.set_submodule(name, new)


def replay(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Repeat `swap_norms` on a freshly built model, which weights are loaded into; its head may be absent."""
    spec, prefix = NormSpec.from_json(record["norm"]), f"{getattr(model, 'base_model_prefix', '')}."
    modules = dict(model.named_modules(remove_duplicate=False))
    for recorded in record["names"]:
        bare = recorded.removeprefix(prefix)
        name = next((known for known in (recorded, bare, prefix + bare) if known in modules), None)
        if name is None:
            if recorded != bare:
                raise UserError(f"{type(model).__name__} has no {recorded}, whose norm was replaced in what was saved")
            continue
        replace_norm(model, name, spec)
