"""bench norms: fused SeeDNorm against fused RMSNorm, each also plain and compiled; the reference is a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siamesenorm.benchmark import measurement
from siamesenorm.benchmark.measurement import Passes, random_like, ratio
from siamesenorm.benchmark.results import Results, Row, Session
from siamesenorm.norms import Norm, build_norm

REFERENCE = "rmsnorm"
TRANSFERS = {"forward": 2, "backward": 3}
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
    if device.type == "cuda":
        return NormSettings()
    return NormSettings(dims=(512,), tokens=8192, dtype="float32", rounds=15)


def measure_norms(session: Session[NormSettings]) -> Results:
    """Measure every operator in every way at every width, as ratios to RMSNorm computed the same way."""
    for dim in session.settings.dims:
        with session.part(f"norms, {dim}") as rows, measurement.allow_kept_graphs():
            session.check_time()
            rows.extend(measure_width(dim, session))
    return session.results


def measure_width(dim: int, session: Session[NormSettings]) -> list[Row]:
    """Return a row for each operator and candidate at one width that can be measured."""
    settings = session.settings
    dtype: torch.dtype = getattr(torch, settings.dtype)
    x = random_like(torch.empty(settings.tokens, dim, dtype=dtype, device=session.device), 0).requires_grad_()
    passes: dict[str, Passes] = {}
    built: list[tuple[str, str]] = []
    for name in settings.norms:
        with session.noting(f"{name}, {dim}"):
            exact = values_of(build(name, "plain", x), x.detach().double().requires_grad_())
            plain = values_of(build(name, "plain", x), x)
            for candidate in settings.candidates:
                with session.noting(f"{name}, {dim}, {candidate}"):
                    session.check_time()
                    norm = build(name, candidate, x)
                    measurement.check_agreement(values_of(norm, x), exact, plain, dtype)
                    passes[f"{candidate} {name}"] = passes_of(norm, x)
                    built.append((name, candidate))
    timings = measurement.measure_passes(passes, session.device, settings.rounds, session.deadline)
    traffic = {direction: count * x.numel() * x.element_size() for direction, count in TRANSFERS.items()}
    rows = []
    for name, candidate in built:
        row: Row = {"norm": name, "dim": dim, "dtype": settings.dtype, "candidate": candidate}
        row |= measurement.describe_passes(timings, f"{candidate} {name}", traffic)
        if f"{candidate} {REFERENCE}" in passes:
            for direction in TRANSFERS:
                ours, reference = (f"{candidate} {each} {direction}" for each in (name, REFERENCE))
                row[f"{direction}_to_rmsnorm"] = ratio(timings, ours, reference)
        rows.append(row)
    return rows


def build(name: str, candidate: str, x: Tensor) -> Norm:
    """Return the norm for x as the candidate computes it."""
    norm = build_norm(name, x.shape[-1]).to(x.device)
    measurement.perturb(norm)
    norm.kernels = "fused" if candidate == "fused" else "plain"
    if candidate == "compiled":
        norm.compile(fullgraph=True, dynamic=False)
    return norm


def values_of(norm: Norm, x: Tensor) -> dict[str, Tensor]:
    """Return the norm of x and all gradients."""
    y = norm(x)
    inputs = {"x": x, **dict(norm.named_parameters())}
    return {"output": y.detach()} | measurement.named_gradients([y], inputs, [random_like(y, 1)])


def passes_of(norm: Norm, x: Tensor) -> Passes:
    """Return the forward pass with what it keeps, and the backward pass of a graph made once."""
    y = norm(x)
    return measurement.run_passes(lambda: norm(x), [y], [x, *norm.parameters()], [random_like(y, 1)])
