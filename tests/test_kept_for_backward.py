"""What a training step keeps for the backward pass, beside the same Pre-Norm model written plainly in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from norm_operator_cases import CASES, tokens, trained
from siamesenorm.benchmark.measurement import kept_for_backward
from siamesenorm.models.language import LanguageModel, build_language_model

HEADS, EPS = 4, 1e-5


def plain_pre_norm(weights: Mapping[str, Tensor], tokens: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """Return the logits of a Pre-Norm model with rotary positions, QK-norm and SwiGLU.

    `dtype` is that of the projections' inputs, to which a norm's result is cast once.
    """
    x = F.embedding(tokens, weights["embedding.weight"])
    exponents = torch.arange(0, x.shape[-1] // HEADS, 2) / (x.shape[-1] // HEADS)
    angles = (torch.arange(tokens.shape[1]).unsqueeze(-1) * 10_000.0**-exponents).repeat(1, 2)

    def linear(h: Tensor, name: str) -> Tensor:
        return F.linear(h, weights[f"{name}.weight"])

    def norm(h: Tensor, name: str) -> Tensor:
        return F.rms_norm(h.float(), h.shape[-1:], weights[f"{name}.gain"], EPS).to(dtype)

    def heads(h: Tensor) -> Tensor:
        return h.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def rotate(h: Tensor) -> Tensor:
        first, second = h.float().chunk(2, dim=-1)
        return (h.float() * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()).to(dtype)

    for block in (f"blocks.{number}" for number in range(depth)):
        h = norm(x, f"{block}.attention_connection.norm")
        query = norm(linear(h, f"{block}.attention.query"), f"{block}.attention.query_norm")
        key = norm(linear(h, f"{block}.attention.key"), f"{block}.attention.key_norm")
        value = linear(h, f"{block}.attention.value")
        attended = F.scaled_dot_product_attention(
            rotate(heads(query)), rotate(heads(key)), heads(value), is_causal=True
        )
        x = x + linear(attended.transpose(1, 2).flatten(2), f"{block}.attention.output")
        h = norm(x, f"{block}.mlp_connection.norm")
        x = x + linear(F.silu(linear(h, f"{block}.mlp.gate")) * linear(h, f"{block}.mlp.up"), f"{block}.mlp.output")
    return linear(norm(x, "closing.norm"), "head").float()


@pytest.fixture(scope="module")
def batch() -> Tensor:
    return torch.randint(64, (2, 65), generator=torch.Generator().manual_seed(0))


def build(compute_dtype: str) -> LanguageModel:
    return build_language_model(
        "nano", topology="pre", depth=2, vocabulary=64, context=64, attention_norm="qk", compute_dtype=compute_dtype
    )


@pytest.mark.parametrize(("compute_dtype", "autocast"), [("inherit", False), ("inherit", True), ("bfloat16", True)])
def test_a_step_keeps_no_more_than_plain_pytorch(compute_dtype: str, autocast: bool, batch: Tensor) -> None:
    model = build(compute_dtype)
    weights, dtype = dict(model.named_parameters()), torch.bfloat16 if autocast else torch.float32
    inputs, targets = batch[:, :-1], batch[:, 1:]
    losses: list[Tensor] = []

    def kept_by(logits: Callable[[], Tensor]) -> int:
        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.append(F.cross_entropy(logits().flatten(0, 1), targets.flatten()))

        return sum(kept_for_backward(step, besides=weights.values()))

    ours = kept_by(lambda: model(inputs).logits)
    plain = kept_by(lambda: plain_pre_norm(weights, inputs, 2, dtype))
    torch.testing.assert_close(*losses, rtol=1e-2 if autocast else 1e-6, atol=0)
    assert ours <= 1.02 * plain


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_below_fp32_keeps_its_input_alone(case: str, dtype: torch.dtype) -> None:
    """And its value is that of the formula bit for bit, its gradients up to rounding."""
    norm = trained(case, 12, dtype=torch.float32)
    x = tokens(2, 5, 12, dtype=dtype)
    kept = kept_for_backward(lambda: norm(x), besides=norm.parameters())
    assert sum(kept) <= x.nbytes

    inputs = (x, *norm.parameters())
    y, formula = norm(x), norm.formula(x.float()).to(dtype)
    assert torch.equal(y, formula)
    grad = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, grad), torch.autograd.grad(formula, inputs, grad))
