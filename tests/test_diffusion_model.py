"""The diffusion Transformer: its formula, AdaLN-Zero with every topology and norm, its sizes, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm import available_topologies, build_topology
from siamesenorm.errors import UserError
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.models.diffusion import (
    SIZES,
    DiffusionTransformer,
    DiffusionTransformerConfig,
    build_diffusion_transformer,
    diffusion_transformer_config,
    timestep_sinusoids,
)
from siamesenorm.models.vision import OFFICIAL, sine_cosine_positions
from siamesenorm.norms import NormSpec, SeeDNorm
from siamesenorm.sublayers.sublayer import Context
from siamesenorm.training.execution import checkpoint_blocks, compile_blocks

TINY = DiffusionTransformerConfig(
    depth=2, dim=16, heads=2, hidden=24, image_size=8, patch_size=2, channels=3, classes=5, learned_sigma=True
)
COMPOSING = [name for name in available_topologies() if build_topology(name).modulation_refusal is None]
REFUSED = [name for name in available_topologies() if name not in COMPOSING]
Inputs = tuple[Tensor, Tensor, Tensor]


def model_of(
    topology: str = OFFICIAL, *, kernels: Any = "plain", norm: str = "", **changes: Any
) -> DiffusionTransformer:
    """Return a model in fp64 whose every parameter is random, gates and head included."""
    if norm:
        changes["norm"] = NormSpec.parse(norm)
    config = dataclasses.replace(TINY, topology=build_topology(topology), **changes)
    model = build_diffusion_transformer(config, kernels=kernels)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.double()


def inputs(count: int = 2) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=generator)
    return images, torch.tensor([3, 700, 41])[:count], torch.tensor([1, 5, 0])[:count]


def run(model: DiffusionTransformer, batch: Inputs) -> dict[str, Tensor]:
    """Return the prediction, and the gradient of a loss on it for every parameter."""
    model.zero_grad()
    noise, variance, _ = model(*batch)
    assert variance is not None
    predicted = torch.cat((noise, variance), dim=1)
    (predicted * torch.linspace(-1, 1, predicted.numel()).reshape(predicted.shape)).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {"predicted": predicted.detach(), **found}


# --- its formula


def modulated(x: Tensor, condition: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return LayerNorm(x) (1 + scale) + shift, and the gate."""
    shift, scale, *gate = (F.silu(condition) @ module.weight.T + module.bias)[:, None].chunk(module.parts, dim=-1)
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift, gate[0] if gate else torch.tensor(1.0)


