"""One measured step of training: probes on the model, its gradients, and a copy of its weights for the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from siamesenorm.analysis.probes import Measurements, Probe, joint_norm

OTHER = "other"
"""Name of the trainable parameters outside the blocks."""


class WeightProbe:
    """Measures gradients and weights of every block before a step of the optimizer, and the update after it.

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
        """Measure the norm of the present gradients: after clipping, before the update."""
        for name, parameters in self._groups():
            norm = joint_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
            if norm is not None:
                into.add(("blocks", name, "gradient_norm"), norm)

    @torch.no_grad()
    def remember_weights(self) -> None:
        """Copy the trainable weights."""
        self._before = {name: [(p, p.detach().clone()) for p in parameters] for name, parameters in self._groups()}

    @torch.no_grad()
    def measure_updates(self, into: Measurements) -> None:
        """Measure ||w|| before the step and ||delta w||, where there is a copy, and drop it."""
        for name, pairs in self._before.items():
            weight = joint_norm([before for _, before in pairs])
            update = joint_norm([before.sub_(parameter) for parameter, before in pairs])
            if weight is not None and update is not None:
                into.add(("blocks", name, "weight_norm"), weight)
                into.add(("blocks", name, "update_norm"), update)
        self.forget_weights()

    def forget_weights(self) -> None:
        """Drop the copy."""
        self._before = {}

    def _groups(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """Yield the trainable parameters of every block, and the others; not cached, for sharding replaces them."""
        seen: set[nn.Parameter] = set()
        for name, module in (*self.blocks.items(), (OTHER, self.model)):
            parameters = [p for p in module.parameters() if p.requires_grad and p not in seen]
            seen.update(parameters)
            if parameters:
                yield name, parameters


class MeasuredStep:
    """Probes on a model from construction to `finish` or `abandon`; without `weights` only streams are measured."""

    def __init__(self, probes: tuple[Probe, ...], weights: WeightProbe | None, *, remember: bool) -> None:
        self.values = Measurements()
        self._weights, self._gradients_seen = weights, False
        self._probes = ExitStack()
        # Compiled code would skip the probes, or be compiled again for them.
        self._probes.enter_context(uncompiled())
        for probe in probes:
            self._probes.enter_context(probe.attached(self.values))
        if weights and remember:
            weights.remember_weights()

    def before_update(self, *, gradients_are_there: bool) -> None:
        """Measure gradients and copy weights before the first optimizer changes them."""
        if not self._weights or self._weights.remembers:
            return
        if gradients_are_there:
            self._weights.measure_gradients(self.values)
            self._gradients_seen = True
        self._weights.remember_weights()

    def finish(self) -> Measurements:
        """Remove the probes, after the step, and return what was measured."""
        with self._probes:
            if self._weights and not self._gradients_seen:
                self._weights.measure_gradients(self.values)
            if self._weights:
                self._weights.measure_updates(self.values)
        return self.values

    def abandon(self) -> None:
        """Remove the probes."""
        self._probes.close()
        if self._weights:
            self._weights.forget_weights()


_stances: list[AbstractContextManager[None]] = []
"""Restores the compiler; one entry while at least one context is open."""
_open = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code eagerly; the last of several contexts to end, in any order, restores the compiler."""
    global _open
    if _open == 0:
        _stances.append(torch.compiler.set_stance("force_eager"))
    _open += 1
    try:
        yield
    finally:
        _open -= 1
        if _open == 0:
            _stances.pop().__exit__(None, None, None)


Listener = Callable[[Optimizer, bool], None]
"""Takes an optimizer and whether its gradients are computed: one with a closure computes them in its step."""


def listen(optimizer: Optimizer, listener: Listener) -> RemovableHandle:
    """Call a method before every step of an optimizer, which keeps a weak reference only."""
    return optimizer.register_step_pre_hook(partial(_notify, WeakMethod(listener)))


def _notify(
    listener: WeakMethod[Listener], optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    listen = listener()
    if listen is not None:
        # Among the arguments is the optimizer itself.
        has_closure = any(callable(given) for given in (*arguments, *named.values()) if given is not optimizer)
        listen(optimizer, not has_closure)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of torch inside that of Accelerate or Lightning."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer
