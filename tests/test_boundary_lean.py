"""The lean boundary: one stream kept, the other recomputed, the same gradients, and none that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from siamesenorm import LanguageModel, build_language_model
from siamesenorm.errors import UserError
from siamesenorm.kernels.operators import boundary
from siamesenorm.sublayers.sublayer import Context
from siamesenorm.training.execution import checkpoint_blocks, compile_blocks

TOPOLOGIES = (
    "siamese",
    "siamese:normalized_input=false",
    "siamese:depth_scale=none",
    "siamese-post-pre",
    "siamese-post-pre:post_norm=lazy,readout=code,gated_opening=true",
)


def tiny_model(topology: str = "siamese", **fields: Any) -> LanguageModel:
    """Return a model in fp32 whose every parameter is random."""
    sizes = {"depth": 3, "dim": 16, "heads": 2, "hidden": 24, "vocabulary": 11}
    model = build_language_model("nano", topology=topology, **{**sizes, **fields})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def tokens(seed: int = 3) -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor) -> Tensor:
    return (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)).sum()


def run(model: LanguageModel) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model(tokens()).logits).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    """Compare with an error relative to the largest element of each gradient."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=error * gradient.abs().max().item(), msg=name)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_gradients_are_those_of_the_plain_model(topology: str, norm: str) -> None:
    plain, lean = (tiny_model(topology, norm=norm, kernels=kernels) for kernels in ("plain", "lean"))
    assert_close(run(lean), run(plain), 1e-5)
    assert_close(run(lean.double()), run(plain.double()), 1e-13)


@pytest.mark.parametrize("depth", [1, 16])
def test_errors_do_not_grow_with_depth(depth: int) -> None:
    plain, lean = (tiny_model(depth=depth, kernels=kernels) for kernels in ("plain", "lean"))
    assert_close(run(lean), run(plain), 1e-5)


def operator_keeps(topology: str, kernels: str) -> list[tuple[int, int]]:
    """Return, for each boundary of a model, the stream tensors and the numbers per token that its operator keeps."""
    found: list[tuple[int, int]] = []
    model = tiny_model(topology, kernels=kernels)
    dim, count = model.config.dim, tokens().numel()
    gains = {parameter.data_ptr() for parameter in model.parameters()}

    def measured(read: Callable[..., Any]) -> Callable[..., Any]:
        def measure(streams: Any) -> Any:
            kept: list[Tensor] = []

            def keep(x: Tensor) -> Tensor:
                kept.append(x)
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                result = read(streams)
            kept = [x for x in kept if x.data_ptr() not in gains and x.numel() > 1]
            streams_kept = [x for x in kept if x.numel() == dim * count]
            found.append((len(streams_kept), sum(x.numel() for x in kept if x.numel() < dim * count) // count))
            return result

        return measure

    for block in model.blocks:
        for connection in (block.attention_connection, block.mlp_connection):
            connection.read = measured(connection.read)
    model(tokens())
    return found[1:]


def test_what_a_boundary_keeps() -> None:
    """(stream tensors, numbers per token), of an MLP's boundary and an attention's in turn."""
    assert operator_keeps("siamese", "fused") == [(2, 3), (2, 1), (2, 3), (2, 1), (2, 3)]
    assert operator_keeps("siamese", "lean") == [(1, 3), (1, 1), (1, 3), (1, 1), (1, 3)]
    assert operator_keeps("siamese-post-pre", "fused") == [(2, 3)] * 5
    assert operator_keeps("siamese-post-pre", "lean") == [(1, 3)] * 5
    assert operator_keeps("pre", "fused") == [(1, 1)] * 5


def test_a_second_backward_pass_and_two_models_runs_at_once() -> None:
    """Nothing is stored outside the graph."""
    model = tiny_model(kernels="lean")
    expected = run(model)
    first, second = model(tokens()).logits, model(tokens(seed=4)).logits
    model.zero_grad()
    loss_of(first).backward(retain_graph=True)
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected, 1e-6)
    loss_of(second).backward()
    model.zero_grad()
    loss_of(first).backward()
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected, 1e-6)


