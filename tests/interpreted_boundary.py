"""The Triton kernels of the boundary, forward and backward, against fp64; test_kernels_interpreter runs this file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from boundary_cases import CASES, Case, Inputs, draw_inputs, reference, weighted
from siamesenorm import build_language_model, build_topology
from siamesenorm.kernels import boundary_launch, boundary_plain
from siamesenorm.kernels import operators as operator
from siamesenorm.kernels.boundary_plain import Grads, Kept
from siamesenorm.kernels.launch import Launch
from siamesenorm.models.diffusion import DiffusionTransformerConfig, build_diffusion_transformer
from siamesenorm.models.vision import OFFICIAL

EACH = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send every boundary to the kernels, and collect the names of those that run."""
    names: list[str] = []
    run = Launch.run
    monkeypatch.setattr(operator, "implementation", lambda _: boundary_launch)
    monkeypatch.setattr(Launch, "run", lambda launch: (names.append(launch.kernel.fn.__name__), run(launch)))
    return names


def apply(inputs: Inputs) -> tuple[Tensor, ...]:
    bounded, identity, h, *_ = operator.boundary(*inputs.arguments)
    return (bounded, h) if inputs.identity is None else (bounded, identity, h)


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], error: float) -> None:
    """Compare with an error relative to the largest element of each tensor."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=error * max(1.0, y.abs().max().item()))


def check(inputs: Inputs, error: float = 1e-6) -> None:
    """Compare values and all gradients with the fp64 formula."""
    wide = inputs.double()
    results, expected = apply(inputs), reference(wide)
    assert_close(results, expected, error)
    gradients = torch.autograd.grad(weighted(results), inputs.learned)
    assert_close(gradients, torch.autograd.grad(weighted(expected), wide.learned), 3 * error)


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dim", [100, 257])
@EACH
def test_fp32(case: Case, dim: int, centred: bool, launched: list[str]) -> None:
    """6 tokens in programs of 8 and 4 rows; widths that are no power of two, odd ones too."""
    check(draw_inputs(case, (2, 3, dim), centred=centred, streams=torch.float32))
    assert launched == ["boundary_forward", "boundary_backward"]


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
def test_rows_of_a_thousand(centred: bool) -> None:
    """One row a program, 7 rows for the 4 programs of the backward pass."""
    check(draw_inputs(CASES[0], (7, 1000), centred=centred, streams=torch.float32))


@pytest.mark.parametrize("tokens", [1, 16, 45])
def test_tiles_that_are_full_and_not(tokens: int) -> None:
    """8 rows a program: a part of a tile, two tiles, five and a part for the few programs of the backward pass."""
    check(draw_inputs(CASES[0], (tokens, 100), streams=torch.float32))


@pytest.mark.every_nth(3)
@EACH
def test_one_channel(case: Case) -> None:
    """A norm of one channel has next to no gradient: what is left of it is the eps, and fp32's error."""
    inputs = draw_inputs(case, (5, 1), streams=torch.float32)
    wide = inputs.double()
    assert_close(apply(inputs), reference(wide), 1e-6)
    gradients = torch.autograd.grad(weighted(apply(inputs)), inputs.learned)
    assert_close(gradients, torch.autograd.grad(weighted(reference(wide)), wide.learned), 3e-6)


@pytest.mark.every_nth(2)
@EACH
def test_gains_at_zero(case: Case) -> None:
    check(draw_inputs(case, (6, 100), streams=torch.float32, zero=case.gains))


def test_a_row_of_zeros() -> None:
    inputs = draw_inputs(CASES[0], (3, 100), streams=torch.float32)
    with torch.no_grad():
        for part in (inputs.bounded, inputs.output, inputs.identity):
            part[1] = 0
    check(inputs, 1e-5)


