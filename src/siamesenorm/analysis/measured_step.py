"""One measured step of training: streams, gradients, and the update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from siamesenorm.analysis.measurements import Measurements, joint_norm
from siamesenorm.analysis.probes import ProbePlan

OTHER = "other"
"""Name of the trainable parameters outside the blocks."""


class MeasuredStep:
    """Measures one step of a model from construction to `finish` or `abandon`: its streams, gradients and updates.

    Without `updates` only streams are measured. Between the gradients and the update there is a copy of the trainable
    weights; with `remember` it is made at once.
    """

    def __init__(self, model: nn.Module, plan: ProbePlan, *, updates: bool, remember: bool) -> None:
        self.values = Measurements()
        self._model, self._blocks, self._updates, self._gradients_seen = model, plan.blocks, updates, False
        self._before: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._probes = ExitStack()
        if not plan.is_compiled:
            # Compiled code would skip the probes, or be compiled again for them.
            self._probes.enter_context(uncompiled())
        for probe in plan.probes:
            self._probes.enter_context(probe.attached(self.values))
        if updates and remember:
            self._copy_weights()

    def before_update(self, *, gradients_are_there: bool) -> None:
        """Measure gradients and copy weights before the first optimizer changes them."""
        if self._updates and not self._before:
            if gradients_are_there:
                self._measure_gradients()
            self._copy_weights()

    def finish(self) -> Measurements:
        """Remove the probes, after the step, and return what was measured."""
        with self._probes:
            if self._updates and not self._gradients_seen:
                self._measure_gradients()
            self._measure_updates()
        return self.values

    def abandon(self) -> None:
        """Remove the probes, and the copy of the weights."""
        self._probes.close()
        self._before = {}

    def _measure_gradients(self) -> None:
        """Measure the norm of the present gradients: after clipping, before the update."""
        self._gradients_seen = True
        for name, parameters in self._groups():
            norm = joint_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
            if norm is not None:
                self.values.add(("blocks", name, "gradient_norm"), norm)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        self._before = {name: [(p, p.detach().clone()) for p in parameters] for name, parameters in self._groups()}

    @torch.no_grad()
    def _measure_updates(self) -> None:
        """Measure ||w|| before the step and ||delta w||, where there is a copy, and drop it."""
        for name, pairs in self._before.items():
            weight = joint_norm([before for _, before in pairs])
            update = joint_norm([before.sub_(parameter) for parameter, before in pairs])
            if weight is not None and update is not None:
                self.values.add(("blocks", name, "weight_norm"), weight)
                self.values.add(("blocks", name, "update_norm"), update)
        self._before = {}

    def _groups(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """Yield the trainable parameters of every block, and the others; not cached, for sharding replaces them."""
        seen: set[nn.Parameter] = set()
        for name, module in (*self._blocks.items(), (OTHER, self._model)):
            parameters = [p for p in module.parameters() if p.requires_grad and p not in seen]
            seen.update(parameters)
            if parameters:
                yield name, parameters


_stance = ExitStack()
"""Restores the compiler when it is closed."""
_open = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code eagerly; the last of several contexts to end, in any order, restores the compiler."""
    global _open
    if _open == 0:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    _open += 1
    try:
        yield
    finally:
        _open -= 1
        if _open == 0:
            _stance.close()


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
