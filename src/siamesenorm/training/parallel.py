"""Sharding, compilation and activation checkpointing by block, for any model that has `.blocks`.

None of the three touches the model's code, its parameters' names or its state dict. Checkpoint first, compile second,
shard last: a compiled block then holds its own recomputation, and sharding gathers a block's weights around both. A
block's connections are inside it, so that norms and gates travel with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class HasBlocks(Protocol):
    """A model whose blocks are applied one after the other."""

    blocks: nn.ModuleList


def checkpoint_blocks(model: HasBlocks) -> None:
    """Keep only the streams between blocks for the backward pass, which computes every block again."""
    for block in model.blocks:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # A function of this file: the compiler does not enter torch's own, such as a partial of `checkpoint`.
    def recomputed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False)

    return recomputed


def compile_blocks(model: HasBlocks, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile every block as one graph of static shapes; blocks of one kind share it."""
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=backend)


def shard(
    model: nn.Module, mesh: DeviceMesh | None = None, *, mixed_precision: MixedPrecisionPolicy | None = None
) -> None:
    """Shard parameters, gradients and optimizer state over the processes of `mesh`, by block (FSDP2).

    A mesh of two dimensions replicates over the first and shards over the second. With `mixed_precision`, set its
    `cast_forward_inputs` to False: streams keep the model's `residual_dtype`. The optimizer is made after this.
    """
    fully_shard_in_place = partial(fully_shard, mesh=mesh, mp_policy=mixed_precision or MixedPrecisionPolicy())
    for block in model.blocks:
        fully_shard_in_place(block)
    fully_shard_in_place(model)
