"""What all Triton kernels here do: read tiles of rows into registers in fp32, and write them back."""

# This is Triton's language, of which mypy knows no types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(pointer, at, inside):
    """Return elements in fp32, and 0 for those that are not inside."""
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, at, value, inside):
    """Store elements in the dtype of their tensor."""
    tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=inside)
