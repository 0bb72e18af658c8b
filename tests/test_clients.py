"""The four hard clients of the interface: FSDP2 by block, a foreign loop, a fused boundary, conditioned sublayers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from siamesenorm import (
    LanguageModel,
    ResidualSpec,
    Topology,
    available_topologies,
    build_language_model,
    build_topology,
)
from siamesenorm.errors import UserError
from siamesenorm.models.block import Block
from siamesenorm.norms import NormSpec
from siamesenorm.sublayers.mlp import GatedMLP
from siamesenorm.sublayers.sublayer import Context, Modulated, Rotation
from siamesenorm.topologies import Closing, Connection, Opening, transformer_places

TOPOLOGIES = available_topologies()


def tiny_model(topology: str, **fields: Any) -> LanguageModel:
    """Return a model in fp64 whose every parameter is random, gains and gates included."""
    sizes = {"depth": 3, "dim": 16, "heads": 2, "hidden": 24, "vocabulary": 11}
    model = build_language_model("nano", topology=topology, **{**sizes, **fields}).double()
    randomise(model)
    return model


def randomise(model: nn.Module) -> None:
    """Move every parameter away from its initial value."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(3))


def weighted_sum(x: Tensor) -> Tensor:
    """Return a loss in which every entry of x has a weight of its own."""
    return (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- client 1: FSDP2 by block, whose training is in test_parallel.py


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_parameter_can_be_sharded(topology: str) -> None:
    """FSDP2 refuses 0-d parameters: a learned number has shape [1]."""
    for norm in ("rmsnorm", "scalenorm", "dyt", "seednorm:scalar_alpha=true"):
        model = build_language_model("nano", topology=topology, norm=norm, device="meta")
        assert [name for name, p in model.named_parameters() if p.ndim == 0] == []


# --- client 2: a foreign loop over packed streams


class ForeignBlock(nn.Module):
    """What `for block in blocks: h = block(h)` meets: one tensor in, one tensor out."""

    def __init__(self, block: Block, topology: Topology, rotary: Rotation) -> None:
        super().__init__()
        self.block = block
        self.topology = topology
        self.rotary = rotary

    def forward(self, h: Tensor) -> Tensor:
        streams, _ = self.block(self.topology.unpack(h), Context(self.rotary))
        return self.topology.pack(streams)


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_foreign_loop_over_packed_streams(topology: str) -> None:
    ours, model = tiny_model(topology), tiny_model(topology)
    wiring = model.config.topology
    blocks = [ForeignBlock(block, wiring, model.rotary(torch.arange(6))) for block in model.blocks]

    h = wiring.pack(model.opening(model.embedding_scale(model.embedding(tokens()))))
    for block in blocks:
        assert isinstance(h, Tensor) and h.shape[:2] == (2, 6) and h.shape[-1] == 16 and h.ndim == 4
        h = block(h)
    logits = model.head(model.closing(wiring.unpack(h)))

    expected = ours(tokens()).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    weighted_sum(logits).backward()
    weighted_sum(expected).backward()
    torch.testing.assert_close(gradients(model), gradients(ours), rtol=0, atol=1e-11)


# --- client 3: the whole boundary as one operator, pending across a block's edge

FUSED = (
    "siamese",
    "siamese:normalized_input=false",
    "siamese:depth_scale=none",
    "siamese:depth_scale=paper_sublayer",
    "siamese-post-pre",
    "siamese-post-pre:normalized_input=false",
    "siamese-post-pre:post_norm=lazy",
    "siamese-post-pre:post_norm=lazy,readout=code,gated_opening=true",
    "siamese-post-pre:depth_scale=paper_block,gated_opening=true",
)


class BoundaryCalls(TorchDispatchMode):
    """Count the calls of the fused boundary, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_calls = self.backward_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forward_calls += func is torch.ops.siamesenorm.boundary.default
        self.backward_calls += func is torch.ops.siamesenorm.boundary_backward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("topology", FUSED)
def test_fused_boundary_equals_the_plain_form(topology: str) -> None:
    plain, fused = tiny_model(topology), tiny_model(topology, kernels="fused")
    fused.load_state_dict(plain.state_dict())
    with BoundaryCalls() as calls:
        output = fused(tokens()).logits
        weighted_sum(output).backward()
    boundaries = 2 * plain.config.depth - 1
    assert (calls.forward_calls, calls.backward_calls) == (boundaries, boundaries)

    expected = plain(tokens()).logits
    weighted_sum(expected).backward()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert gradients(fused).keys() == dict(plain.named_parameters()).keys()
    torch.testing.assert_close(gradients(fused), gradients(plain), rtol=1e-12, atol=1e-12)


def test_a_write_stays_pending_across_a_block_edge() -> None:
    model = tiny_model("siamese", kernels="fused")
    streams = model.opening(model.embedding(tokens()))
    for block in model.blocks:
        streams, _ = block(streams, Context(model.rotary(torch.arange(6))))
        assert len(streams) == 3, "the bounded stream, the identity stream, the output not yet added"
    bounded, identity, output = streams
    completed = (bounded + model.closing.previous.scale * output, identity + output)
    plain = tiny_model("siamese")
    torch.testing.assert_close(plain.closing(completed), model.closing(streams), rtol=0, atol=1e-12)


def streams_as_read(model: LanguageModel) -> list[Tensor]:
    """Return both streams as every read returns them, collected while the model runs, and the logits."""
    collected: list[Tensor] = []

    def collecting(read: Any) -> Any:
        def collect(streams: Any) -> Any:
            h, after = read(streams)
            collected.extend(after)
            return h, after

        return collect

    for module in model.modules():
        if isinstance(module, Connection):
            module.read = collecting(module.read)
    logits = model(tokens()).logits
    return [*collected, logits]


def test_a_loss_on_the_streams_has_the_same_gradients() -> None:
    """A probe touches streams between boundaries: the operator's backward must be the gradient with respect to them."""
    plain, fused = tiny_model("siamese-post-pre"), tiny_model("siamese-post-pre", kernels="fused")
    expected, streams = streams_as_read(plain), streams_as_read(fused)
    torch.testing.assert_close(streams, expected, rtol=0, atol=1e-12)
    for model, collected in ((plain, expected), (fused, streams)):
        torch.stack([weighted_sum(stream.square()) for stream in collected]).sum().backward()
        assert gradients(model).keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(gradients(fused), gradients(plain), rtol=1e-12, atol=1e-12)


def test_streams_of_a_fused_model_keep_their_dtype() -> None:
    sizes = {"depth": 2, "dim": 16, "heads": 2, "hidden": 24, "vocabulary": 11, "compute_dtype": "float32"}
    outputs = {}
    for kernels in ("plain", "fused"):
        model = build_language_model("nano", kernels=kernels, residual_dtype="bfloat16", **sizes)
        *_, bounded, identity, outputs[kernels] = streams_as_read(model)
        assert bounded.dtype == identity.dtype == torch.bfloat16
    # Inside the boundary the fused form rounds to bf16 once, the plain form after every step.
    torch.testing.assert_close(outputs["fused"], outputs["plain"], rtol=0, atol=0.05)


@pytest.mark.parametrize("norm", ["dyt", "seednorm", "rmsnorm:offset=1"])
def test_fused_refuses_norms_that_it_does_not_compute(norm: str) -> None:
    with pytest.raises(UserError):
        build_language_model("nano", topology="siamese", norm=norm, kernels="fused")


# --- client 4: a conditioned sublayer (AdaLN-Zero)

CONDITION = 5


class ConditionedStack(nn.Module):
    """MLPs under AdaLN-Zero at every place of a topology, as a diffusion Transformer would hold them."""

    def __init__(self, topology: Topology, norm: str = "rmsnorm", depth: int = 2) -> None:
        super().__init__()
        spec = ResidualSpec(dim=8, norm=NormSpec.parse(norm), domain="vision")
        places = [place for block in transformer_places(depth, conditioned=True) for place in block]
        self.opening: Opening = topology.opening(spec)
        self.connections = nn.ModuleList(topology.connection(place, spec) for place in places)
        self.sublayers = nn.ModuleList(Modulated(GatedMLP(8, 12), 8, CONDITION) for _ in places)
        self.closing: Closing = topology.closing(places[-1], spec)

    def steps(self, embedding: Tensor, condition: Tensor) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Yield the streams before and after every write."""
        streams = self.opening(embedding)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            h, before = connection.read(streams)
            streams = connection.write(before, sublayer(h, Context(condition=condition)))
            yield before, streams

    def forward(self, embedding: Tensor, condition: Tensor) -> Tensor:
        *_, (_, streams) = self.steps(embedding, condition)
        return self.closing(streams)


def conditioned_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(2, 3, 8, generator=generator), torch.randn(2, CONDITION, generator=generator)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "seednorm"])
@pytest.mark.parametrize("topology", ["pre", "siamese", "siamese-post-pre"])
def test_conditioned_sublayers_start_by_adding_nothing(topology: str, norm: str) -> None:
    stack = ConditionedStack(build_topology(topology), norm)
    embedding, condition = conditioned_inputs()
    *_, (_, last) = steps = list(stack.steps(embedding, condition))
    for before, after in steps:
        assert all(map(torch.equal, before, after))
    assert torch.equal(last[-1], embedding), "the identity stream leaves as it came"

    stack(embedding, condition).square().sum().backward()
    for sublayer in stack.sublayers:
        _, _, gate = sublayer.modulation.weight.grad.chunk(3)
        assert gate.abs().max() > 0, "the gate learns from the first step on"


@pytest.mark.parametrize("topology", ["pre", "siamese", "siamese-post-pre"])
def test_every_part_of_the_modulation_learns_once_the_gate_is_open(topology: str) -> None:
    stack = ConditionedStack(build_topology(topology))
    for sublayer in stack.sublayers:
        nn.init.normal_(sublayer.modulation.bias, std=0.1)
    stack(*conditioned_inputs()).square().sum().backward()
    for sublayer in stack.sublayers:
        for part in (*sublayer.modulation.weight.grad.chunk(3), *sublayer.modulation.bias.grad.chunk(3)):
            assert part.abs().max() > 0


@pytest.mark.parametrize(
    ("topology", "last_norms"),
    [
        ("pre", ("norm", "norm")),
        ("siamese", ("identity_norm", "input_norm")),
        ("siamese-post-pre", ("input_norm", "input_norm")),
        ("siamese-post-pre:normalized_input=false", ("identity_norm", "identity_norm")),
    ],
)
def test_the_last_norm_before_a_conditioned_sublayer_has_no_gain(topology: str, last_norms: tuple[str, str]) -> None:
    stack = ConditionedStack(build_topology(topology))
    for index, connection in enumerate(stack.connections):
        norms = {name: list(part.parameters()) for name, part in connection.named_children()}
        last = last_norms[index % 2]
        assert norms.pop(last) == []
        assert not isinstance(connection.get_submodule(last), nn.Identity)
    assert [p.shape for p in stack.closing.parameters()] != [], "the closing keeps its gains"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_topologies_say_whether_they_take_conditioned_sublayers(topology: str) -> None:
    wiring = build_topology(topology)
    if wiring.modulation_refusal is not None:
        with pytest.raises(UserError):
            ConditionedStack(wiring)
        return
    stack = ConditionedStack(wiring)
    embedding, condition = conditioned_inputs()
    assert stack(embedding, condition).isfinite().all()
    randomise(stack)
    assert not torch.allclose(stack(embedding, condition), stack(embedding, torch.zeros_like(condition)))


@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_a_model_with_a_final_norm_of_its_own(topology: str) -> None:
    """A DiT head normalises by itself: the closing leaves its last norm out."""
    wiring, spec = build_topology(topology), ResidualSpec(dim=8)
    last = transformer_places(1)[0][1]
    with_norm = wiring.closing(last, spec)
    without = wiring.closing(last, dataclasses.replace(spec, final_norm=False))
    streams = tuple(torch.randn(2, 3, 8) for _ in wiring.stream_names)
    final = spec.build_final_norm()
    torch.testing.assert_close(final(without(streams)), with_norm(streams))
