"""bench norms: fused SeeDNorm against fused RMSNorm, each also plain and compiled; the reference is a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siamesenorm.benchmark.measurement import (
    NO_DEADLINE,
    Action,
    CacheFlush,
    Deadline,
    Expected,
    Timings,
    allow_kept_graphs,
    allow_many_graphs,
    copy_action,
    current,
    measure,
    milliseconds,
    perturb,
    random_like,
    ratio,
    resolve_device,
    rounded,
    share_of_copy_rate,
)
from siamesenorm.benchmark.results import Progress, Results, Row, measuring
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


def measure_norms(
    settings: NormSettings,
    device_name: str = "auto",
    deadline: Deadline = NO_DEADLINE,
    progress: Progress = lambda results: None,
) -> Results:
    """Measure every operator in every way at every width, as ratios to RMSNorm computed the same way.

    `progress` is called with the results so far after each width. A failure is noted, and the rest is measured.
    """
    device = resolve_device(device_name)
    results = Results(benchmark="norms", device=str(device), settings=vars(settings))
    with allow_many_graphs(), allow_kept_graphs():
        for dim in settings.dims:
            with current(device), measuring(f"norms, {dim}", results.not_measured):
                deadline.check()
                results.rows.extend(measure_width(dim, settings, device, results.not_measured, deadline))
            progress(results)
    return results


def measure_width(
    dim: int, settings: NormSettings, device: torch.device, missing: list[str], deadline: Deadline
) -> list[Row]:
    """Return a row for each operator and candidate at one width; add to `missing` what cannot be measured."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    x = random_like(torch.empty(settings.tokens, dim, dtype=dtype, device=device), 0).requires_grad_()
    actions: dict[str, Action] = {"copy": copy_action(device)}
    built: list[tuple[str, str]] = []
    for name in settings.norms:
        exact = values_of(build(name, "plain", x), x.detach().double().requires_grad_())
        expected = Expected.of(exact, values_of(build(name, "plain", x), x), dtype)
        for candidate in settings.candidates:
            with measuring(f"{name}, {dim}, {candidate}", missing):
                deadline.check()
                norm = build(name, candidate, x)
                expected.check(values_of(norm, x))
                passes = passes_of(norm, x)
                for run in passes.values():
                    run()
                actions |= {f"{candidate} {name} {direction}": run for direction, run in passes.items()}
                built.append((name, candidate))
    flush = CacheFlush(device) if device.type == "cuda" else None
    timings = measure(actions, device=device, rounds=settings.rounds, prepare=flush, deadline=deadline)
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
        row[f"{direction}_ms"] = milliseconds(timings, f"{name} {direction}")
        row[f"{direction}_share_of_copy_rate"] = share_of_copy_rate(timings, f"{name} {direction}", count * size)
        if f"{reference} {direction}" in timings:
            row[f"{direction}_to_rmsnorm"] = ratio(timings, f"{name} {direction}", f"{reference} {direction}")
    return rounded(row)


def build(name: str, candidate: str, x: Tensor) -> Norm:
    """Return the norm for x as the candidate computes it."""
    norm = build_norm(name, x.shape[-1]).to(x.device)
    perturb(norm)
    norm.kernels = "fused" if candidate == "fused" else "plain"
    if candidate == "compiled":
        norm.compile(fullgraph=True, dynamic=False)
    return norm


def values_of(norm: Norm, x: Tensor) -> dict[str, Tensor]:
    """Return the norm of x and all gradients."""
    inputs = {"x": x, **dict(norm.named_parameters())}
    y = norm(x)
    gradients = torch.autograd.grad(y, list(inputs.values()), random_like(y, 1))
    return {"output": y.detach()} | {f"gradient of {k}": one for k, one in zip(inputs, gradients, strict=True)}


def passes_of(norm: Norm, x: Tensor) -> dict[str, Action]:
    """Return the forward pass with what it keeps, and the backward pass of a graph made once."""
    y = norm(x)
    inputs, gradient = [x, *norm.parameters()], random_like(y, 1)

    def back() -> None:
        torch.autograd.grad(y, inputs, gradient, retain_graph=True)

    return {"forward": lambda: norm(x), "backward": back}
