"""The Triton kernels of norms compiled for Hopper (sm_90) without a GPU: no spills, 128-bit accesses, registers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from registers import Inspection, inspect
from siamesenorm.kernels.launch import H200, Launch
from siamesenorm.kernels.norm_plain import Form, Weights

pytest.importorskip("triton")


def inspect_both_passes(
    kind: str, dim: int, heads: int, rows: torch.dtype, tokens: int = 16_384
) -> list[tuple[Launch, Inspection]]:
    """Return (launch, inspection) of the kernels of a norm with fp32 weights, as on an H200."""
    from siamesenorm.kernels.norm_triton import plan

    names = {"rmsnorm": ("gain",), "layernorm": ("gain", "bias"), "seednorm": ("alpha", "beta", "gain")}[kind]
    weights = Weights(**{name: torch.empty(dim, device="meta") for name in names})
    form = Form(0.0, heads, 1.0, "tanh", 1e-5, centred=kind == "layernorm")
    launches = plan(torch.empty(tokens, dim, dtype=rows, device="meta"), weights, form, H200)
    found = [(launch, inspect(launch)) for launch in launches]
    for launch, code in found:
        print(
            f"{kind}, d={dim}, {heads} heads, {rows}, {launch.kernel.__name__}: {code.registers} registers, "
            f"{code.spilled_bytes} bytes spilled, {code.shared_bytes} bytes shared, {code.threads} threads"
        )
    return found


@pytest.mark.every_nth(3)
@pytest.mark.parametrize(
    ("kind", "dim", "heads", "rows"),
    [
        ("rmsnorm", 4096, 1, torch.bfloat16),
        ("layernorm", 4096, 1, torch.float32),
        ("seednorm", 128, 1, torch.bfloat16),
        ("seednorm", 768, 16, torch.bfloat16),
        ("seednorm", 2048, 2048, torch.float32),
        ("seednorm", 4096, 1, torch.bfloat16),
        ("seednorm", 4096, 4, torch.bfloat16),
        ("seednorm", 4096, 4, torch.float32),
        ("seednorm", 8192, 1, torch.bfloat16),
    ],
    ids=str,
)
def test_no_spills_and_wide_accesses(kind: str, dim: int, heads: int, rows: torch.dtype) -> None:
    for launch, found in inspect_both_passes(kind, dim, heads, rows):
        assert found.spilled_bytes == 0
        assert found.registers <= 128, "512 threads fit a multiprocessor"
        # Rows move 128 bits at a time; 32 bits are statistics, dot products and what is left of short rows' sums.
        assert set(found.loads) <= {32, 128} and set(found.stores) <= {32, 128}
        tensors = [part for part in launch.arguments.values() if isinstance(part, Tensor) and part.shape[-1] == dim]
        rows_read_or_written = sum(1 for part in tensors if part.ndim == 2)
        assert found.loads[128] + found.stores.get(128, 0) >= rows_read_or_written >= 2


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("heads", [1, 4])
def test_seednorm_moves_what_rmsnorm_moves(heads: int) -> None:
    """16 bf16 channels a thread forward, 8 backward: as many accesses to rows, and two weights more, in fp32."""
    (_, rms), (_, rms_backward) = inspect_both_passes("rmsnorm", 2048, 1, torch.bfloat16)
    (_, seed), (launch, seed_backward) = inspect_both_passes("seednorm", 2048, heads, torch.bfloat16)
    assert seed.spilled_bytes == seed_backward.spilled_bytes == 0
    assert (rms.loads[128], rms.stores[128]) == (2 + 4, 2)
    assert (seed.loads[128], seed.stores[128]) == (2 + 3 * 4, 2)
    # Two reads a row, twice ahead of the loop and once in it; one write a row, and a program's sums.
    assert launch.arguments["STAGES"] == 3
    assert (rms_backward.loads[128], rms_backward.stores[128]) == (3 * 2 + 2, 1 + 2)
    assert (seed_backward.loads[128], seed_backward.stores[128]) == (3 * 2 + 3 * 2, 1 + 3 * 2)
