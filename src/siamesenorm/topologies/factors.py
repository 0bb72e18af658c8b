"""Factors on a stream or on an output: constant, learned for each channel, or one learned number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from siamesenorm.norms import Declared
from siamesenorm.norms.declared import assign
from siamesenorm.topologies.topology import ResidualSpec


class Scaled(Declared):
    """A module followed by a constant factor."""

    factor: Tensor

    def __init__(self, module: nn.Module, factor: float) -> None:
        super().__init__()
        self.module = module
        self.constant("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        """Return factor * module(x)."""
        scaled: Tensor = self.module(x) * self.factor
        return scaled


class Gate(Declared):
    """A learned factor per channel, gamma x, without weight decay."""

    gain: Tensor

    def __init__(self, spec: ResidualSpec, *, initial: float = 1.0) -> None:
        super().__init__()
        self.axis = spec.axis
        self.declare("gain", (spec.dim,), initial=initial)

    def forward(self, x: Tensor) -> Tensor:
        """Return gamma x."""
        return (x.movedim(self.axis, -1) * self.gain.to(x.dtype)).movedim(-1, self.axis)

    def zero_(self) -> None:
        """Set gamma to 0."""
        assign(self.gain, torch.zeros_like(self.gain))


class ScalarGate(Declared):
    """One learned number, alpha x, without weight decay; its shape is [1], for FSDP shards no 0-d parameters."""

    gain: Tensor

    def __init__(self, *, initial: float) -> None:
        super().__init__()
        self.declare("gain", (1,), initial=initial)

    def forward(self, x: Tensor) -> Tensor:
        """Return alpha x."""
        return x * self.gain.to(x.dtype)
