"""A few optimizer steps of a tiny language model, in one process or as one of several that share it by FSDP2.

`test_parallel` takes the losses of one process, and `parallel_training` those of several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from siamesenorm import LanguageModel, build_language_model
from siamesenorm.training.execution import checkpoint_blocks, compile_blocks
from siamesenorm.training.parallel import shard, synchronise_gradients

STEPS, BATCH, TOKENS, VOCABULARY = 10, 4, 16, 31
DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained: the dtype of parameters in the forward pass may differ from that of the streams."""

    topology: str
    residual_dtype: str
    parameters_in_bf16: bool = False
    compiled: bool = True


CASES = {
    "pre, bf16 streams": Case(topology="pre", residual_dtype="bfloat16", compiled=False),
    "siamese, fp32 streams": Case(topology="siamese", residual_dtype="float32"),
    "siamese, fp32 streams under bf16 parameters": Case(
        topology="siamese", residual_dtype="float32", parameters_in_bf16=True, compiled=False
    ),
}


def build(case: Case) -> LanguageModel:
    """Return the model of a case; the same in every process."""
    return build_language_model(
        "nano",
        topology=case.topology,
        depth=DEPTH,
        dim=32,
        heads=2,
        hidden=64,
        vocabulary=VOCABULARY,
        residual_dtype=case.residual_dtype,
        compute_dtype="bfloat16" if case.parameters_in_bf16 else "float32",
    )


def batches() -> Tensor:
    """Return tokens [steps, batch, tokens + 1]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (STEPS, BATCH, TOKENS + 1), generator=generator)


def loss_of(model: nn.Module, batch: Tensor, **parameters: Tensor) -> Tensor:
    """Return the mean loss of a batch, with the model's parameters or those given."""
    logits = functional_call(model, parameters, batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train_alone(case: Case) -> list[float]:
    """Return the losses of one process, neither compiled nor checkpointed."""
    model, losses = build(case), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches():
        cast = {name: p.bfloat16() for name, p in model.named_parameters()} if case.parameters_in_bf16 else {}
        loss = loss_of(model, batch, **cast)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_together(case: Case) -> dict[str, Any]:
    """Return what this process saw: losses averaged over processes, graphs, and how the model was shared."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(case)
    names = [name for name, _ in model.named_parameters()]
    checkpoint_blocks(model)
    if case.compiled:
        compile_blocks(model, backend="aot_eager")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard(
        model,
        init_device_mesh("cpu", (dist.get_world_size(),)),
        mixed_precision=policy if case.parameters_in_bf16 else None,
    )
    seen: set[torch.dtype] = set()
    model.closing.register_forward_pre_hook(lambda _, inputs: seen.update(stream.dtype for stream in inputs[0]))
    losses = _train(model)
    return {
        "losses": losses,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "stream_dtypes": sorted(str(dtype) for dtype in seen),
        "same_names": names == [name for name, _ in model.named_parameters()],
        "blocks_shared": all(isinstance(block, FSDPModule) for block in model.blocks),
        "parameters_sharded": all(
            isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters()
        ),
    }


class Reductions(TorchDispatchMode):
    """Counts how often tensors are reduced over processes."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.namespace == "c10d" and "reduce" in function.__name__
        return function(*args, **kwargs or {})


def count_reductions() -> list[int]:
    """Return how often gradients are reduced in a micro-batch that is not the last, and in the last."""
    model = build(CASES["siamese, fp32 streams"])
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    counts = []
    for last in (False, True):
        synchronise_gradients(model, last)
        loss = loss_of(model, batches()[0])
        with Reductions() as mode:
            loss.backward()
        counts.append(mode.count)
    return counts


def _train(model: nn.Module) -> list[float]:
    rank, world, losses = dist.get_rank(), dist.get_world_size(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches():
        loss = F.cross_entropy(
            model(batch.chunk(world)[rank][:, :-1]).logits.flatten(0, 1), batch.chunk(world)[rank][:, 1:].flatten()
        )
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses
