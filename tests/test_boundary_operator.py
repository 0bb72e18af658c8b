"""The fused boundary as an operator: its formula, its gradients, what it keeps, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from boundary_cases import CASES, Case, Inputs, draw_inputs, reference, weighted
from siamesenorm.benchmark.measurement import traffic_of
from siamesenorm.kernels.operators import boundary

CENTRED = pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
EACH = pytest.mark.parametrize("case", CASES, ids=str)


def apply(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return what the operator returns to a connection: (X', Y', H), or (X', H) of one stream."""
    bounded, identity, h, *_ = boundary(*inputs.arguments)
    return (bounded, h) if inputs.identity is None else (bounded, identity, h)


@CENTRED
@EACH
def test_it_equals_the_formula(case: Case, centred: bool) -> None:
    inputs = draw_inputs(case, (2, 3, 7), centred=centred)
    results, expected = apply(inputs), reference(inputs)
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-13)
    gradients = torch.autograd.grad(weighted(results), inputs.learned)
    torch.testing.assert_close(gradients, torch.autograd.grad(weighted(expected), inputs.learned), rtol=0, atol=1e-12)


@EACH
def test_gains_at_zero(case: Case) -> None:
    """A norm or gate at zero passes no gradient on, and gets one itself: what is saved is what was normalised."""
    inputs = draw_inputs(case, (5, 7), zero=case.gains)
    results, expected = apply(inputs), reference(inputs)
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-13)
    gradients = torch.autograd.grad(weighted(results), inputs.learned)
    torch.testing.assert_close(gradients, torch.autograd.grad(weighted(expected), inputs.learned), rtol=0, atol=1e-12)


@pytest.mark.every_nth(2)
@CENTRED
@EACH
def test_gradcheck(case: Case, centred: bool) -> None:
    """On every input, from every result alone and from all together."""
    inputs = draw_inputs(case, (2, 4), centred=centred)

    def results(*arguments: Any) -> tuple[Tensor, ...]:
        found = boundary(*arguments)
        return found[:3] if inputs.identity is not None else (found[0], found[2])

    assert torch.autograd.gradcheck(results, inputs.arguments)
    for each in range(2 if inputs.identity is None else 3):
        assert torch.autograd.gradcheck(lambda *arguments, each=each: results(*arguments)[each], inputs.arguments)


DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]


@pytest.mark.every_nth(4)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # PyTorch's compiler asks for it, and hides this
@pytest.mark.parametrize(("streams", "output"), DTYPES, ids=str)
@EACH
def test_opcheck(case: Case, streams: torch.dtype, output: torch.dtype) -> None:
    inputs = draw_inputs(case, (2, 3, 4), streams=streams, output=output, centred=streams == torch.float32)
    torch.library.opcheck(torch.ops.siamesenorm.boundary.default, inputs.arguments)


@pytest.mark.every_nth(3)
@EACH
def test_opcheck_of_the_backward_operator(case: Case) -> None:
    inputs = draw_inputs(case, (2, 3, 4), streams=torch.float32).map(Tensor.detach)
    bounded, identity, h, updated, statistics, _ = boundary(*inputs.arguments)
    kept = bounded if inputs.gains.post_norm_gain is None else updated
    normalised = None if inputs.gains.identity_gain is None else identity
    streams = (bounded, None if inputs.identity is None else identity, h, kept, normalised, statistics)
    for gradients in (streams, (None, *streams[1:]), (streams[0], None, *streams[2:])):
        arguments = (*gradients, *inputs.constants, *inputs.gains, 1e-5, False)
        torch.library.opcheck(torch.ops.siamesenorm.boundary_backward.default, arguments)


def test_a_second_derivative_is_refused() -> None:
    inputs = draw_inputs(CASES[0], (2, 3, 4))
    (first,) = torch.autograd.grad(weighted(apply(inputs)), inputs.bounded, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


@pytest.mark.every_nth(2)
@EACH
def test_results_are_contiguous_whatever_the_inputs(case: Case) -> None:
    inputs = draw_inputs(case, (3, 4, 6), streams=torch.float32)
    turned = inputs.map(lambda part: part.detach().mT.contiguous().mT if part.ndim > 1 else part.detach())
    for part in turned.learned:
        part.requires_grad_()
    results = apply(turned)
    assert all(result.is_contiguous() for result in results)
    torch.testing.assert_close(results, apply(inputs), rtol=0, atol=0)
    torch.library.opcheck(torch.ops.siamesenorm.boundary.default, turned.arguments)


def kept(inputs: Inputs) -> list[Tensor]:
    """Return the tensors that are kept for the backward pass and are not parameters."""
    tensors: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        boundary(*inputs.arguments)
    parameters = {part.data_ptr() for part in (*inputs.gains.present, *filter(None, inputs.constants))}
    return [x for x in tensors if x.data_ptr() not in parameters]


KEPT = {"siamese-mlp": (2, 3), "siamese-attention": (2, 1), "siamese-post-pre": (2, 2), "pre": (1, 1), "post": (1, 1)}
KEPT |= {"deepnorm": (1, 1), "residual": (1, 1), "mix-ln-switch": (1, 2)}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in KEPT], ids=str)
def test_it_keeps_streams_and_a_few_numbers_a_token(case: Case) -> None:
    """By saved-tensor hooks: so many tensors of a stream's size in its dtype, so many fp32 numbers per token."""
    tokens, dim = 6, 32
    tensors = kept(draw_inputs(case, (2, 3, dim), streams=torch.bfloat16))
    streams, numbers = KEPT[case.name]
    assert sum(x.nbytes for x in tensors) == tokens * (streams * dim * 2 + numbers * 4)
    assert sum(x.numel() == tokens * dim for x in tensors) == streams


