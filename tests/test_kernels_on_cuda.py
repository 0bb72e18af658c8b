"""The Triton kernels on a GPU, where there is one: values and gradients against fp64, bits against a second run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from boundary_cases import CASES, Case, Inputs, draw_inputs, reference, weighted
from norm_operator_cases import CASES as NORMS
from norm_operator_cases import gradients, tokens, trained
from siamesenorm import build_language_model
from siamesenorm.kernels.operators import boundary, has_boundary_kernels

DEVICE = "cuda"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device here", allow_module_level=True)

EACH = pytest.mark.parametrize("case", CASES, ids=str)
SHAPES = [(5, 100), (3, 1, 257), (300, 512), (1, 2048), (1000, 2048), (40, 4096), (9, 8192), (3, 16384)]
"""Rows in part of a tile and in many, one and several rows a program, whole rows and rows in parts."""


def on_device(inputs: Inputs) -> Inputs:
    moved = inputs.map(lambda part: part.detach().to(DEVICE))
    for part in moved.learned:
        part.requires_grad_()
    return moved


def results_of(inputs: Inputs) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return (X', Y', H) and the gradients of all inputs, on the CPU."""
    bounded, identity, h, *_ = boundary(*inputs.arguments)
    found = tuple(x.cpu() for x in ((bounded, h) if inputs.identity is None else (bounded, identity, h)))
    return tuple(x.detach() for x in found), tuple(
        x.cpu() for x in torch.autograd.grad(weighted(found), inputs.learned)
    )


@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("streams", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EACH
def test_a_boundary(case: Case, shape: tuple[int, ...], streams: torch.dtype, error: float, centred: bool) -> None:
    inputs = draw_inputs(case, shape, centred=centred, streams=streams)
    moved, wide = on_device(inputs), inputs.double()
    assert has_boundary_kernels(moved.bounded)
    found, slopes = results_of(moved)
    expected = reference(wide)
    for one, other in zip(
        (*found, *slopes), (*expected, *torch.autograd.grad(weighted(expected), wide.learned)), strict=True
    ):
        torch.testing.assert_close(
            one.double(), other.detach(), rtol=0, atol=error * max(1.0, other.abs().max().item())
        )


@EACH
def test_a_boundary_gives_the_same_bits_twice(case: Case) -> None:
    moved = on_device(draw_inputs(case, (999, 1024), streams=torch.bfloat16))
    for one, other in zip(*(sum(results_of(moved), ()) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("shape", [(300, 512), (1000, 2048), (9, 8192), (3, 16384)], ids=str)
@pytest.mark.parametrize("case", NORMS)
def test_a_norm(case: str, shape: tuple[int, ...], dtype: torch.dtype, error: float) -> None:
    norm = trained(case, shape[-1], dtype=torch.float32)
    exact = copy.deepcopy(norm).double()
    norm.kernels, exact.kernels = "fused", "plain"
    x, grad = (tokens(*shape, dtype=dtype, seed=seed).detach() for seed in (1, 2))
    found = gradients(norm.to(DEVICE), x.to(DEVICE).requires_grad_(), grad.to(DEVICE))
    expected = gradients(exact, x.double().requires_grad_(), grad.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=0, atol=error * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("kernels", ["fused", "lean"])
@pytest.mark.parametrize("topology", ["siamese", "siamese-post-pre"])
def test_a_model_learns_the_same(topology: str, kernels: str) -> None:
    """The gradients of every parameter, with fp32 streams."""

    def slopes(kernels: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = build_language_model(
            "nano", topology=topology, vocabulary=64, context=32, kernels=kernels, device=DEVICE
        )
        words = torch.arange(64, device=DEVICE).remainder(37).view(2, 32)
        model(words).logits.float().square().mean().backward()
        return {name: p.grad.cpu() for name, p in model.named_parameters()}

    found = slopes(kernels)
    for name, expected in slopes("plain").items():
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-5 + 1e-3 * expected.abs().max().item())
