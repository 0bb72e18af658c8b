"""The Triton kernels compiled for Hopper (sm_90) without a GPU: no spills, 128-bit accesses, registers reported."""

from __future__ import annotations

import math

import pytest
import torch

from registers import BOUNDARIES, Inspection, boundary_launches, inspect
from siamesenorm.kernels.launch import H200, Launch
from siamesenorm.kernels.norm_plain import Form, Weights

triton = pytest.importorskip("triton")
RECENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
SPILLED = 0 if RECENT else 80
"""Bytes: Triton 3.6 spills 16 to 80 in the backward pass of the settled boundary, of bf16 rows of 3072 and more."""

NO_SPILLS = [
    *((name, 4096, torch.bfloat16) for name in BOUNDARIES),
    *((name, 2048, torch.float32) for name in BOUNDARIES),
    ("siamese mlp", 1024, torch.bfloat16),
    ("siamese mlp", 3072, torch.bfloat16),
    ("siamese mlp", 8192, torch.bfloat16),
]
"""Rows of 3072 channels have masks; a row of 8192 takes two kernels in the backward pass."""
LAYER_NORM = [
    *((name, dim, streams) for name, dim, streams in NO_SPILLS if name.startswith("siamese") and 2048 <= dim <= 4096),
    ("pre-norm", 4096, torch.bfloat16),
    ("post-norm", 2048, torch.float32),
]


def describe(name: str, dim: int, streams: torch.dtype, passed: str, found: Inspection) -> str:
    return (
        f"{name} {passed}, d={dim}, {streams}: {found.registers} registers, {found.spilled_bytes} bytes spilled, "
        f"{found.shared_bytes} bytes shared, {found.threads} threads"
    )


@pytest.mark.every_nth(10)
@pytest.mark.parametrize(
    ("name", "dim", "streams", "centred"),
    [*((*one, False) for one in NO_SPILLS), *((*one, True) for one in LAYER_NORM)],
    ids=str,
)
def test_no_spills_and_wide_accesses(name: str, dim: int, streams: torch.dtype, centred: bool) -> None:
    for passed, launch in boundary_launches(BOUNDARIES[name], dim, streams=streams, centred=centred):
        found = inspect(launch)
        print(describe(name, dim, streams, passed, found))
        assert found.spilled_bytes <= SPILLED
        assert found.registers * found.threads <= 65_536, "a program fits a multiprocessor"
        # Rows move 128 bits at a time; 32 bits are constants and row statistics.
        assert set(found.loads) <= {32, 128} and set(found.stores) <= {32, 128}
        tensors = sum(1 for value in launch.arguments.values() if isinstance(value, torch.Tensor) and value.ndim == 2)
        assert found.loads[128] + found.stores.get(128, 0) >= tensors - (passed == "projections") * 2


def test_the_forward_pass_moves_each_row_once() -> None:
    """Of 8 bf16 channels a thread, a row is one access; a gain in fp32 is two."""
    for name, reads, gains, writes in (("siamese mlp", 3, 3, 4), ("siamese attention", 3, 2, 3), ("pre-norm", 2, 1, 2)):
        forward = inspect(next(launch for _, launch in boundary_launches(BOUNDARIES[name], 2048)))
        assert (forward.loads[128], forward.stores[128]) == (reads + 2 * gains, writes)


def test_the_backward_pass_moves_each_row_once() -> None:
    """Five reads a row, twice ahead of the loop and once in it; three writes a row, and one program's three sums."""
    *_, (_, launch) = boundary_launches(BOUNDARIES["siamese mlp"], 2048)
    assert launch.arguments["STAGES"] == 3
    found = inspect(launch)
    assert (found.loads[128], found.stores[128]) == (3 * 5 + 2 * 3, 3 + 2 * 3)


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("dim", [256, 8192])
def test_one_token(dim: int) -> None:
    """As in generation: Triton makes a constant of a number of rows that is 1."""
    for _, launch in boundary_launches(BOUNDARIES["siamese mlp"], dim, tokens=1):
        assert inspect(launch).spilled_bytes == 0


@pytest.mark.every_nth(3)
@pytest.mark.parametrize(
    ("name", "dim", "centred"),
    [
        ("siamese mlp", 2048, False),
        ("siamese mlp", 2048, True),
        ("siamese mlp", 8192, False),
        ("siamese attention", 2048, False),
        ("siamese post-pre", 2048, False),
    ],
)
def test_the_lean_backward_pass_does_not_spill(name: str, dim: int, centred: bool) -> None:
    launches = boundary_launches(BOUNDARIES[name], dim, streams=torch.float32, centred=centred, lean=True)
    for passed, launch in launches:
        if passed != "forward":
            assert inspect(launch).spilled_bytes == 0


def assert_one_wave(what: str, launch: Launch) -> None:
    """A persistent kernel prefetches; its programs are resident all at once, and at least half of what could be."""
    assert launch.arguments["STAGES"] >= 2
    found, planned = inspect(launch), math.prod(launch.grid) / H200.count
    assert found.resident / 2 <= planned <= found.resident, f"{what}: {planned} of {found.resident}"


@pytest.mark.every_nth(60)
@pytest.mark.skipif(not RECENT, reason="Triton 3.6 takes 138 and 164 registers for two of SiameseNorm's rows of 128")
@pytest.mark.parametrize("name", BOUNDARIES)
@pytest.mark.parametrize(
    ("dim", "streams", "centred"),
    [
        *((dim, torch.bfloat16, centred) for dim in (128, 512, 768, 4096, 8192) for centred in (False, True)),
        *((dim, torch.float32, False) for dim in (128, 512, 768, 4096, 8192)),
        *((dim, torch.float32, True) for dim in (512, 4096)),
    ],
    ids=str,
)
def test_persistent_programs_of_boundaries_are_resident(
    name: str, dim: int, streams: torch.dtype, centred: bool
) -> None:
    launches = boundary_launches(BOUNDARIES[name], dim, streams=streams, centred=centred, tokens=65_536)
    assert_one_wave(f"{name}, d={dim}, {streams}", next(launch for passed, launch in launches if passed == "backward"))


@pytest.mark.laws
@pytest.mark.parametrize("names", ["gain", "gain bias", "alpha beta gain"])
def test_persistent_programs_of_norms_are_resident(names: str) -> None:
    from siamesenorm.kernels.norm_triton import plan

    for rows in (torch.bfloat16, torch.float32):
        for dim in (128, 768, 2048, 4096, 16_384):
            weights = Weights(**{name: torch.empty(dim, device="meta") for name in names.split()})
            form = Form(0.0, 1, 1.0, "tanh", 1e-5, centred="bias" in names)
            _, *launches = plan(torch.empty(65_536, dim, dtype=rows, device="meta"), weights, form, H200)
            for launch in launches:
                assert_one_wave(f"{names}, d={dim}, {rows}, {launch.kernel.__name__}", launch)


def test_programs_fill_the_device() -> None:
    for dim in (64, 512, 2048, 4096, 8192, 16_384):
        for passed, launch in boundary_launches(BOUNDARIES["siamese mlp"], dim):
            warps = math.prod(launch.grid) * launch.warps
            assert warps >= 132 * 16 * 0.98, f"{passed} at {dim}"
