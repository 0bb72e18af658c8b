"""Sharding, compilation and activation checkpointing by block, for any model that has `.blocks`.

None of the three touches the model's code, the names of its parameters or its state dict. In this order: checkpoint,
compile, shard. A compiled block then holds its own recomputation, and sharding gathers a block's weights around both.
A block's connections are inside it, so norms and gates travel with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep only the streams between blocks for the backward pass, which computes each block again."""
    for block in _blocks(model):
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # A function of this file: the compiler does not enter torch's own, such as a partial of `checkpoint`.
    def recomputed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False)

    return recomputed


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each block as one graph of static shapes, which blocks of one kind share.

    A compiled model equals a compiled model bit for bit, not an eager one: resume a run as it was started.
    """
    for block in _blocks(model):
        block.compile(fullgraph=True, dynamic=False, backend=backend)


def shard(
    model: nn.Module, mesh: DeviceMesh | None = None, *, mixed_precision: MixedPrecisionPolicy | None = None
) -> None:
    """Shard parameters, gradients and optimizer state over the processes of `mesh`, block by block (FSDP2).

    A mesh of two dimensions replicates over the first and shards over the second. Give `mixed_precision`
    `cast_forward_inputs=False`, or FSDP casts the streams too, and overrules the model's `residual_dtype`. Make the
    optimizer afterwards. Weights are drawn before, by name: they do not depend on the number of processes.
    """
    shard_module = partial(fully_shard, mesh=mesh, mp_policy=mixed_precision or MixedPrecisionPolicy())
    for block in _blocks(model):
        shard_module(block)
    shard_module(model)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    return model.get_submodule("blocks").children()
