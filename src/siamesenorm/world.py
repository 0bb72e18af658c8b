"""The processes that train one run: one, or those of `torchrun --nproc-per-node 2 -m siamesenorm train ...`.

Every process holds the whole model ("replicate", DistributedDataParallel) or a part of it ("shard", FSDP2), computes
its share of each batch, and averages gradients with the others. Process 0 writes the files of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from siamesenorm.errors import UserError

Parallelism = Literal["replicate", "shard"]
T = TypeVar("T")


_LEFT: list[Any] = []
"""Process groups that were left, kept as long as the process: DDP's reducer may hold one longer, and as its last owner
would wait for the group's thread without releasing the interpreter's lock, which that thread may wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Process `rank` of `size`, on `device`."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @classmethod
    @contextmanager
    def joined(cls, device: torch.device, *, even_alone: bool = False) -> Iterator[World]:
        """Join the processes that torchrun or Slurm started, until the context ends; one process without them.

        One process has a process group only if it needs one `even_alone`.

        A process group that exists is used, and left. A device "cuda" becomes that of the process's number on its
        machine.
        """
        launched = dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) > 1
        if not (launched or even_alone or dist.is_initialized()):
            yield cls(device=device)
            return
        if launched and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        joins = not dist.is_initialized()
        if joins:
            store = dist.HashStore()  # type: ignore[attr-defined]
            one: dict[str, Any] = {} if launched else {"store": store, "rank": 0, "world_size": 1}
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **one)
        try:
            yield cls(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
        finally:
            if joins:
                _LEFT.append(dist.group.WORLD)
                dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether the process writes the run's files."""
        return self.rank == 0

    def share_of(self, batch: int) -> int:
        """Return the samples of a batch for each process; raises UserError where it does not divide."""
        if batch % self.size:
            raise UserError(f"batch is {batch}: choose a multiple of the {self.size} processes")
        return batch // self.size

    def share_out(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Yield this process's items, equally many in each process, and whether they count.

        Where the items do not divide, processes repeat one that does not count: sharded models run together.
        """
        iterator = iter(items)
        while group := list(islice(iterator, self.size)):
            counts = self.rank < len(group)
            yield group[self.rank if counts else 0], counts

    def sum(self, *values: float) -> list[float]:
        """Return the sums of numbers over the processes, in double precision."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def largest(self, value: float) -> float:
        """Return the largest of the numbers of the processes."""
        if self.size == 1:
            return value
        largest = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values / self.size

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every process, in order."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found

    def on_first(self, function: Callable[[], T]) -> T:
        """Call a function in process 0 and return its result, or raise its UserError, in all."""
        if self.size == 1:
            return function()
        result: list[Any] = [None]
        if self.is_first:
            try:
                result[0] = function()
            except UserError as error:
                result[0] = error
        dist.broadcast_object_list(result, device=self.device)
        if isinstance(result[0], UserError):
            raise result[0]
        value: T = result[0]
        return value


ALONE = World()


def is_first_process() -> bool:
    """Whether this is the first of the processes of a run, which prints for all; true for one alone."""
    return os.environ.get("RANK", "0") == "0"


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; a GPU copies it from pinned memory while the host continues."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def whole(x: Tensor) -> Tensor:
    """Return a sharded tensor (DTensor) in one piece, in which every process takes part, and any other as it is."""
    complete: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return complete


def local(x: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor (DTensor), and any other as it is; gradients pass."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in one list for each mesh: torch's operations on lists refuse DTensors of several."""
    meshes: dict[Any, list[Tensor]] = {}
    for each in tensors:
        meshes.setdefault(getattr(each, "device_mesh", None), []).append(each)
    return list(meshes.values())


def norms_of(tensors: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return the Euclidean norm of each tensor of one mesh, computed in `dtype`; those of sharded ones are partial."""
    if not tensors:
        return torch.zeros(0)
    if hasattr(tensors[0], "full_tensor"):  # torch._foreach_norm refuses DTensors
        return torch.stack([torch.linalg.vector_norm(each, dtype=dtype) for each in tensors])
    return torch.stack(torch._foreach_norm(tensors, 2, dtype))


def shard_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Return this process's part of a whole tensor that every process has, if `like` is sharded; else the tensor."""
    if dist.is_available() and dist.is_initialized():
        # Imported here, where a DTensor can exist at all: the import costs more than that of the package.
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(like, DTensor):
            whole = tensor.to(device=like.device, dtype=like.dtype).expand(like.shape)
            return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return tensor
