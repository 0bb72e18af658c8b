"""Gradients and updates, block by block: how long the gradient is, and how far a step moves the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from siamesenorm.analysis.measurements import Measurements, joint_norm

REST = "other"
"""The name of the trainable parameters outside the blocks."""


class WeightProbe:
    """Measures gradients and weights before a step of the optimizer, and the update after it.

    In between it holds a copy of the trainable weights.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self.model, self.blocks = model, blocks
        self._before: dict[str, list[tuple[Tensor, Tensor]]] = {}

    @property
    def remembers(self) -> bool:
        """Whether there is a copy of the weights."""
        return bool(self._before)

    def measure_gradients(self, into: Measurements) -> None:
        """Measure the norm of the gradients that are there, as they are: after clipping, before the update."""
        for name, parameters in self._groups():
            norm = joint_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
            if norm is not None:
                into.add(("block", name, "gradient_norm"), norm)

    @torch.no_grad()
    def remember_weights(self) -> None:
        """Copy the trainable weights."""
        self._before = {name: [(p, p.detach().clone()) for p in parameters] for name, parameters in self._groups()}

    @torch.no_grad()
    def measure_updates(self, into: Measurements) -> None:
        """Measure ||w|| before the step and ||delta w||, where the weights were remembered, and forget them."""
        for name, pairs in self._before.items():
            weight = joint_norm([before for _, before in pairs])
            update = joint_norm([before.sub_(parameter) for parameter, before in pairs])
            if weight is not None and update is not None:
                into.add(("block", name, "weight_norm"), weight)
                into.add(("block", name, "update_norm"), update)
        self.forget_weights()

    def forget_weights(self) -> None:
        """Let the copy go."""
        self._before = {}

    def _groups(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """Yield the trainable parameters of every block, and the rest; looked up anew, for sharding replaces them."""
        seen: set[nn.Parameter] = set()
        for name, module in (*self.blocks.items(), (REST, self.model)):
            parameters = [p for p in module.parameters() if p.requires_grad and p not in seen]
            seen.update(parameters)
            if parameters:
                yield name, parameters
