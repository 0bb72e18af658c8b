"""The Triton kernels of norms on the CPU, forward and backward, against fp64: run by test_kernels_interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from norm_operator_cases import CASES, gradients, tokens, trained
from siamesenorm.kernels import norm_triton
from siamesenorm.kernels import operators as operator
from siamesenorm.kernels.launch import Launch

EACH = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send every norm below fp64 to the kernels, and collect the names of those that run."""
    names: list[str] = []
    run = Launch.run
    monkeypatch.setattr(operator, "has_norm_kernels", lambda x, *_: x.dtype != torch.float64)
    monkeypatch.setattr(Launch, "run", lambda launch: (names.append(launch.kernel.fn.__name__), run(launch)))
    return names


def both(case: str, x: Tensor, weights: torch.dtype = torch.float32, **options: Any) -> tuple[tuple[Tensor, ...], ...]:
    """Return value and gradients by the kernels, and by the formula in fp64."""
    norm, wide = (trained(case, x.shape[-1], dtype=weights, **options) for _ in range(2))
    norm.kernels = "fused"
    wide.double().kernels = "plain"
    grad = tokens(*x.shape, dtype=x.dtype, seed=2).detach()
    return gradients(norm, x, grad), gradients(wide, x.detach().double().requires_grad_(), grad.double())


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], error: float) -> None:
    """Compare with an error relative to the largest element of each tensor."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=error * max(1.0, y.abs().max().item()))


@pytest.mark.every_nth(4)
@EACH
@pytest.mark.parametrize(("rows", "dim"), [(6, 100), (19, 60), (3, 1000)], ids=str)
def test_fp32(case: str, rows: int, dim: int, launched: list[str]) -> None:
    """6 rows of a program's 8; 19 rows in programs of 16; rows of a thousand, one a program."""
    assert_close(*both(case, tokens(rows, dim, dtype=torch.float32)), 3e-6)
    assert launched == ["norm_forward", "norm_backward"]


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("case", ["rmsnorm", "layernorm", "seednorm"])
@pytest.mark.parametrize("dim", [1, 257])
def test_odd_widths(case: str, dim: int, affine: bool) -> None:
    assert_close(*both(case, tokens(2, 3, dim, dtype=torch.float32), affine=affine), 5e-6)


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("heads", [3, 5, 20, 50, 100, 150, 300])
def test_heads_of_any_number_and_width(heads: int) -> None:
    assert_close(*both(f"seednorm:heads={heads},scale=1/d", tokens(5, 300, dtype=torch.float32)), 3e-6)


@pytest.mark.parametrize("case", ["rmsnorm", "layernorm", "seednorm:heads=4"])
def test_weights_at_zero(case: str) -> None:
    norm, wide = trained(case, 100, dtype=torch.float32), trained(case, 100)
    for one in (norm, wide):
        one.zero_()
    norm.kernels = "fused"
    x = tokens(6, 100, dtype=torch.float32)
    found, expected = gradients(norm, x), gradients(wide, x.detach().double().requires_grad_())
    assert not found[0].any() and not found[1].any()
    assert_close(found, expected, 3e-6)


def test_beta_at_zero_is_rmsnorm_bit_for_bit() -> None:
    seed, rms = trained("seednorm", 100, dtype=torch.float32), trained("rmsnorm", 100, dtype=torch.float32)
    with torch.no_grad():
        seed.beta.zero_()
        rms.gain.copy_(seed.gamma)
    x = tokens(6, 100, dtype=torch.float32)
    seed.kernels = rms.kernels = "fused"
    assert torch.equal(seed(x), rms(x))


@pytest.mark.parametrize("case", ["rmsnorm", "seednorm"])
def test_rows_of_zeros_and_of_large_numbers(case: str) -> None:
    """tanh saturates and does not overflow."""
    x = tokens(4, 100, dtype=torch.float32)
    with torch.no_grad():
        x[1], x[2] = 0, x[2] * 1e4
    found, expected = both(case, x)
    assert all(part.isfinite().all() for part in found)
    assert_close(found, expected, 1e-5)


@pytest.mark.every_nth(4)
@EACH
def test_sums_of_long_rows(case: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    """What rows above 4096 get, at 300: a second kernel sums parts of 64 channels for the weights."""
    monkeypatch.setattr(norm_triton, "LONGEST_WITH_SUMS", 64)
    monkeypatch.setattr(norm_triton, "PART_OF_A_ROW", 64)
    assert_close(*both(case, tokens(5, 300, dtype=torch.float32)), 3e-6)
    assert launched == ["norm_forward", "norm_backward", "norm_sums"]


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("heads", [10, 50, 300])
def test_sums_of_several_heads_at_a_time(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 channels are two heads of 30, padded to 32, and eight of 6; 300 heads are channels."""
    monkeypatch.setattr(norm_triton, "LONGEST_WITH_SUMS", 64)
    monkeypatch.setattr(norm_triton, "PART_OF_A_ROW", 64)
    assert_close(*both(f"seednorm:heads={heads},scale=1/d", tokens(5, 300, dtype=torch.float32)), 3e-6)


def test_a_row_of_five_thousand(launched: list[str]) -> None:
    assert_close(*both("seednorm:heads=5", tokens(3, 5000, dtype=torch.float32)), 1e-5)
    assert launched == ["norm_forward", "norm_backward", "norm_sums"]


@pytest.mark.every_nth(3)
@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_rows(case: str, dtype: torch.dtype) -> None:
    """What is stored is rounded once (the interpreter truncates to bf16); the weights' gradients are fp32 in full."""
    (y, grad_x, *of_weights), (wide_y, wide_grad_x, *expected) = both(case, tokens(6, 100, dtype=dtype))
    for found, wide in ((y, wide_y), (grad_x, wide_grad_x)):
        atol = 3e-6 * max(1.0, wide.abs().max().item())
        torch.testing.assert_close(found.double(), wide, rtol=torch.finfo(dtype).eps, atol=atol)
    assert_close(tuple(of_weights), tuple(expected), 3e-6)
    assert all(part.dtype == torch.float32 for part in of_weights)


def test_16_bit_weights() -> None:
    """As under mixed-precision sharding: their gradients come back in their dtype."""
    found, expected = both("seednorm:heads=4", tokens(6, 100, dtype=torch.float32), weights=torch.bfloat16)
    assert [part.dtype for part in found] == [torch.float32] * 2 + [torch.bfloat16] * 3
    assert_close(found, expected, 2**-7)


def test_inputs_that_are_not_contiguous() -> None:
    norm = trained("seednorm:heads=4", 100, dtype=torch.float32)
    norm.kernels = "fused"
    dense = tokens(6, 100, dtype=torch.float32)
    turned = dense.detach().mT.contiguous().mT.requires_grad_()
    for found, expected in zip(gradients(norm, turned), gradients(norm, dense), strict=True):
        assert torch.equal(found, expected)


def test_no_tokens(launched: list[str]) -> None:
    norm = trained("seednorm", 100, dtype=torch.float32)
    norm.kernels = "fused"
    value, grad_x, *of_weights = gradients(norm, tokens(0, 100, dtype=torch.float32))
    assert value.shape == grad_x.shape == (0, 100) and not launched
    assert all(part.shape == (100,) and not part.any() for part in of_weights)


def test_the_same_bits_every_time() -> None:
    norm = trained("seednorm:heads=4", 100, dtype=torch.float32)
    norm.kernels = "fused"
    x = tokens(45, 100, dtype=torch.float32)
    for first, second in zip(gradients(norm, x), gradients(norm, x), strict=True):
        assert torch.equal(first, second)
