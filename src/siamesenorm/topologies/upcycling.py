"""Start a topology where it computes a Pre-Norm model: what connections and closings share for it, and what differs."""

from __future__ import annotations

from torch import nn

from siamesenorm.norms import Inexact, Norm, NormFunction
from siamesenorm.topologies.factors import Gate


def copy_gain(norm: NormFunction | None, outer: nn.Module, inner: nn.Module | None = None) -> list[Inexact]:
    """Give a Pre-Norm's gain to the last norm before the sublayer; return what differs.

    `outer` is that norm, the identity where the sublayer has its own; `inner`, which stays at unit gain, one before it.
    """
    twice = [] if inner is None else [Inexact.norm_of_norm(getattr(inner, "eps", None), getattr(outer, "eps", None))]
    if norm is None:
        return twice
    assert isinstance(outer, Norm)
    return [*outer.copy_from(norm), *twice]


def zero_gain(part: nn.Module) -> None:
    """Set a norm or a gate to where it returns 0 for every input; the identity is left alone."""
    if isinstance(part, (Norm, Gate)):
        part.zero_()
