"""bench norms: fused SeeDNorm against fused RMSNorm, each also plain and compiled; the yardstick is a copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from siamesenorm.benchmark.results import Results, Row, noting
from siamesenorm.benchmark.timing import (
    NO_DEADLINE,
    CacheFlush,
    Deadline,
    Spread,
    Timings,
    allow_many_graphs,
    copy_action,
    measure,
    ratio,
    resolve_device,
    rounded,
    share_of_copy_rate,
)
from siamesenorm.norms import Norm, build_norm

REFERENCE = "rmsnorm"
PASSES = {"forward": 2, "backward": 3}
"""Reads and writes of the tensor in an ideal kernel: x and y; x, dy and dx."""


@dataclass(frozen=True, kw_only=True)
class NormSettings:
    """Operators, ways to compute them, widths, tokens, dtype, rounds."""

    norms: tuple[str, ...] = (REFERENCE, "layernorm", "seednorm", "seednorm:heads=16")
    candidates: tuple[str, ...] = ("plain", "compiled", "fused")
    dims: tuple[int, ...] = (2048, 1024, 4096)
    tokens: int = 16384
    dtype: str = "bfloat16"
    rounds: int = 30


def settings_for(device: torch.device) -> NormSettings:
    """Return what is measured on a device: three widths in bf16 on CUDA, one in fp32 on a CPU."""
    return (
        NormSettings() if device.type == "cuda" else NormSettings(dims=(512,), tokens=8192, dtype="float32", rounds=15)
    )


def measure_norms(settings: NormSettings, device_name: str = "auto", deadline: Deadline = NO_DEADLINE) -> Results:
    """Measure every operator in every way at every width, as ratios to RMSNorm computed the same way."""
    device = resolve_device(device_name)
    rows: list[Row] = []
    missing: list[str] = []
    with allow_many_graphs():
        for dim in settings.dims:
            with noting(missing, f"norms, {dim}"):
                deadline.check()
                rows.extend(measure_width(dim, settings, device, missing, deadline))
    return Results(benchmark="norms", device=str(device), settings=vars(settings), rows=rows, not_measured=missing)


def measure_width(
    dim: int, settings: NormSettings, device: torch.device, missing: list[str], deadline: Deadline
) -> list[Row]:
    """Return a row for each operator and candidate at one width, and add to `missing` what cannot be measured."""
    dtype = getattr(torch, settings.dtype)
    x = torch.randn(settings.tokens, dim, device=device).to(dtype).requires_grad_()
    gradient = torch.randn_like(x)
    actions: dict[str, Callable[[], object]] = {"copy": copy_action(device)}
    built: list[tuple[str, str]] = []
    for name, candidate in itertools.product(settings.norms, settings.candidates):
        with noting(missing, f"{name}, {dim}, {candidate}"):
            deadline.check()
            run = prepared(build_norm(name, dim).to(device), candidate)
            actions.update(passes(f"{candidate} {name}", run, x, gradient))
            built.append((name, candidate))
    flush = CacheFlush(device) if device.type == "cuda" else None
    timings = measure(actions, device=device, rounds=settings.rounds, prepare=flush)
    size = x.numel() * x.element_size()
    return [
        {"norm": name, "dim": dim, "dtype": settings.dtype, "candidate": candidate}
        | describe(f"{candidate} {name}", f"{candidate} {REFERENCE}", timings, size)
        for name, candidate in built
    ]


def describe(name: str, reference: str, timings: Timings, size: int) -> Row:
    """Return times, shares of the copy rate and ratios to the reference of both passes over `size` bytes."""
    row: Row = {}
    for direction, count in PASSES.items():
        seconds = timings[f"{name} {direction}"]
        row[f"{direction}_ms"] = Spread.of([1e3 * one for one in seconds])
        row[f"{direction}_share_of_copy_rate"] = share_of_copy_rate(count * size, seconds, timings["copy"])
        if f"{reference} {direction}" in timings:
            row[f"{direction}_to_rmsnorm"] = ratio(timings, f"{name} {direction}", f"{reference} {direction}")
    return rounded(row)


def prepared(norm: Norm, candidate: str) -> Callable[[Tensor], Tensor]:
    """Return the norm as the candidate computes it."""
    norm.kernels = "fused" if candidate == "fused" else "plain"
    if candidate == "compiled":
        norm.compile(fullgraph=True, dynamic=False)
    return norm


def passes(name: str, norm: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> dict[str, Callable[[], object]]:
    """Return the forward pass, without a graph, and the backward pass of a graph made once."""
    y = norm(x)
    inputs = [x, *norm.parameters()] if isinstance(norm, Norm) else [x]

    def ahead() -> None:
        with torch.no_grad():
            norm(x)

    def back() -> None:
        torch.autograd.grad(y, inputs, gradient, retain_graph=True)

    return {f"{name} forward": ahead, f"{name} backward": back}
