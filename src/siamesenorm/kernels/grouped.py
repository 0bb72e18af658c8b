"""A linear map for each group of rows, as one operator that the compiler and the count of FLOPs take as a whole.

    y_i = W_e x_i   for the rows i of group e: offsets[e - 1] <= i < offsets[e]

PyTorch's `grouped_mm` computes it. A loop over the groups is its reference, and is used where `grouped_mm` refuses: in
fp64, for rows whose bytes are no multiple of 16, and on a GPU for anything but bf16. Traced by the compiler, torch 2.13
refuses all but bf16, and a loop would make graphs of the data: hence an operator. It is not one of those that `kernels`
of a model selects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

GROUPED_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
"""The dtypes that `grouped_mm` takes, by device."""
ALIGNMENT = 16
"""Bytes of which the rows of its matrices must be multiples."""


@torch.library.custom_op("siamesenorm::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return [rows, out_features] of x [rows, in_features], whose rows are sorted by group.

    `weight` is [groups, out_features, in_features] in x's dtype; `offsets` [groups] (int32) are the ends of the groups,
    the last one the number of rows. Groups may be empty.
    """
    if can_group(x, weight):
        return F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=offsets)
    return looped_linear(x, weight, offsets)


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("siamesenorm::grouped_linear_weight", mutates_args=())
def grouped_linear_weight(gradient: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient of the weights, [groups, out_features, in_features]; 0 for an empty group.

    `gradient` [rows, out_features] is that of `grouped_linear`, x [rows, in_features] was its input.
    """
    if can_group(gradient, x):
        return F.grouped_mm(gradient.contiguous().t(), x.contiguous(), offs=offsets)
    return looped_linear_weight(gradient, x, offsets)


@grouped_linear_weight.register_fake
def _(gradient: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], gradient.shape[1], x.shape[1])


def can_group(*matrices: Tensor) -> bool:
    """Whether `grouped_mm` takes matrices and their transposes, of one dtype on one device, once they are contiguous.

    A gradient of stride 0, which it refuses, is not.
    """
    first = matrices[0]
    return first.dtype in GROUPED_DTYPES.get(first.device.type, ()) and all(
        size * first.element_size() % ALIGNMENT == 0 for matrix in matrices for size in matrix.shape[1:]
    )


def looped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return what `grouped_linear` does, one group after the other."""
    parts = x.tensor_split(offsets[:-1].tolist())
    return torch.cat([part @ each.t() for part, each in zip(parts, weight, strict=True)])


def looped_linear_weight(gradient: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return what `grouped_linear_weight` does, one group after the other."""
    ends = offsets[:-1].tolist()
    parts = zip(gradient.tensor_split(ends), x.tensor_split(ends), strict=True)
    return torch.stack([part.t() @ rows for part, rows in parts])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    wanted_x, wanted_weight, _ = ctx.needs_input_grad
    return (
        grouped_linear(gradient, weight.transpose(1, 2), offsets) if wanted_x else None,
        grouped_linear_weight(gradient, x, offsets) if wanted_weight else None,
        None,
    )


grouped_linear.register_autograd(_backward, setup_context=_keep)


def _operations(x: torch.Size, weight: torch.Size, *rest: Any, **named: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


FLOPS = {torch.ops.siamesenorm.grouped_linear: _operations}
"""Floating-point operations by operator, 2 for a multiply-add, for PyTorch's FlopCounterMode."""