@pytest.mark.every_nth(5)
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
@EACH
def test_rows_in_parts(case: Case, centred: bool, monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    """What rows above 4096 get: three parts of 64 of a row of 150."""
    monkeypatch.setattr(boundary_launch, "LONGEST_WHOLE_ROW", 64)
    monkeypatch.setattr(boundary_launch, "PART_OF_A_ROW", 64)
    check(draw_inputs(case, (3, 150), centred=centred, streams=torch.float32))
    assert launched == ["boundary_forward", "boundary_projections", "boundary_backward"]


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
@EACH
def test_gains_that_are_not_held(case: Case, centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What three LayerNorms of 4096 channels get: gains and biases that are used once are read with every tile."""
    monkeypatch.setattr(boundary_launch, "MOST_SUMS", -1)
    check(draw_inputs(case, (19, 100), centred=centred, streams=torch.float32))


@pytest.mark.every_nth(2)
@EACH
def test_inputs_that_are_not_contiguous(case: Case) -> None:
    inputs = draw_inputs(case, (3, 4, 10), streams=torch.float32)
    turned = inputs.map(lambda part: part.detach().mT.contiguous().mT if part.ndim > 1 else part.detach())
    for part in turned.learned:
        part.requires_grad_()
    torch.testing.assert_close(apply(turned), apply(inputs), rtol=0, atol=0)
    found = torch.autograd.grad(weighted(apply(turned)), turned.learned)
    torch.testing.assert_close(found, torch.autograd.grad(weighted(apply(inputs)), inputs.learned), rtol=0, atol=0)


@pytest.mark.every_nth(3)
@EACH
def test_a_result_that_is_not_used(case: Case) -> None:
    inputs = draw_inputs(case, (6, 50), streams=torch.float32)
    wide = inputs.double()
    for unused in range(len(apply(inputs))):
        found, expected = list(apply(inputs)), list(reference(wide))
        del found[unused], expected[unused]
        gradients = torch.autograd.grad(weighted(tuple(found)), inputs.learned, allow_unused=True)
        wanted = torch.autograd.grad(weighted(tuple(expected)), wide.learned, allow_unused=True)
        zeros = [
            torch.zeros_like(part) if want is None else want for want, part in zip(wanted, wide.learned, strict=True)
        ]
        gradients = [torch.zeros_like(z) if g is None else g for g, z in zip(gradients, zeros, strict=True)]
        assert_close(tuple(gradients), tuple(zeros), 3e-6)


ERROR = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}


def assert_rounded(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Compare element by element, with the error of one truncation to the dtype found."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=ERROR[x.dtype], atol=1e-6 * max(1.0, y.abs().max().item()))


@pytest.mark.every_nth(3)
@pytest.mark.parametrize(
    ("streams", "output"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@EACH
def test_other_dtypes(case: Case, streams: torch.dtype, output: torch.dtype) -> None:
    """What is stored is rounded once; sums and gradients are of fp32 values, those of gains fp32 in full."""
    inputs = draw_inputs(case, (6, 100), streams=streams, output=output, gain=torch.float32)
    results = apply(inputs)
    assert_rounded(results, reference(inputs.double()))

    bounded, identity, h, updated, statistics, _ = operator.boundary(*inputs.arguments)
    kept = bounded if inputs.gains.post_norm_gain is None else updated
    normalised = None if inputs.gains.identity_gain is None else identity
    second = draw_inputs(case, (6, 100), streams=streams, output=output, seed=6).map(Tensor.detach)
    arguments = (second.bounded, second.identity, second.output, kept, normalised, statistics)
    found = boundary_launch.backward(Grads(*arguments[:3]), Kept(*arguments[3:]), inputs.parts)
    doubled = [None if part is None else part.detach().double() for part in arguments]
    expected = boundary_plain.backward(Grads(*doubled[:3]), Kept(*doubled[3:]), inputs.double().parts)
    assert_rounded(complete(found), complete(expected))


def complete(gradients: boundary_plain.Backward) -> tuple[Tensor, ...]:
    """Return the gradients that are not empty, and that of the output even where it is the stream's."""
    output = gradients.output if gradients.output.numel() else gradients.bounded
    return tuple(part.detach() for part in gradients._replace(output=output) if part.numel())


def test_16_bit_gains() -> None:
    """As under mixed-precision sharding: their gradients come back in their dtype."""
    inputs = draw_inputs(CASES[0], (6, 100), streams=torch.float32, gain=torch.bfloat16)
    gradients = torch.autograd.grad(weighted(apply(inputs)), inputs.learned)
    wide = inputs.double()
    expected = torch.autograd.grad(weighted(reference(wide)), wide.learned)
    assert all(gradient.dtype == part.dtype for gradient, part in zip(gradients, inputs.learned, strict=True))
    assert_close(gradients, expected, 2**-7)


def test_the_same_bits_every_time() -> None:
    inputs = draw_inputs(CASES[0], (45, 100), streams=torch.float32)
    first = torch.autograd.grad(weighted(apply(inputs)), inputs.learned)
    for x, y in zip(first, torch.autograd.grad(weighted(apply(inputs)), inputs.learned), strict=True):
        assert torch.equal(x, y)


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre", "pre", "deepnorm", "residual"])
def test_a_model(topology: str, launched: list[str]) -> None:
    """Every boundary of a model by the kernels, and its gradients, as the plain model has them."""
    fields: dict[str, Any] = {"depth": 2, "dim": 24, "heads": 2, "hidden": 16, "vocabulary": 11}
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(3))
    found = []
    for kernels in ("plain", "fused"):
        model = build_language_model("nano", topology=topology, kernels=kernels, **fields)
        logits = model(tokens).logits
        gradients = torch.autograd.grad(weighted((logits,)), list(model.parameters()))
        found.append((logits, *gradients))
    assert launched == ["boundary_forward"] * 3 + ["boundary_backward"] * 3
    for fused, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("topology", ["siamese", OFFICIAL, "pre"])
def test_a_conditioned_model(topology: str, launched: list[str]) -> None:
    """Norms without gain before the sublayers, LayerNorms with gain and bias beside them."""
    config = DiffusionTransformerConfig(
        depth=2, dim=24, heads=2, hidden=16, image_size=4, channels=1, classes=3, topology=build_topology(topology)
    )
    images, numbers = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([1, 2])
    found = []
    for kernels in ("plain", "fused"):
        model = build_diffusion_transformer(config, kernels=kernels)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        noise = model(images, numbers, numbers).noise
        found.append((noise, *torch.autograd.grad(weighted((noise,)), list(model.parameters()))))
    assert launched == ["boundary_forward"] * 3 + ["boundary_backward"] * 3
    for fused, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4 * max(1.0, plain.abs().max().item()))


