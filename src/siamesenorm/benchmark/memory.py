"""The memory of a training step of a language model, counted without allocating it: `siamesenorm sizes --memory`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from siamesenorm.benchmark.measurement import pieces
from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModel, LanguageModelConfig
from siamesenorm.sublayers.moe import ExpertProjection
from siamesenorm.training.config import Precision, Recomputation
from siamesenorm.training.execution import PRODUCTS, blocks_of

WIDTH = 4
"""Bytes of a weight, of its gradient and of each of AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """How a step is taken by `processes`, each of which reads `samples` at once.

    The other fields are those of `RunConfig` and `Execution`.
    """

    samples: int = 1
    """Samples that go through the model at once in a process."""
    precision: Precision = "float32"
    """Precision of the sublayers."""
    bf16_parameters: bool = False
    """Round parameters to bfloat16 for forward and backward passes."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass."""
    recomputation: Recomputation = "full"
    """What checkpointed blocks compute again."""
    processes: int = 1
    """Processes in all."""
    shards: int = 1
    """Processes that share one copy of weights, gradients and optimizer state."""
    expert_shards: int = 1
    """Processes that divide the experts of each mixture."""

    def __post_init__(self) -> None:
        for name in ("samples", "processes", "shards", "expert_shards"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: choose at least 1")
        for name in ("shards", "expert_shards"):
            if self.processes % getattr(self, name):
                raise UserError(f"{name} is {getattr(self, name)}: choose a divisor of the {self.processes} processes")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process: what it holds, what it gathers of others, and what autograd keeps.

    `gathered` are whole weights and gradients: of two blocks and one, and of what is outside blocks. `kept` is held at
    the end of the forward pass; `recomputed` is what a checkpointed block keeps while its gradients are computed.
    Temporary results are not counted.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    kept: int
    recomputed: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(dataclasses.astuple(self))


def memory_of(config: LanguageModelConfig, layout: StepLayout) -> Memory:
    """Return the memory of a step with AdamW in fp32, in eager PyTorch; a compiled step keeps less."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = LanguageModel(config)
        held, gathered = _weights(model, layout)
        if layout.bf16_parameters:
            _round(model)
        trace = _Trace(model)
        tokens = torch.zeros(layout.samples, config.context + 1, dtype=torch.int64)
        with trace, trace.hooks:
            loss_of(model, tokens, layout.precision)
        kept, recomputed = trace.kept(layout)
    return Memory(
        parameters=held, gradients=held, optimizer=2 * held, gathered=gathered, kept=kept, recomputed=recomputed
    )


def _round(model: nn.Module) -> None:
    """Replace the parameters by those in bf16: fake ones cannot be converted in place."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module._parameters[name] = nn.Parameter(parameter.detach().bfloat16())


def loss_of(model: nn.Module, tokens: Tensor, precision: Precision) -> Tensor:
    """Return the objective of a step on tokens [samples, context + 1]."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits, losses = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / tokens.numel()
    return sum((0.01 * each for each in losses.values()), start=loss)


def _weights(model: nn.Module, layout: StepLayout) -> tuple[int, int]:
    """Return the bytes of the weights that a process holds, and of what it gathers of others."""
    among = layout.processes if layout.expert_shards > 1 else layout.shards

    def count(module: nn.Module, dense: int, experts: int) -> int:
        stacks = [each for each in module.modules() if isinstance(each, ExpertProjection)]
        divided = sum(parameter.numel() for stack in stacks for parameter in stack.parameters())
        return (sum(parameter.numel() for parameter in module.parameters()) - divided) // dense + divided // experts

    held = WIDTH * count(model, layout.shards, among)
    if max(layout.shards, among) == 1 and not layout.bf16_parameters:
        return held, 0
    whole = [count(block, 1, layout.expert_shards) for block in blocks_of(model)]
    outside = count(model, 1, layout.expert_shards) - sum(whole)
    width = 2 if layout.bf16_parameters else WIDTH
    return held, width * (2 * outside + 3 * max(whole))


class _Trace(TorchDispatchMode):
    """Records what a forward pass keeps: by block, inputs of blocks, and results of matrix products in blocks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters = list(model.parameters())
        self.block: nn.Module | None = None
        self.saved: dict[nn.Module | None, list[Tensor]] = {None: []}
        self.inputs: list[Tensor] = []
        self.products: list[Tensor] = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x)
        for block in blocks_of(model):
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave)

    def kept(self, layout: StepLayout) -> tuple[int, int]:
        """Return the bytes that are kept at the end of the forward pass, and those of a block that is recomputed."""
        everything = [x for tensors in self.saved.values() for x in tensors]
        if not layout.checkpoint_activations:
            return sum(pieces(everything, besides=self.parameters)), 0
        kept = [*self.saved[None], *self.inputs]
        if layout.recomputation == "selective":
            kept += self.products
        blocks = (tensors for block, tensors in self.saved.items() if block)
        again = max(sum(pieces(tensors, besides=[*self.parameters, *kept])) for tensors in blocks)
        return sum(pieces(kept, besides=self.parameters)), again

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if self.block is not None and function in PRODUCTS:
            self.products += _tensors(result)
        return result

    def _save(self, x: Tensor) -> Tensor:
        self.saved[self.block].append(x)
        return x

    def _enter(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.block = block
        self.saved[block] = []
        self.inputs += _tensors(inputs)

    def _leave(self, *_: object) -> None:
        self.block = None


def _tensors(values: Any) -> Iterable[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]