PASSES = {"siamese-mlp": (7, 8), "siamese-attention": (6, 8), "siamese-post-pre": (7, 8), "pre": (4, 4), "post": (5, 4)}
PASSES |= {"deepnorm": (5, 5), "residual": (7, 6)}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in PASSES], ids=str)
def test_it_moves_what_the_performance_page_says(case: Case) -> None:
    """In passes of a stream over memory, forward and backward: what is read and written once, and row statistics."""
    inputs = draw_inputs(case, (3, 512), streams=torch.float32)
    rows = [part for part in (inputs.bounded, inputs.output, inputs.identity) if part is not None]
    parameters = [*inputs.gains.present, *filter(None, inputs.constants)]
    moved = tuple(traffic_of(lambda: apply(inputs), rows, besides=parameters).values())
    statistics = KEPT[case.name][1] * 3 * 4
    assert tuple((each - statistics) / inputs.bounded.nbytes for each in moved) == PASSES[case.name]


def test_layer_norm_keeps_a_mean_for_each_norm_too() -> None:
    tensors = kept(draw_inputs(CASES[0], (2, 3, 32), streams=torch.bfloat16, centred=True))
    assert sum(x.nbytes for x in tensors) == 6 * (2 * 32 * 2 + 6 * 4)


def test_dtypes_of_the_results() -> None:
    inputs = draw_inputs(CASES[0], (2, 3, 4), streams=torch.bfloat16, output=torch.float16)
    bounded, identity, h, updated, statistics, _ = boundary(*inputs.arguments)
    assert (bounded.dtype, identity.dtype, h.dtype) == (torch.bfloat16, torch.bfloat16, torch.float16)
    assert (updated.dtype, statistics.dtype, list(statistics.shape)) == (torch.bfloat16, torch.float32, [3, 6])


def test_rows_are_normalised_before_they_are_rounded() -> None:
    """In bf16 the norm sees the sum in fp32, not what is stored of it."""
    inputs = draw_inputs(CASES[4], (64, 32), streams=torch.bfloat16)
    exact = reference(inputs.double())
    torch.testing.assert_close(boundary(*inputs.arguments)[2], exact[1].bfloat16(), rtol=2**-8, atol=1e-6)


def test_a_result_that_is_not_used_costs_no_gradient() -> None:
    for unused in range(3):
        inputs = draw_inputs(CASES[0], (2, 3, 4))
        results, expected = list(apply(inputs)), list(reference(inputs))
        del results[unused], expected[unused]
        gradients = torch.autograd.grad(weighted(tuple(results)), inputs.learned, allow_unused=True)
        wanted = torch.autograd.grad(weighted(tuple(expected)), inputs.learned, allow_unused=True)
        for gradient, want in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, torch.zeros_like(gradient) if want is None else want)


def test_no_tokens() -> None:
    inputs = draw_inputs(CASES[0], (0, 4), streams=torch.float32)
    results = apply(inputs)
    assert [list(result.shape) for result in results] == [[0, 4]] * 3
    gradients = torch.autograd.grad(weighted(results), inputs.gains.present)
    assert all(torch.equal(gradient, torch.zeros(4)) for gradient in gradients)


def test_a_scale_is_a_constant() -> None:
    inputs = draw_inputs(CASES[0], (2, 4))
    inputs.constants.scale.requires_grad_()
    with pytest.raises(ValueError):
        boundary(*inputs.arguments)


def test_what_does_not_fit_together_is_refused() -> None:
    inputs = draw_inputs(CASES[0], (2, 4), streams=torch.float32)
    bounded, output, identity, *rest = inputs.arguments
    with pytest.raises(ValueError, match=r"\[1, 4\]"):
        boundary(bounded, output[:1], identity, *rest)
    with pytest.raises(ValueError):
        boundary(bounded, output, identity.bfloat16(), *rest)
    with pytest.raises(ValueError):
        boundary(bounded, output, None, *rest)
    rest[3] = torch.ones(3)
    with pytest.raises(ValueError, match=r"post_norm_gain is \[3\]"):
        boundary(bounded, output, identity, *rest)