@pytest.mark.every_nth(5)
@pytest.mark.parametrize(
    ("topology", "norm", "part"),
    [
        ("siamese", "rmsnorm", 64),
        ("siamese", "layernorm", 4096),
        ("siamese-post-pre", "rmsnorm", 4096),
        ("siamese-post-pre", "layernorm", 64),
    ],
)
def test_a_lean_model(topology: str, norm: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity stream recomputed by the kernels, of whole rows of 100 and of rows in parts of 64."""
    monkeypatch.setattr(boundary_launch, "LONGEST_WHOLE_ROW", part)
    monkeypatch.setattr(boundary_launch, "PART_OF_A_ROW", part)
    fields: dict[str, Any] = {"depth": 2, "dim": 100, "heads": 2, "hidden": 16, "vocabulary": 11, "norm": norm}
    tokens = torch.randint(0, 11, (1, 5), generator=torch.Generator().manual_seed(3))
    found = []
    for kernels in ("plain", "lean"):
        model = build_language_model("nano", topology=topology, kernels=kernels, **fields)
        found.append(torch.autograd.grad(weighted((model(tokens).logits,)), list(model.parameters())))
    for lean, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(lean, plain, rtol=0, atol=1e-5 * plain.abs().max().item())


@pytest.mark.every_nth(5)
@pytest.mark.parametrize("part", [64, 4096], ids=["rows in parts", "whole rows"])
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_a_row_that_cannot_be_recomputed(case: Case, centred: bool, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from it becomes NaN, as in plain PyTorch, and that alone; the rows beside it are right."""
    monkeypatch.setattr(boundary_launch, "LONGEST_WHOLE_ROW", part)
    monkeypatch.setattr(boundary_launch, "PART_OF_A_ROW", part)
    inputs = draw_inputs(case, (5, 100), centred=centred, streams=torch.float32).map(Tensor.detach)
    next_scale = torch.tensor(0.4)
    bounded, identity, h, updated, statistics, _ = operator.boundary(*inputs.arguments)
    difference = identity - bounded / next_scale
    difference[3] += 0.1
    kept = bounded if inputs.gains.post_norm_gain is None else updated
    arguments = (Grads(bounded, identity, h), Kept(kept, difference, statistics, next_scale), inputs.parts)
    found, expected = boundary_launch.backward(*arguments), boundary_plain.backward(*arguments)
    assert expected.identity[3].isnan().all() and expected.gains.isnan().any()
    assert expected.bounded[3].isnan().all() == (inputs.gains.input_gain is not None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4, equal_nan=True)
