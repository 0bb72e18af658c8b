"""Norms that the fused operator computes: every option that enters the formula, as names that `build_norm` reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from siamesenorm.norms import Norm, build_norm

CASES = (
    "rmsnorm",
    "rmsnorm:offset=1.0",
    "layernorm",
    "layernorm:bias=false",
    "seednorm",
    "seednorm:heads=4,scale=1/d",
    "seednorm:heads=4,activation=sigmoid",
    "seednorm:activation=hardtanh,heads=2",
    "seednorm:activation=gelu,heads=2",
    "seednorm:activation=silu",
    "seednorm:scalar_alpha=true,heads=2",
    "seednorm:elementwise=true",
    "seednorm:without=alpha,heads=4",
    "seednorm:without=beta,activation=sigmoid",
    "seednorm:without=beta,scalar_alpha=true",
    "seednorm:without=gamma,heads=2",
    "seednorm:offset=1.0,heads=4,eps=0.1",
)


@torch.no_grad()
def trained(case: str, dim: int, *, affine: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0) -> Norm:
    """Return a norm whose every parameter has moved away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    norm = build_norm(case, dim, affine=affine).to(dtype)
    for parameter in norm.parameters():
        parameter += 0.4 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(dtype)
    return norm


def tokens(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def gradients(norm: nn.Module, x: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the value, and the gradients of x and of every parameter; the output's gradient is like nothing else."""
    y = norm(x)
    grad = tokens(*y.shape, dtype=y.dtype, seed=2).detach() if grad is None else grad
    return y.detach(), *torch.autograd.grad(y, (x, *norm.parameters()), grad)
