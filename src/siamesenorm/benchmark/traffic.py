"""The bytes that a boundary must move at least, counted on the tensors themselves: each is read or written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def traffic_of(
    forward: Callable[[], tuple[Tensor, ...]], rows: Sequence[Tensor], *, besides: Iterable[Tensor] = ()
) -> tuple[int, int]:
    """Return the bytes of a forward pass over `rows` and of its backward pass, without parameters (`besides`).

    Forward: the rows, the results, and what is kept for the backward pass and is neither. Backward: the gradients of
    the results, what was kept, and the gradients of the rows. Tensors that share their memory count once.
    """
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = forward()
    gradients = [torch.randn_like(result) for result in results]
    of_rows = torch.autograd.grad(results, rows, gradients, allow_unused=True)
    known = list(besides)
    return _bytes([*rows, *results, *kept], known), _bytes(
        [*gradients, *kept, *(x for x in of_rows if x is not None)], known
    )


def _bytes(tensors: Iterable[Tensor], besides: Iterable[Tensor]) -> int:
    """Return the bytes of the memory of `tensors` that is not that of `besides`."""
    pieces = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}
    known = {x.untyped_storage().data_ptr() for x in besides}
    return sum(size for address, size in pieces.items() if address not in known)