def test_a_second_derivative_is_refused() -> None:
    streams = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(3)]
    number, gain = torch.tensor(0.7), torch.ones(4, requires_grad=True)
    bounded, identity, h, _, _, handle = boundary(
        *streams, None, number, None, gain, None, gain, gain, *3 * [None], 1e-5, False, number
    )
    difference = (identity - bounded / number).detach()
    (first,) = torch.autograd.grad((h.sin().sum(), handle), streams[0], (None, difference), create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


def test_some_gradients_alone() -> None:
    """A part of the graph, from the closing down to one matrix."""
    lean, plain = tiny_model(kernels="lean"), tiny_model()
    for find in (lambda model: model.blocks[0].mlp.up.weight, lambda model: model.blocks[2].attention.query.weight):
        found, expected = (
            torch.autograd.grad(loss_of(model(tokens()).logits), find(model))[0] for model in (lean, plain)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_frozen_blocks() -> None:
    lean, plain = tiny_model(kernels="lean"), tiny_model()
    for model in (lean, plain):
        model.embedding.requires_grad_(False)
        for block in model.blocks[:2]:
            block.requires_grad_(False)
    assert_close(run(lean), run(plain), 1e-5)


def test_checkpointed_blocks() -> None:
    lean, plain = tiny_model(kernels="lean"), tiny_model()
    checkpoint_blocks(lean)
    assert_close(run(lean), run(plain), 1e-5)


@pytest.mark.laws
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # PyTorch's compiler asks for it, and hides this
def test_compiled_blocks() -> None:
    lean, plain = tiny_model(kernels="lean", depth=4), tiny_model(depth=4)
    torch._dynamo.reset()
    compile_blocks(lean, backend="aot_eager")
    assert_close(run(lean), run(plain), 1e-5)


def test_without_gradients() -> None:
    lean, plain = tiny_model(kernels="lean"), tiny_model()
    with torch.no_grad():
        torch.testing.assert_close(lean(tokens()).logits, plain(tokens()).logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(lean.generate(tokens(), 4), plain.generate(tokens(), 4))


def changed(model: LanguageModel, change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Return the gradients of a model between two of whose blocks something happens to the streams."""
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda streams, *rest: forward(change(streams), *rest)
    return run(model)


def scale_identity(streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    bounded, identity, *rest = streams
    return bounded, identity * 1.1, *rest


def shift_bounded(streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    bounded, *rest = streams
    return bounded + 0.2, *rest


@pytest.mark.parametrize("change", [scale_identity, shift_bounded])
def test_streams_that_were_changed_give_nan_and_no_wrong_gradient(change: Any) -> None:
    lost = changed(tiny_model(kernels="lean"), change)
    right = changed(tiny_model(kernels="fused"), change)
    # Above the change the streams are recomputed; the first boundary below it finds that it cannot.
    found = {name: gradient for name, gradient in lost.items() if not gradient.isnan().any()}
    below = {name for name in right if name.startswith("blocks.0.attention.")}
    assert lost.keys() - found.keys() >= {*below, "embedding.weight"}
    assert_close(found, {name: right[name] for name in found}, 1e-5)


def test_the_last_token_alone_has_the_gradients_of_the_plain_formulas() -> None:
    plain, lean = tiny_model(), tiny_model(kernels="lean")
    for model in (plain, lean):
        loss_of(model(tokens(), last_only=True).logits).backward()
    gradients = [model.blocks[0].attention.query.weight.grad for model in (lean, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_streams_that_were_cut_give_nan() -> None:
    model = tiny_model(kernels="lean")
    streams = model.opening(model.embedding(tokens()))
    for block in model.blocks:
        streams, _ = block(streams, Context(model.rotary(torch.arange(6))))
    loss_of(model.closing(tuple(stream[:, -1:] for stream in streams))).backward()
    assert model.blocks[0].attention.query.weight.grad.isnan().all()


def test_streams_that_were_used_twice_give_nan() -> None:
    model = tiny_model(kernels="lean")
    streams = model.opening(model.embedding(tokens()))
    for block in model.blocks:
        streams, _ = block(streams, Context(model.rotary(torch.arange(6))))
    loss_of(model.closing(streams) + model.closing(tuple(stream * 1 for stream in streams))).backward()
    assert model.blocks[0].attention.query.weight.grad.isnan().all()


def test_a_loss_on_streams_alone_is_refused() -> None:
    model = tiny_model(kernels="lean")
    streams, _ = model.blocks[0](model.opening(model.embedding(tokens())), Context(model.rotary(torch.arange(6))))
    with pytest.raises(RuntimeError):
        streams[0].sum().backward()


def test_a_loss_on_streams_beside_the_models_own() -> None:
    def gradients(model: LanguageModel) -> dict[str, Tensor]:
        streams, extra = model.opening(model.embedding(tokens())), torch.zeros(())
        for block in model.blocks:
            streams, _ = block(streams, Context(model.rotary(torch.arange(6))))
            if model.kernels == "plain":
                extra = extra + streams[0].square().sum()
            else:
                bounded, *_, output = streams
                extra = extra + (bounded + output * block.mlp_connection.addition.scale).square().sum()
        (loss_of(model.closing(streams)) + extra).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert_close(gradients(tiny_model(kernels="lean")), gradients(tiny_model()), 1e-5)


def test_16_bit_streams_are_refused() -> None:
    model = tiny_model(kernels="lean", residual_dtype="bfloat16", compute_dtype="float32")
    with pytest.raises(UserError):
        model(tokens())


def test_topologies_without_lean_kernels_are_refused() -> None:
    with pytest.raises(UserError):
        tiny_model("pre", kernels="lean")


def test_schema_and_fake_tensors() -> None:
    streams = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(3)]
    number, gain = torch.tensor(0.7), torch.ones(4, requires_grad=True)
    arguments = (*streams, None, number, None, gain, None, gain, gain, None, None, None, 1e-5, False, number)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.siamesenorm.boundary.default, arguments, test_utils=checks)
    handle = boundary(*arguments)[-1]
    assert handle.shape == streams[0].shape and handle.untyped_storage().nbytes() == 4
