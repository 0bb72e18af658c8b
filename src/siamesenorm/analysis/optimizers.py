"""Hear from an optimizer before it steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Listener = Callable[[Optimizer, bool], None]
"""Told of an optimizer and whether its gradients are there: one with a closure gets them during its step."""


def listen(optimizer: Optimizer, listener: Listener) -> RemovableHandle:
    """Call a method before every step, as long as its object lives: an optimizer keeps nothing alive."""
    return optimizer.register_step_pre_hook(partial(_tell, WeakMethod(listener)))


def _tell(
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
