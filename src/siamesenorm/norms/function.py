"""The function of a norm, and its differences from the function of the norm that replaces it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class InexactKind(Enum):
    """What differs between a norm and its replacement."""

    STATISTIC = "another statistic"
    EPS = "another eps"
    GAIN_DROPPED = "no gain"
    GAIN_AVERAGED = "one gain for all channels"
    GAIN_ROUNDED = "a gain of lower precision"
    BIAS_DROPPED = "no bias"
    COEFFICIENT = "a dynamic coefficient of its own"
    NORM_OF_NORM = "a norm of a norm"
    NORM_OF_MULTIPLE = "the norm of a multiple of the stream"

    @property
    def is_tolerated(self) -> bool:
        """Whether a conversion accepts it: rounding, or the eps of a norm of a norm or of a multiple."""
        return self in (InexactKind.GAIN_ROUNDED, InexactKind.NORM_OF_NORM, InexactKind.NORM_OF_MULTIPLE)


@dataclass(frozen=True, slots=True)
class Inexact:
    """One difference between a norm and its replacement; `bound` is the largest relative one, None if unbounded."""

    kind: InexactKind
    detail: str
    bound: float | None = None

    def __str__(self) -> str:
        """Return the detail with its bound."""
        return self.detail if self.bound is None else f"{self.detail} (at most {self.bound:.2g} of a token's norm)"

    @classmethod
    def eps(cls, old: float | None, new: float | None) -> Inexact:
        """Return the difference of eps; the largest is that of a token with a mean square of 0."""
        if old is None or new is None:
            return cls(InexactKind.EPS, "eps")
        return cls(InexactKind.EPS, f"eps {old:g} became {new:g}", abs(math.sqrt(old / new) - 1) if new else None)

    @classmethod
    def norm_of_norm(cls, inner: float | None, outer: float | None) -> Inexact:
        """Return the difference of a norm of a norm, which divides by sqrt(m + outer (m + inner))."""
        detail = "normalised twice: a relative difference of about eps / (2 mean square) of the token"
        bound = None if not inner or not outer else 1 / math.sqrt(inner) - 1
        return cls(InexactKind.NORM_OF_NORM, detail, bound)

    @classmethod
    def norm_of_multiple(cls, factor: float | None) -> Inexact:
        """Return the difference of the norm of c x from that of x; the largest is that of a mean square of 0."""
        detail = "the norm of a multiple of the stream: a relative difference below eps / (2 mean square) of the token"
        return cls(InexactKind.NORM_OF_MULTIPLE, detail, None if factor is None else abs(factor - 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormFunction:
    """The map (gain + offset) * statistic(x) + bias over `axis` of `dim` channels, in whichever class.

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

    def divided(self, gain_by: float, bias_by: float) -> NormFunction:
        """Return the map with gain and bias divided by numbers: in fp64, with the offset in the gain."""
        if gain_by == bias_by == 1.0:
            return self
        gain, offset = self.gain, self.offset
        if gain_by != 1.0:
            whole = torch.ones(self.dim, dtype=torch.float64) if gain is None else gain.double() + offset
            gain, offset = whole / gain_by, 0.0
        bias = None if self.bias is None else self.bias.double() / bias_by
        return dataclasses.replace(self, gain=gain, offset=offset, bias=bias)


def vanishes(parameter: Tensor | None) -> bool:
    """Return whether a parameter is absent or zero; one without data (meta device) counts as not zero."""
    return parameter is None or not (parameter.is_meta or bool(parameter.any()))


MEAN_CHANGES = {
    ("layernorm", "rmsnorm"): "the mean is no longer subtracted",
    ("rmsnorm", "layernorm"): "the mean is subtracted",
}


def compare_statistic(statistic: str, eps: float | None, source: NormFunction) -> list[Inexact]:
    """Return the differences of an operator's statistic and eps from the source's."""
    if statistic != source.statistic:
        change = (source.statistic, statistic)
        detail = MEAN_CHANGES.get(change, f"{source.statistic} became {statistic}")
        return [Inexact(InexactKind.STATISTIC, detail)]
    return [] if eps == source.eps else [Inexact.eps(source.eps, eps)]


@torch.no_grad()
def copy_gain_from(
    source: NormFunction, gain: Tensor | None, offset: float, *, less: Tensor | float = 0.0
) -> list[Inexact]:
    """Set `gain` so that gain + offset + less is the source's gain; return the differences.

    Stored numbers are copied bit for bit where the offsets agree; elsewhere the sum is rounded once.
    """
    if gain is None:
        return [] if source.gain is None else [Inexact(InexactKind.GAIN_DROPPED, "the gain is dropped")]
    if source.gain is None:
        wanted = torch.ones_like(gain, dtype=torch.float64)
    elif source.offset == offset and vanishes(torch.as_tensor(less)):
        gain.copy_(source.gain)
        return []
    else:
        wanted = source.gain.double() + source.offset
    wanted = wanted - torch.as_tensor(less).to(wanted) - offset
    gain.copy_(wanted)
    if gain.is_meta or gain.dtype.itemsize >= 4 or torch.equal(gain.double(), wanted):
        return []
    detail = f"the gain is rounded to {str(gain.dtype).removeprefix('torch.')}"
    return [Inexact(InexactKind.GAIN_ROUNDED, detail, torch.finfo(gain.dtype).eps / 2)]


@torch.no_grad()
def copy_bias_from(source: NormFunction, bias: Tensor | None) -> list[Inexact]:
    """Set `bias` to the source's; return the differences."""
    if bias is None:
        return [] if vanishes(source.bias) else [Inexact(InexactKind.BIAS_DROPPED, "the bias is dropped")]
    if source.bias is None:
        bias.zero_()
    else:
        bias.copy_(source.bias)
    return []
