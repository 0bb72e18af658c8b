"""How the processes of a run share its model: replicas (DDP), shards of blocks (FSDP2), both (HSDP), experts.

Gradients are means over processes. A sharded model is made on the meta device, and each process draws its own parts of
the weights, from the generators of the whole: they do not depend on the number of processes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.sublayers.moe import ExpertProjection, Experts, MixtureOfExperts
from siamesenorm.training.execution import blocks_of
from siamesenorm.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

    from siamesenorm.training.config import Execution, RunConfig


def share_batch(model: nn.Module, config: RunConfig, world: World) -> tuple[int, int]:
    """Return each process's share of a batch, and the samples that it reads at once.

    Raises UserError unless the processes can share model and batch, and compute what one process would.
    """
    _require_layout(model, config.execution, world)
    share = world.share_of(config.batch)
    at_once = min(config.samples_at_once, share)
    if share % at_once:
        raise UserError(f"micro_batch is {at_once}: choose a divisor of {share}, each process's share of the batch")
    coupled = any(getattr(module, "couples_samples", False) for module in model.modules())
    if coupled and at_once != config.samples_at_once:
        raise UserError(
            f"micro_batch is {config.samples_at_once}: the losses of experts are those of samples that are read "
            f"together, and {world.size} processes read {share} each: choose a divisor of {share}"
        )
    return share, at_once


def shards_of(config: RunConfig, world: World) -> int:
    """Return the number of processes that hold one copy of the model together."""
    if world.size == 1 or config.execution.parallel == "replicate":
        return 1
    return config.execution.shards or world.size


def _require_layout(model: nn.Module, execution: Execution, world: World) -> None:
    """Raise UserError unless the processes can share a model in this way; one process can always hold it."""
    shards, among = execution.shards or world.size, execution.expert_shards
    if world.size == 1 or execution.parallel == "replicate":
        return
    for name, number in (("shards", shards), ("expert_shards", among)):
        if world.size % number:
            raise UserError(f"{name} is {number}: choose a divisor of the {world.size} processes")
    if among == 1:
        return
    if shards not in (among, world.size):
        raise UserError(f"shards is {shards} with expert_shards {among}: choose {among}, or 0 for all processes")
    stacks = [module for module in model.modules() if isinstance(module, ExpertProjection)]
    if not stacks or any(stack.shape.experts % among for stack in stacks):
        experts = stacks[0].shape.experts if stacks else "none"
        raise UserError(f"expert_shards is {among}: choose a divisor of the model's experts ({experts})")
    if odd := [size for stack in stacks for size in stack.weight.shape[1:2] if size % (world.size // among)]:
        raise UserError(
            f"expert_shards is {among}: {world.size // among} processes would share each expert, whose width {odd[0]} "
            "they do not divide: choose more expert_shards"
        )


def parallelise(model: nn.Module, config: RunConfig, world: World) -> nn.Module:
    """Return the module whose backward pass averages gradients over processes: the model itself, or one around it.

    "replicate" keeps the whole model in each process, "shard" a part of every block. A sharded model, which
    `RunConfig.is_sharded` says, is expected on the meta device, and its weights are drawn here. See `share_batch`
    for what is refused.
    """
    execution = config.execution
    if not config.is_sharded(world.size):
        if world.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # `cast_forward_inputs` would cast the streams too, and overrule the model's `residual_dtype`.
    rounded = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = rounded if config.bf16_parameters else None
    kind, among = world.device.type, execution.expert_shards if world.size > 1 else 1
    if among > 1:
        grid = init_device_mesh(kind, (world.size // among, among), mesh_dim_names=("data", "expert"))
        grid._flatten()  # norms are then summed over both dimensions at once
        share_experts(model, grid, mixed_precision=policy)
    shards = shards_of(config, world)
    sizes = (world.size // shards, shards) if shards < world.size else (world.size,)
    names = ("replicate", "shard")[-len(sizes) :]
    shard(model, init_device_mesh(kind, sizes, mesh_dim_names=names), mixed_precision=policy)
    model.to_empty(device=world.device)
    model.reset_parameters(config.seed)  # type: ignore[operator]
    return model


def shard(
    model: nn.Module, mesh: DeviceMesh | None = None, *, mixed_precision: MixedPrecisionPolicy | None = None
) -> None:
    """Shard parameters, gradients and optimizer state over the processes of `mesh`, block by block (FSDP2).

    A mesh of two dimensions replicates over the first and shards over the second (HSDP). Give `mixed_precision`
    `cast_forward_inputs=False`, or FSDP casts the streams too, and overrules the model's `residual_dtype`. Make the
    optimizer afterwards.
    """
    # Imported here: the import costs a second, which every command would pay.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shard_module = partial(fully_shard, mesh=mesh, mp_policy=mixed_precision or MixedPrecisionPolicy())
    for block in blocks_of(model):
        shard_module(block)
    shard_module(model)


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Set whether the next backward pass averages gradients over processes: the last of an accumulation does."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = wanted
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDPModule, whose import costs a second
        model.set_requires_gradient_sync(wanted)  # type: ignore[operator]


# --- experts


def share_experts(model: nn.Module, grid: DeviceMesh, *, mixed_precision: MixedPrecisionPolicy | None = None) -> None:
    """Divide the experts of every mixture over the second dimension of `grid`, and each expert over the first.

    Every process keeps tokens of its own: it sends each to the process of its expert, and gets the output back.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    policy = mixed_precision or MixedPrecisionPolicy()
    for mixture in (module for module in model.modules() if isinstance(module, MixtureOfExperts)):
        projections: list[nn.Module] = [mixture.up, mixture.gate, mixture.output]
        for projection in projections:
            parallelize_module(projection, grid["expert"], _expert_plan())
        fully_shard(projections, mesh=grid["data"], shard_placement_fn=lambda _: Shard(1), mp_policy=policy)
        mixture.exchange = partial(exchange, group=grid["expert"].get_group())


