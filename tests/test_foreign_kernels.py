"""Kernels of other libraries beside our boundary, by stand-ins with their signatures: none runs without CUDA."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foreign_kernels import FOREIGN_KERNELS, measure_foreign_kernels
from siamesenorm.benchmark.boundary import BoundarySettings
from siamesenorm.benchmark.results import Results


def added_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    added = x.float() + residual.float()
    return F.rms_norm(added, weight.shape, weight, eps).to(x.dtype), added.to(dtype)


class Liger:
    """The addition is of the dtype of the output."""

    @staticmethod
    def apply(
        X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert (offset, casting_mode, in_place) == (0.0, "gemma", False)
        return added_norm(X, R, W, eps, X.dtype)


def with_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-6,
    prenorm: bool = False, residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert prenorm and bias is None and residual is not None
    return added_norm(x, residual, weight, eps, torch.float32 if residual_in_fp32 else x.dtype)


def quack(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None, residual_dtype: torch.dtype | None = None, eps: float = 1e-6,
    prenorm: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert prenorm and residual is not None and weight is not None and residual_dtype is not None
    return added_norm(x, residual, weight, eps, residual_dtype)


STAND_INS: dict[str, object] = {"liger": Liger, "flash-attn": with_residual, "fla": with_residual, "quack": quack}


def install(monkeypatch: pytest.MonkeyPatch, library: str, kernel: object) -> None:
    foreign = FOREIGN_KERNELS[library]
    module = foreign.modules[-1]
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), types.ModuleType(".".join(parts[:length])))
    setattr(sys.modules[module], foreign.name, kernel)


def measured(library: str, *, streams: str = "float32", output: str = "float32") -> Results:
    settings = BoundarySettings(
        dims=(16,), tokens=32, stream_dtypes=(streams,), output_dtype=output, candidates=("plain", "fused"), rounds=2
    )
    return measure_foreign_kernels(settings, torch.device("cpu"), (library,))


@pytest.mark.every_nth(3)
@pytest.mark.parametrize(("streams", "output"), [("float32", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("library", FOREIGN_KERNELS)
def test_pre_norm_is_measured_by_other_libraries(
    library: str, streams: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, library, STAND_INS[library])
    results = measured(library, streams=streams, output=output)
    assert results.not_measured == []
    assert [(row["topology"], row["candidate"]) for row in results.rows] == [
        ("pre", "plain"), ("pre", "fused"), ("pre", library),
    ]  # fmt: skip
    assert results.rows[2]["backward_ms"]["median"] > 0


@pytest.mark.every_nth(3)
@pytest.mark.parametrize("library", ["flash-attn", "fla", "quack"])
def test_streams_may_be_wider_than_outputs(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, library, STAND_INS[library])
    assert measured(library, output="bfloat16").not_measured == []


def without_gain(x: Tensor, weight: Tensor, *rest: object, **options: object) -> tuple[Tensor, Tensor]:
    h, added = with_residual(x, torch.ones_like(weight), *rest, **options)  # type: ignore[arg-type]
    return 2 * h, added


@pytest.mark.every_nth(3)
@pytest.mark.parametrize(
    ("library", "kernel", "output", "reason"),
    [
        ("liger", Liger, "bfloat16", "its stream is torch.bfloat16, where ours is torch.float32"),
        ("fla", without_gain, "float32", "its input differs from the formula by"),
        ("quack", None, "float32", "quack-kernels cannot be used"),
    ],
)
def test_another_function_is_not_measured(
    library: str, kernel: Callable[..., object] | None, output: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel is None:
        monkeypatch.setitem(sys.modules, "quack", None)
    else:
        install(monkeypatch, library, kernel)
    results = measured(library, output=output)
    assert library not in {row["candidate"] for row in results.rows}
    (noted,) = results.not_measured
    assert noted.startswith(f"pre, 16 float32, {library}: ") and reason in noted
