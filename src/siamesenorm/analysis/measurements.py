"""Numbers that are measured in a step: kept on their devices, and fetched together; norms of many tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from siamesenorm.world import ALONE, World, by_mesh, norms_of, whole

Key = tuple[str, ...]
"""The path of a quantity in the line of a measured step."""


class Measurements:
    """Scalars by key, left on their devices until `fetch`; a key may have several values."""

    def __init__(self) -> None:
        self._values: dict[Key, list[Tensor]] = {}
        self._weights: dict[Key, list[float]] = {}

    def add(self, key: Key, value: Tensor, weight: float = 1.0) -> None:
        """Add a tensor of one element; `weight` is the number of tokens, or samples, that it is a mean over."""
        self._values.setdefault(key, []).append(value.detach())
        self._weights.setdefault(key, []).append(weight)

    def add_rms(self, key: Key, x: Tensor) -> None:
        """Add the RMS of x [..., dim], averaged over tokens."""
        self.add(key, mean_rms(x), tokens_of(x))

    def add_stream(self, key: Key, x: Tensor) -> None:
        """Add the magnitude of a stream [..., dim]: its RMS, averaged over tokens, and its largest entry."""
        self.add_rms((*key, "rms"), x)
        self.add((*key, "max"), torch.linalg.vector_norm(x, ord=math.inf))

    def fetch(self, world: World = ALONE) -> dict[Key, float]:
        """Return every key's value: the largest of several "max", the weighted mean of several others.

        All numbers are fetched together, with one synchronisation of their devices. Those of the processes of `world`
        count as several values of one key.
        """
        values = [value for several in self._values.values() for value in several]
        if not values:
            return {}
        device = next((value.device for value in values if value.device.type != "cpu"), values[0].device)
        # torch.cat promotes the dtypes: what is in fp64 stays exact, and devices without fp64 need none.
        numbers = torch.cat([whole(value).reshape(1).to(device) for value in values]).tolist()
        several = zip(*world.gather(numbers), strict=True)
        return {
            key: _together(key, [one for _ in each for one in next(several)], self._weights[key], world.size)
            for key, each in self._values.items()
        }


def _together(key: Key, values: list[float], weights: list[float], processes: int) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    if key[-1] == "max":
        return max(values)
    parts = [
        weight / weights[0] for weight in weights for _ in range(processes)
    ]  # exactly 1 for equal weights: then this is the plain mean
    return sum(value * part for value, part in zip(values, parts, strict=True)) / sum(parts)


def tokens_of(x: Tensor) -> int:
    """Return the number of tokens of x [..., dim]."""
    return x.numel() // max(1, x.shape[-1])


def mean_rms(x: Tensor) -> Tensor:
    """Return the mean over tokens of sqrt(mean_d x^2), for x [..., dim]; at least in fp32."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x))
    return norms.mean() / math.sqrt(x.shape[-1])


def joint_norm(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the Euclidean norm of all tensors as one vector, at least in fp32; None without tensors.

    Of sharded tensors it is the norm of the whole: all processes must call this together.
    """
    # In lists of one mesh, device and dtype, which torch takes as a whole: one exchange for each.
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    parts = [part for alike in lists.values() for part in by_mesh(alike)]
    norms = [whole(torch.linalg.vector_norm(norms_of(part, wide(part[0])))) for part in parts]
    if not norms:
        return None
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype to measure x in."""
    return torch.promote_types(x.dtype, torch.float32)
