"""What one norm hands to the norm that replaces it: a statistic, a gain, a bias, and the words for what was lost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

MEAN_CHANGES = {
    ("layernorm", "rmsnorm"): "the mean is no longer subtracted",
    ("rmsnorm", "layernorm"): "the mean is subtracted",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormFunction:
    """The map (gain + offset) * statistic(x) + bias over `axis` of `dim` channels, whoever's class computes it.

    `statistic` is the registered name of the operator whose formula at unit gain it is. gain and bias are [dim], or
    None for 1 and 0; eps is None where the formula has none of the usual meaning (inside a root of a mean square).
    """

    statistic: str
    dim: int
    axis: int = -1
    eps: float | None = None
    gain: Tensor | None = None
    offset: float = 0.0
    bias: Tensor | None = None

    @property
    def affine(self) -> bool:
        """Whether there is a gain or a bias."""
        return self.gain is not None or self.bias is not None

    def divided(self, factor: float) -> NormFunction:
        """Return the map divided by a factor: in fp64, with the offset in the gain."""
        whole = torch.ones(self.dim, dtype=torch.float64) if self.gain is None else self.gain.double() + self.offset
        bias = None if self.bias is None else self.bias.double() / factor
        return dataclasses.replace(self, gain=whole / factor, offset=0.0, bias=bias)


def vanishes(parameter: Tensor | None) -> bool:
    """Return whether a parameter is absent or zero; what has no data yet (meta device) is taken not to be."""
    return parameter is None or not (parameter.is_meta or bool(parameter.any()))


@torch.no_grad()
def take_statistic(statistic: str, eps: float | None, source: NormFunction) -> list[str]:
    """Return the differences of an operator's statistic and eps from the source's."""
    if statistic != source.statistic:
        change = (source.statistic, statistic)
        return [MEAN_CHANGES.get(change, f"{source.statistic} became {statistic}")]
    if eps != source.eps:
        return [f"eps {source.eps:g} became {eps:g}" if source.eps is not None and eps is not None else "eps"]
    return []


@torch.no_grad()
def take_gain(gain: Tensor | None, offset: float, source: NormFunction, *, less: Tensor | float = 0.0) -> list[str]:
    """Set `gain` so that gain + offset is the source's, `less` a part that the operator adds; return differences.

    The stored numbers are copied bit for bit where the offsets agree; elsewhere the sum is rounded once.
    """
    if gain is None:
        lost = source.gain is not None
        return ["the gain is dropped"] if lost else []
    if source.gain is None:
        wanted = torch.ones_like(gain, dtype=torch.float64)
    elif source.offset == offset and vanishes(torch.as_tensor(less)):
        gain.copy_(source.gain)
        return []
    else:
        wanted = source.gain.double() + source.offset
    wanted = wanted - torch.as_tensor(less).to(wanted) - offset
    gain.copy_(wanted)
    whole = gain.is_meta or gain.dtype.itemsize >= 4 or torch.equal(gain.double(), wanted)
    return [] if whole else [f"the gain is rounded to {str(gain.dtype).removeprefix('torch.')}"]


@torch.no_grad()
def take_bias(bias: Tensor | None, source: NormFunction) -> list[str]:
    """Set `bias` to the source's; return differences."""
    if bias is None:
        return [] if vanishes(source.bias) else ["the bias is dropped"]
    if source.bias is None:
        bias.zero_()
    else:
        bias.copy_(source.bias)
    return []
