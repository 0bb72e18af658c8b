"""Modules that declare the initial value and the weight decay of their parameters, and their constants.

Optimizers and initialisers read the declarations. Constants (depth scales, DeepNorm's alpha) are 0-d buffers, so that a
compiled block does not specialise on a Python float; casts and construction on the meta device do not round them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError

Initial = float | list[float] | list[list[float]]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The initial value of a parameter (a number, or nested lists of its shape) and whether weight decay applies.

    Numbers, not a tensor: a tensor created on the meta device would have no values.
    """

    initial: Initial
    decay: bool


class DeclaredModule(nn.Module):
    """A module that declares its parameters and constants.

    Assigning a parameter without `declare` is an error: its initial value and its weight decay would be unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameter_specs: dict[str, ParameterSpec] = {}
        self._constants: dict[str, float] = {}

    def declare(self, name: str, shape: tuple[int, ...] | None, *, initial: Initial, decay: bool = False) -> None:
        """Register the parameter `name` with its initial value and weight-decay rule; without a shape it is None."""
        if shape is None:
            super().register_parameter(name, None)
            return
        self.parameter_specs[name] = ParameterSpec(initial, decay)
        super().register_parameter(name, nn.Parameter(torch.empty(shape)))
        self._reset_parameter(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Replace a declared parameter; raises UserError for one that is not declared."""
        if param is not None and name not in self.parameter_specs:
            raise UserError(
                f"parameter {name!r} of {type(self).__name__} is not declared: use "
                f"self.declare({name!r}, {tuple(param.shape)}, initial=...)"
            )
        super().register_parameter(name, param)

    def constant(self, name: str, value: float | None) -> None:
        """Register `value` as a 0-d buffer, or None. It is not saved: it follows from the configuration."""
        if value is None:
            self.register_buffer(name, None)
            return
        self._constants[name] = value
        self.register_buffer(name, torch.tensor(value), persistent=False)

    def constant_value(self, name: str) -> float:
        """Return a constant unrounded; 1 for None."""
        return self._constants.get(name, 1.0)

    def reset_parameters(self) -> None:
        """Set declared parameters to their initial values and refill the constants (after meta-device construction)."""
        for name in self.parameter_specs:
            self._reset_parameter(name)
        self.refill_constants()

    def _reset_parameter(self, name: str) -> None:
        parameter = self.get_parameter(name)
        initial = self.parameter_specs[name].initial
        assign(parameter, torch.tensor(initial, dtype=parameter.dtype, device=parameter.device))

    def refill_constants(self) -> None:
        """Set the constants to their values, unrounded, on their present device."""
        for name, value in self._constants.items():
            buffer = self.get_buffer(name)
            dtype = torch.promote_types(buffer.dtype, torch.float32)
            self._buffers[name] = torch.tensor(value, dtype=dtype, device=buffer.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeclaredModule:
        # A constant is refilled rather than cast: 1/sqrt(2) rounded to bf16 or fp32 would follow the model into fp64.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.refill_constants()
        return self


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter to `value`, which broadcasts to its whole shape; of a sharded one (DTensor), this rank's part.

    Every rank passes the same value: there is no communication.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Imported here, where a DTensor can exist at all: the import costs more than that of the package.
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(parameter, DTensor):
            whole = value.to(parameter.dtype).expand(parameter.shape)
            shards = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shards.to_local())
            return
    parameter.copy_(value)


def declared_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    """Yield (qualified name, parameter, specification) of every declared parameter of a model."""
    for prefix, module in model.named_modules():
        if isinstance(module, DeclaredModule):
            for name, declaration in module.parameter_specs.items():
                yield f"{prefix}.{name}".lstrip("."), module.get_parameter(name), declaration
