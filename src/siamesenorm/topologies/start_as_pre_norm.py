"""Set initial parameters so that a topology starts as a given Pre-Norm model."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn

from siamesenorm.norms import Inexact, Norm, NormFunction
from siamesenorm.topologies.topology import Closing, Connection, Gate


def zero_gain(part: nn.Module) -> None:
    """Set the parameters of a norm or a gate so that it returns 0 for every input; the identity has none."""
    if isinstance(part, (Norm, Gate)):
        part.zero_()


def double_norm_eps(eps: float) -> float:
    """Return e with e^2 / (1 + e) = eps.

    Two norms with eps e and the outer one times sqrt(1 + e) equal one norm with `eps`, for RMSNorm and LayerNorm:
    x / sqrt(m + e), normalised again, is x / sqrt(m (1 + e) + e^2).
    """
    return (eps + math.sqrt(eps * eps + 4 * eps)) / 2


def eps_behind(norm: NormFunction, inner: nn.Module | None, multiple: float = 1.0) -> tuple[float, float] | None:
    """Return (e, f) such that f N_e(inner(multiple x)) is `norm` of x, N_e being `norm` with eps e; None if none is.

    Two norms of eps a and e, the outer one times sqrt(1 + e), equal one of eps a e / (1 + e).
    """
    if norm.eps is None:
        return None
    if not isinstance(inner, Norm):
        return norm.eps * multiple**2, 1.0
    eps = getattr(inner, "eps", 0.0)
    if inner.statistic != norm.statistic or not inner.eps_in_mean_square or eps <= norm.eps:
        return None
    outer = norm.eps / (eps - norm.eps)
    return outer, math.sqrt(1 + outer)


def copy_function(
    source: NormFunction | None, inner: nn.Module | None, outer: nn.Module, scale: float = 1.0, multiple: float = 1.0
) -> list[Inexact]:
    """Set the gain of the last norm so that scale outer(inner(multiple x)) is the function of `source`.

    Without an outer norm it is scale inner(multiple x); the inner norm of two has unit gain. `source` is None where the
    sublayer has a norm of its own, after `inner`. Returns the differences but for rounding.
    """
    if source is None:
        only = getattr(inner, "eps", None)
        found = [Inexact.norm_of_norm(only, only)] if isinstance(inner, Norm) else []
        return found if multiple == 1.0 else [*found, Inexact.norm_of_multiple(multiple)]
    if not isinstance(outer, Norm):
        inner, outer = None, inner  # type: ignore[assignment]
    assert isinstance(outer, Norm)
    eps: float = getattr(outer, "eps", 0.0)
    inner_eps: float = getattr(inner, "eps", 0.0)
    if outer.eps_in_mean_square and source.eps is not None:
        effective = eps / multiple**2 if inner is None else inner_eps * eps / (1 + eps)
        if math.isclose(effective, source.eps, rel_tol=1e-9):
            gain_scale = scale if inner is None else scale / math.sqrt(1 + eps)
            return outer.copy_from(replace(source.divided(gain_scale, scale), eps=eps))
        if eps != source.eps:
            found = outer.copy_from(replace(source.divided(scale, scale), eps=eps))
            return found if outer.statistic != source.statistic else [*found, Inexact.eps(source.eps, effective)]
    found = outer.copy_from(source.divided(scale, scale))
    if inner is not None:
        found.append(Inexact.norm_of_norm(*((inner_eps, eps) if outer.eps_in_mean_square else (None, None))))
    if multiple != 1.0:
        found.append(Inexact.norm_of_multiple(multiple))
    return found


class NormConnection(Connection):
    """A connection whose `norm` is the only one before the sublayer.

    At the start the norm reads `multiple` times the stream of Pre-Norm.
    """

    norm: nn.Module
    multiple: float = 1.0

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Give the input norm the function of `norm`."""
        return copy_function(norm, None, self.norm, multiple=self.multiple)

    def eps_behind(self, norm: NormFunction) -> tuple[float, float] | None:
        """Return the eps and the factor of a norm of the multiple."""
        return eps_behind(norm, None, self.multiple)


class NormClosing(Closing):
    """A closing whose `norm` is the final one; `multiple` as in `NormConnection`."""

    norm: nn.Module
    multiple: float = 1.0

    def init_as_pre_norm(self, norm: NormFunction | None) -> list[Inexact]:
        """Give the final norm the function of `norm`."""
        return copy_function(norm, None, self.norm, multiple=self.multiple)

    def eps_behind(self, norm: NormFunction) -> tuple[float, float] | None:
        """Return the eps and the factor of a norm of the multiple."""
        return eps_behind(norm, None, self.multiple)
