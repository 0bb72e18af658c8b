"""Start a topology where it computes a Pre-Norm model: what connections and closings share for it, and what differs."""

from __future__ import annotations

from torch import nn

from siamesenorm.norms import Norm, NormFunction
from siamesenorm.topologies.factors import Gate

EPS_TWICE = "normalised twice: a relative difference of about eps / (2 mean square) of the token"
"""What the composition of two norms of the same kind differs from one by."""
SCALED = "the norm sees a multiple of the stream: a relative difference of less than eps / (2 mean square) of the token"
"""What a scale-invariant norm of c x differs by from that of x."""


def copy_gain(norm: NormFunction | None, outer: nn.Module, inner: nn.Module | None = None) -> list[str]:
    """Give a Pre-Norm's gain to the last norm before the sublayer; return what differs.

    `outer` is that norm, the identity where the sublayer has its own; `inner`, which stays at unit gain, one before it.
    """
    twice = [EPS_TWICE] if inner is not None else []
    if norm is None:
        return twice
    assert isinstance(outer, Norm)
    return [*outer.adopt(norm), *twice]


def zero_gain(part: nn.Module) -> None:
    """Set a norm or a gate to where it returns 0 for every input; the identity is left alone."""
    if isinstance(part, (Norm, Gate)):
        part.zero_()
