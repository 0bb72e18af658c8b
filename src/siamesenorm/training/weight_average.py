"""The exponential moving average of a model's trained weights, which is evaluated and kept beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    r"""The average \(a \leftarrow d a + (1 - d) w\) of every trained parameter w, in its dtype and sharded as it is.

    It starts as the weights are when it is made.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights."""
        torch._foreach_lerp_(list(self.averages.values()), list(self.parameters.values()), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages in the place of the weights until the context ends."""
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._assign(self.averages)
        try:
            yield
        finally:
            self._assign(weights)

    @torch.no_grad()
    def _assign(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])