def reference(model: DiffusionTransformer, images: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
    """DiT with Pre-Norm, or with SiameseNorm as its authors released it, written out for 4 x 4 patches of 2 x 2."""
    dim, heads, embedding = 16, 2, model.conditions[0]
    siamese = hasattr(model.closing, "identity_norm")
    kernel = model.patch.weight.view(dim, 3, 2, 2)
    x = F.conv2d(images, kernel, model.patch.bias, stride=2).flatten(2).transpose(1, 2)
    x = x + sine_cosine_positions(4, dim)
    sinusoids = timestep_sinusoids(timesteps, 128).double()
    c = embedding.timestep_output(F.silu(embedding.timestep_up(sinusoids))) + embedding.label.weight[labels]
    y = x
    for index, block in enumerate(model.blocks):
        for name in ("attention", "mlp"):
            sublayer, connection = getattr(block, name), getattr(block, f"{name}_connection")
            if siamese:
                x = affine_norm(x, connection.post_norm)
                h = x + affine_norm(y, connection.identity_norm)
            else:
                h = x
            h, gate = modulated(h, c, sublayer.modulation)
            inner = sublayer.sublayer
            if name == "attention":
                q, k, v = (p(h).view(len(h), -1, heads, dim // heads).transpose(1, 2)
                           for p in (inner.query, inner.key, inner.value))  # fmt: skip
                weights = (q @ k.transpose(2, 3) / (dim // heads) ** 0.5).softmax(-1)
                output = inner.output((weights @ v).transpose(1, 2).flatten(2))
            else:
                output = inner.output(F.gelu(inner.up(h), approximate="tanh"))
            x, y = x + gate * output * ((2 * (index + 1)) ** -0.5 if siamese else 1), y + gate * output
    if siamese:
        x = affine_norm(x, model.closing.post_norm) + affine_norm(y, model.closing.identity_norm)
    patches = model.head(modulated(x, c, model.final_norm.modulation)[0])
    rows = [
        torch.cat([patches[:, 4 * row + column].view(-1, 2, 2, 6).permute(0, 3, 1, 2) for column in range(4)], dim=3)
        for row in range(4)
    ]
    return torch.cat(rows, dim=2)


@pytest.mark.parametrize("span", [127, 128])
def test_sinusoids_of_a_timestep(span: int) -> None:
    timesteps = torch.tensor([0, 1, 41, 999])
    angles = timesteps[:, None] * 10_000.0 ** (-torch.arange(128, dtype=torch.float64) / span)
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1)
    torch.testing.assert_close(timestep_sinusoids(timesteps, span).double(), expected, rtol=0, atol=1e-4)


def affine_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.gain, norm.bias, 1e-6)


@pytest.mark.parametrize("topology", ["pre", OFFICIAL])
def test_it_is_its_formula(topology: str) -> None:
    model = model_of(topology)
    torch.testing.assert_close(run(model, inputs())["predicted"], reference(model, *inputs()), rtol=1e-6, atol=1e-6)


def test_a_sample_depends_on_its_own_timestep_and_label() -> None:
    model, (images, timesteps, labels) = model_of(), inputs(3)
    together = model(images, timesteps, labels).noise
    for index in range(3):
        alone = model(*(part[index : index + 1] for part in (images, timesteps, labels))).noise
        torch.testing.assert_close(alone[0], together[index])
    assert not torch.allclose(model(images, timesteps + 1, labels).noise, together, atol=1e-6)
    assert not torch.allclose(model(images, timesteps, (labels + 1) % 6).noise, together, atol=1e-6)


def test_an_embedding_for_every_block_conditions_that_block() -> None:
    model = model_of(condition_embeddings="per-block")
    assert len(model.conditions) == 2
    before = model(*inputs()).noise
    model.conditions[1].label.weight.data += 1
    assert not torch.allclose(model(*inputs()).noise, before, atol=1e-6)


# --- AdaLN-Zero with every topology and norm


@pytest.mark.parametrize("topology", [*COMPOSING, OFFICIAL])
def test_every_topology_that_composes_takes_a_step(topology: str) -> None:
    """It predicts 0 at the start, where only the head learns; then the gates do; then all parts of the modulation."""
    config = dataclasses.replace(TINY, topology=build_topology(topology))
    model = build_diffusion_transformer(config)
    images, timesteps, labels = (part.float() if part.is_floating_point() else part for part in inputs())
    assert not model(images, timesteps, labels).noise.any()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = (model(images, timesteps, labels).noise - images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for block in model.blocks:
        for sublayer in (block.attention, block.mlp):
            for part in sublayer.modulation.weight.grad.chunk(3):
                assert part.abs().max() > 0


@pytest.mark.parametrize("topology", REFUSED)
def test_topologies_that_cancel_the_gate_are_refused(topology: str) -> None:
    with pytest.raises(UserError) as refusal:
        dataclasses.replace(TINY, topology=build_topology(topology))
    assert str(build_topology(topology).modulation_refusal) in str(refusal.value) and "\n" not in str(refusal.value)
    with pytest.raises(UserError):
        TINY.with_method(topology)


@pytest.mark.parametrize("topology", ["pre", "siamese", OFFICIAL])
def test_streams_pass_unchanged_at_the_start(topology: str) -> None:
    model = build_diffusion_transformer(dataclasses.replace(TINY, topology=build_topology(topology))).double()
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0][-1]))
        block.register_forward_hook(lambda _, arguments, result: seen.append(result[0][-1]))
    model(*inputs())
    assert all(torch.equal(each, seen[0]) for each in seen)


@pytest.mark.parametrize("topology", ["pre", "siamese", OFFICIAL])
def test_norms_before_sublayers_and_head_have_no_gain(topology: str) -> None:
    model = model_of(topology, norm="seednorm")
    last = {"pre": "norm", "siamese": "identity_norm", OFFICIAL: "input_norm"}[topology]
    for block in model.blocks:
        norm = block.attention_connection.get_submodule(last)
        assert isinstance(norm, SeeDNorm) and not hasattr(norm, "gain"), "AdaSeeDNorm: alpha and beta stay"
        assert norm.alpha is not None and norm.beta is not None
    assert not list(model_of(topology).final_norm.norm.parameters())


