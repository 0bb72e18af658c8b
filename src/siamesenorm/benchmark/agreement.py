"""A candidate is only worth timing if it computes the formula: values and gradients against the plain ones in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError

Values = Mapping[str, Tensor]
"""Results and gradients by name, rows of channels last."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""How far a row may be from the formula's, as a share of its length: a few roundings, and far less than any mistake."""


@torch.no_grad()
def perturb(module: nn.Module) -> None:
    """Move the parameters away from their first values, in the same way each time: ones would hide a swapped gain."""
    for seed, parameter in enumerate(module.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed)
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, device=parameter.device))


def random_like(x: Tensor, seed: int) -> Tensor:
    """Return normal random numbers, the same for every dtype up to rounding."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a candidate must compute: the formulas' values in fp64, and how far from them it may be."""

    values: Values
    allowed: Mapping[str, float]

    @classmethod
    def of(cls, values: Values, plain: Values, dtype: torch.dtype) -> Expected:
        """Allow the rounding of `dtype`, and four times that of the plain formulas, for what all but cancels."""
        rows = {what: farthest_row(plain[what], value) for what, value in values.items()}
        return cls(values, {what: max(TOLERANCES[dtype], 4 * error) for what, error in rows.items()})

    def refuse_another(self, found: Values) -> None:
        """Raise UserError unless every row of every value is as expected."""
        for what, value in self.values.items():
            error = farthest_row(found[what], value)
            if not error <= self.allowed[what]:
                raise UserError(f"its {what} differs from the formula by {error:.2g} of its length")


def farthest_row(found: Tensor, expected: Tensor) -> float:
    """Return the largest distance of a row from the expected one, as a share of that one's length.

    A row of less than a tenth of the mean length counts as that long: it is mostly rounding.
    """
    found, expected = found.detach().double(), expected.detach()
    lengths = expected.norm(dim=-1)
    if not lengths.any():
        lengths = torch.ones_like(lengths)
    return float(((found - expected).norm(dim=-1) / lengths.clamp_min(0.1 * lengths.mean())).max())
