"""What autograd keeps for the backward pass, counted by its own hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """One piece of memory that is kept: its bytes, and the dtype of the tensor that was saved in it."""

    bytes: int
    dtype: torch.dtype


def kept_for_backward(function: Callable[[], object], *, besides: Iterable[Tensor] = ()) -> list[Kept]:
    """Run `function` and return the pieces of memory that its graph keeps, each once.

    What `besides` holds (parameters, the input that a sublayer keeps anyway) is not counted. A tensor that autograd
    saves twice, or under several views, is one piece.
    """
    known = {_address(tensor) for tensor in besides}
    found: dict[int, Kept] = {}
    alive: list[Tensor] = []  # a freed tensor's address would be taken by the next one

    def keep(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        address = _address(tensor)
        if address not in known and tensor.numel():
            found[address] = Kept(tensor.untyped_storage().nbytes(), tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    del result
    return list(found.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