def test_initial_weights_are_those_of_every_topology() -> None:
    pre, siamese = (build_diffusion_transformer(dataclasses.replace(TINY, topology=build_topology(name)), seed=3)
                    for name in ("pre", OFFICIAL))  # fmt: skip
    other = dict(siamese.named_parameters())
    for name, parameter in pre.named_parameters():
        assert torch.equal(parameter, other[name])
    assert not pre.head.weight.any() and pre.patch.weight.any() and pre.blocks[1].mlp.sublayer.up.weight.any()


# --- however it is run


@pytest.mark.parametrize("topology", ["pre", "post", "siamese", OFFICIAL, "siamese-post-pre:normalized_input=false"])
def test_fused_equals_plain(topology: str) -> None:
    """The operator of the boundary with norms that have no gain, and LayerNorms with one beside them."""
    plain, fused = run(model_of(topology), inputs()), run(model_of(topology, kernels="fused"), inputs())
    torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-10)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.every_nth(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("topology", "norm", "kernels"), [("pre", "seednorm", "plain"), (OFFICIAL, "", "fused")])
def test_compiled_equals_eager(topology: str, norm: str, kernels: str) -> None:
    model = model_of(topology, norm=norm, kernels=kernels)
    first, second = run(model, inputs()), run(model, tuple(reversed_batch(inputs())))  # type: ignore[arg-type]
    compile_blocks(model, backend="aot_eager")
    torch.testing.assert_close(run(model, inputs()), first, rtol=1e-9, atol=1e-10)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(run(model, tuple(reversed_batch(inputs()))), second, rtol=1e-9, atol=1e-10)  # type: ignore[arg-type]


def reversed_batch(batch: Inputs) -> Iterator[Tensor]:
    return (part.flip(0) for part in batch)


def test_checkpointed_blocks_have_the_same_gradients() -> None:
    plain, checkpointed = model_of(), model_of()
    checkpoint_blocks(checkpointed)
    torch.testing.assert_close(run(checkpointed, inputs()), run(plain, inputs()), rtol=0, atol=0)


def test_state_dict_round_trip() -> None:
    model, other = model_of(), build_diffusion_transformer(dataclasses.replace(TINY), seed=9).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(*inputs()).noise, other(*inputs()).noise)
    assert not any("position" in name for name in model.state_dict())


def test_its_condition_reaches_a_block_as_context() -> None:
    block = model_of().blocks[0]
    streams = (torch.randn(1, 4, 16, dtype=torch.float64),) * 2
    one, two = (block(streams, Context(condition=torch.full((1, 16), value).double()))[0][0] for value in (0.0, 1.0))
    assert not torch.allclose(one, two)


# --- sizes and refusals


@pytest.mark.parametrize(
    ("size", "millions", "gigaflops"),
    [("dit-s-2", 33, 6.06), ("dit-b-4", 130, 5.56), ("dit-l-4", 458, 19.70), ("dit-xl-2", 675, 118.64)],
)
def test_sizes_are_the_papers(size: str, millions: int, gigaflops: float) -> None:
    """Parameters and multiply-adds of an image, as in the tables of arXiv 2212.09748."""
    model = build_diffusion_transformer(diffusion_transformer_config(size, topology="pre"), device="meta")
    assert count_parameters(model)[0] / 1e6 == pytest.approx(millions, rel=0.01)
    images = torch.empty(1, 4, 32, 32, device="meta")
    numbers = torch.zeros(1, dtype=torch.int64, device="meta")
    assert count_flops(model, images, numbers, numbers) / 6e9 == pytest.approx(gigaflops, rel=0.01)


def test_there_are_twelve_sizes() -> None:
    assert len(SIZES) == 12
    assert diffusion_transformer_config("dit-l-4").topology == build_topology(OFFICIAL)
    assert diffusion_transformer_config("dit-s-8", norm="seednorm").norm == NormSpec.parse("seednorm:eps=1e-6")
    assert diffusion_transformer_config("dit-s-8").attention_shape.attention_norm == "none"


@pytest.mark.parametrize(
    "changes",
    [{"patch_size": 3}, {"dim": 18}, {"classes": 0}, {"channels": 0}, {"condition_embeddings": "none"}],
)
def test_models_that_cannot_be_built_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refusal:
        dataclasses.replace(TINY, **changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("size", "changes"), [("dit-m-2", {}), ("dit-s-2", {"width": 3}), ("dit-s-2", {"norm": "x"})])
def test_unknown_sizes_fields_and_norms_are_refused(size: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        diffusion_transformer_config(size, **changes)
