"""Numbers measured on a model's devices, and fetched together: one synchronisation for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Key = tuple[str, ...]
"""What was measured: its last part names the quantity."""


class Measurements:
    """Scalars by key, left on their devices until `fetch`; a key measured several times has several values."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._values: dict[Key, list[Tensor]] = {}

    def add(self, key: Key, value: Tensor) -> None:
        """Keep a tensor of one element."""
        self._values.setdefault(key, []).append(value.detach())

    def fetch(self) -> dict[Key, float]:
        """Return every key's value: the largest of several "max", the mean of several others."""
        numbers = iter(fetch([value for values in self._values.values() for value in values]))
        return {key: _together(key, [next(numbers) for _ in values]) for key, values in self._values.items()}


def fetch(values: Sequence[Tensor]) -> list[float]:
    """Return the numbers in tensors of one element, wherever they are, at the price of one synchronisation."""
    if not values:
        return []
    device = next((value.device for value in values if value.device.type != "cpu"), values[0].device)
    # torch.cat promotes the dtypes: what is in fp64 stays exact, and devices without fp64 need none.
    numbers: list[float] = torch.cat([whole(value).reshape(1).to(device) for value in values]).tolist()
    return numbers


def _together(key: Key, values: list[float]) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    return max(values) if key[-1] == "max" else sum(values) / len(values)


def mean_rms(x: Tensor) -> Tensor:
    """Return the mean over tokens of sqrt(mean_d x^2), for x [..., dim]; at least in fp32."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x))
    return norms.mean() / math.sqrt(x.shape[-1])


def largest(x: Tensor) -> Tensor:
    """Return max |x|."""
    norm: Tensor = torch.linalg.vector_norm(x, ord=math.inf)
    return norm


def joint_norm(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the Euclidean norm of all tensors as one vector, at least in fp32; None without tensors.

    Of sharded tensors it is the norm of the whole, for which all processes must ask together.
    """
    # One by one made whole: norms of tensors on different meshes cannot be stacked.
    norms = [whole(torch.linalg.vector_norm(tensor, dtype=wide(tensor))) for tensor in tensors]
    if not norms:
        return None
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def whole(x: Tensor) -> Tensor:
    """Return a sharded tensor in one piece."""
    complete: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return complete


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype to measure x in."""
    return torch.promote_types(x.dtype, torch.float32)
