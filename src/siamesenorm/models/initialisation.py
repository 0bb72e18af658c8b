"""Initial weights, drawn for each parameter from a seed and a key of its own.

The key is made of the block and the role, and stays when modules are renamed or moved. So the same seed gives the same
sublayer weights whatever the topology, the world size and the order of construction, up to the factors that a topology
declares. Every weight is a normal truncated at three standard deviations:

    scheme    embedding, query, key, value, up, gate,         attention output            MLP output
              router, head
    mitchell  1/sqrt(fan in)                                  1/sqrt(2 fan_in (l+1))      1/sqrt(2 fan_in (l+1))
    normal    0.02                                            0.02                        0.02
    megatron  sqrt(2/(5 d))                                   sqrt(2/(5 d)) / sqrt(2 L)   sqrt(2/(5 d)) / sqrt(2 L)

with d the model's width, l the 0-based block, L the number of blocks; the embedding's fan in counts as d. Experts are
drawn as MLPs are, all of a block together. Biases start at 0, declared parameters (norms, gates, mixing weights) at
their declared values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from siamesenorm.norms import DeclaredModule, assign
from siamesenorm.sublayers.moe import ExpertProjection
from siamesenorm.sublayers.sublayer import Projection
from siamesenorm.topologies import Topology

Initialisation = Literal["mitchell", "normal", "megatron"]
Model = TypeVar("Model", bound=nn.Module)
_KEYS = {
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "attention_output": "attention.output",
    "mlp_up": "mlp.up",
    "mlp_gate": "mlp.gate",
    "mlp_output": "mlp.output",
    "router": "mlp.router",
}
"""The part of a weight's key that names the projection in its block: frozen, independent of modules' names."""


def weight_std(scheme: Initialisation, role: str, *, fan_in: int, dim: int, block: int, depth: int) -> float:
    """Return the standard deviation of the initial weights of a role, as in the module's table."""
    is_output = role in ("attention_output", "mlp_output")
    if scheme == "normal":
        return 0.02
    if scheme == "megatron":
        return math.sqrt(2 / (5 * dim)) / (math.sqrt(2 * depth) if is_output else 1)
    return 1 / math.sqrt(2 * fan_in * (block + 1)) if is_output else 1 / math.sqrt(fan_in)


@torch.no_grad()
def initialise(
    model: nn.Module,
    blocks: nn.ModuleList,
    *,
    scheme: Initialisation,
    topology: Topology,
    dim: int,
    seed: int,
    prefix: str = "",
) -> None:
    """Fill every parameter of `model`, whose `blocks` are in order; also after construction on the meta device.

    `prefix` is put before the keys: a second stack of a model has other weights than the first.
    """
    depth = len(blocks)
    block_of = {module: index for index, block in enumerate(blocks) for module in block.modules()}
    for name, module in model.named_modules():
        if isinstance(module, DeclaredModule):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            std = weight_std(scheme, "embedding", fan_in=dim, dim=dim, block=0, depth=depth)
            fill_normal(module.weight, std, seed, f"{prefix}{name}.weight")
        elif isinstance(module, (Projection, ExpertProjection)):
            block = block_of.get(module, 0)
            std = weight_std(scheme, module.role, fan_in=module.in_features, dim=dim, block=block, depth=depth)
            factor = topology.initial_factor(module.role, depth)
            inside = module.role in _KEYS and module in block_of
            key = f"blocks.{block}.{_KEYS[module.role]}" if inside else name
            fill_normal(module.weight, std * factor, seed, f"{prefix}{key}.weight")
            if isinstance(module, Projection) and module.bias is not None:
                module.bias.zero_()


def build_initialised(build: Callable[[], Model], seed: int, device: str | torch.device) -> Model:
    """Return a model on a device, its weights drawn by `reset_parameters(seed)`; on "meta" nothing is allocated."""
    with torch.device("meta"):
        model = build()
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        model.reset_parameters(seed)  # type: ignore[operator]
    return model


def build_embedding(count: int, dim: int) -> nn.Embedding:
    """Return an embedding whose weights are not drawn: nn.Embedding's own draw costs over a second on meta."""
    embedding: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(count, dim), freeze=False)  # type: ignore[no-untyped-call]
    return embedding


def fill_normal(parameter: Tensor, std: float, seed: int, key: str) -> None:
    """Fill with N(0, std^2) truncated at 3 std, from a generator seeded by `seed` and the parameter's key.

    Drawn in fp32 on the CPU, so that a model holds the same numbers on every device.
    """
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    nn.init.trunc_normal_(drawn, 0.0, std, -3 * std, 3 * std, generator=generator)
    assign(parameter, drawn)
