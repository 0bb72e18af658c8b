"""Laws of image models: how a vision Transformer or a masked autoencoder is run does not change what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siamesenorm import available_topologies, build_topology
from siamesenorm.models.masked_autoencoder import MaskedAutoencoderConfig, build_masked_autoencoder
from siamesenorm.models.vision import OFFICIAL, VisionTransformerConfig, build_vision_transformer
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import TOPOLOGIES, Kernels
from siamesenorm.training.execution import checkpoint_blocks, compile_blocks

SIZES: dict[str, Any] = {
    "depth": 2, "dim": 16, "heads": 2, "hidden": 24, "image_size": 6, "patch_size": 2, "bias": True,
    "activation": "gelu", "initialisation": "normal",
}  # fmt: skip
DECODER: dict[str, Any] = {"decoder_depth": 2, "decoder_dim": 12, "decoder_heads": 3, "decoder_hidden": 20}
DEIT = VisionTransformerConfig(**SIZES, classes=5, token_position=True, distillation=True, drop_path=0.5, dropout=0.1)
MAE = MaskedAutoencoderConfig(**SIZES, **DECODER, mask_ratio=0.5, drop_path=0.5)
FUSED = [name for name in available_topologies() if getattr(TOPOLOGIES[name], "has_fused_kernels", False)]
MODELS = ("deit", "mae")
# PyTorch's compiler asks every tensor for its gradient and hides the warning, which "error" brings back.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def model_of(kind: str, topology: str = "siamese", norm: str = "layernorm", kernels: Kernels = "plain") -> nn.Module:
    """Return a model whose every parameter is random, gains and gates included."""
    changes: dict[str, Any] = {"topology": build_topology(topology), "norm": NormSpec.parse(norm)}
    model: nn.Module
    if kind == "deit":
        model = build_vision_transformer(dataclasses.replace(DEIT, **changes), kernels=kernels)
    else:
        model = build_masked_autoencoder(dataclasses.replace(MAE, **changes), kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def run(model: nn.Module, *, training: bool = False) -> dict[str, Tensor]:
    """Return the output, and the gradient of a loss on it for every parameter, with the random numbers of one seed."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(4, 3, 6, 6, generator=generator)]
    if hasattr(model, "decoder"):
        inputs.append(torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(4)]))
    model.train(training).zero_grad()
    torch.manual_seed(2)
    output = model(*inputs).logits
    (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
    return {"output": output.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("topology", available_topologies())
def test_every_topology_trains_every_parameter_with_all_options(topology: str, kind: str) -> None:
    model = model_of(kind, topology, norm="seednorm")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = run(model, training=True)
    assert found.keys() - {"output"} == trained
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert not torch.equal(found["output"], run(model)["output"])  # dropout and stochastic depth act in training alone


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("topology", FUSED)
def test_fused_equals_plain(topology: str, kind: str) -> None:
    plain, fused = run(model_of(kind, topology)), run(model_of(kind, topology, kernels="fused"))
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.every_nth(2)
@pytest.mark.parametrize(
    ("kind", "topology", "change"),
    [
        ("mae", OFFICIAL, "compile"),
        ("deit", "siamese", "compile"),
        ("deit", "dhc-2", "checkpoint"),
        ("mae", "siamese", "checkpoint"),
    ],
)
def test_compiled_and_recomputed_blocks_equal_eager_ones(topology: str, kind: str, change: str) -> None:
    """In every stack of the model."""
    changes: dict[str, Callable[[nn.Module], None]] = {
        "compile": lambda model: compile_blocks(model, backend="aot_eager"),
        "checkpoint": checkpoint_blocks,
    }
    model = model_of(kind, topology)
    eager = run(model, training=change == "checkpoint")
    changes[change](model)
    torch.testing.assert_close(run(model, training=change == "checkpoint"), eager, rtol=1e-4, atol=1e-5)
    stacks = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "blocks"]
    blocks = [block for stack in stacks for block in stack.children()]
    assert len(blocks) == (4 if kind == "mae" else 2)
    for block in blocks:
        compiled = block._compiled_call_impl is not None
        assert compiled if change == "compile" else "recomputed" in block.forward.__qualname__


@pytest.mark.parametrize("kind", MODELS)
def test_topologies_share_the_initial_weights_of_sublayers(kind: str) -> None:
    config: Any = DEIT if kind == "deit" else MAE
    build: Any = build_vision_transformer if kind == "deit" else build_masked_autoencoder
    first, second = (
        build(dataclasses.replace(config, topology=build_topology(name)), seed=3).state_dict()
        for name in ("pre", OFFICIAL)
    )
    shared = [name for name in first if "connection" not in name and "closing" not in name and "_norm" not in name]
    assert all(torch.equal(first[name], second[name]) for name in shared)
    assert len(shared) > 30