def _expert_plan() -> ParallelStyle:
    """Return the plan that gives each process whole experts."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle

    class WholeExperts(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return distribute_module(module, device_mesh, self.divide)

        @staticmethod
        def divide(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(module.get_parameter("weight"), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(weight))

    return WholeExperts()


def exchange(experts: Experts, rows: Tensor, offsets: Tensor, *, group: ProcessGroup) -> Tensor:
    """Return what `experts` of all processes of a group make of rows [rows, dim] that are sorted by expert.

    `offsets` [experts] (int32) are the ends of the experts' rows. `experts` computes those of this process.
    """
    from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

    processes = group.size()
    sent = offsets.diff(prepend=offsets.new_zeros(1)).view(processes, -1)
    arriving = all_to_all_single(sent, None, None, group).view_as(sent)  # [sender, expert of this process]
    to, back = sent.sum(dim=1).tolist(), arriving.sum(dim=1).tolist()
    arrived = all_to_all_single_autograd(rows, back, to, group)
    # Gradients of experts are sums over the processes of the group, and become means here; those of rows stay.
    if arrived.requires_grad:
        arrived.register_hook(lambda gradient: gradient * processes)  # type: ignore[no-untyped-call]
    numbers = torch.arange(arriving.numel(), device=rows.device) % arriving.shape[1]
    order = numbers.repeat_interleave(arriving.flatten()).argsort(stable=True)
    ends = arriving.sum(dim=0).cumsum(dim=0).to(offsets.dtype)
    outputs = experts(arrived.index_select(0, order), ends).index_select(0, order.argsort())
    if outputs.requires_grad:
        outputs.register_hook(lambda gradient: gradient / processes)  # type: ignore[no-untyped-call]
    result: Tensor = all_to_all_single_autograd(outputs, to, back, group)
    return result
