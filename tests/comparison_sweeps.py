"""Synthetic sweeps on disk, in the form that training leaves: plausible loss curves with a known truth behind them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.files import encode_json
from siamesenorm.training.verdict import judge

UNIGRAM_ENTROPY = 2.93
INITIAL_LOSS = 5.56
RATES = (2e-3, 8e-3, 3e-2)


@dataclass(frozen=True, kw_only=True)
class SyntheticMethod:
    """A method whose held-out loss at each rate is given, a word instead of a number where it goes wrong."""

    label: str
    losses: Sequence[float | str]
    attention_norm: str = "qk"
    norm: str = "rmsnorm"
    parameters: int = 1_648_000
    step_seconds: float = 0.142

    @property
    def topology(self) -> str:
        return self.label.partition(" ")[0].partition(":")[0]


PRE = SyntheticMethod(label="pre", losses=(1.640, 1.584, 1.602))
METHODS = (
    PRE,
    SyntheticMethod(label="pre + qkv", losses=(1.633, 1.571, 1.588), attention_norm="qkv-head",
                    parameters=1_648_384, step_seconds=0.148),
    SyntheticMethod(label="post", losses=(1.668, "rises", "not learned"), step_seconds=0.143),
    SyntheticMethod(label="deepnorm", losses=(1.731, 1.652, "not learned"), step_seconds=0.145),
    SyntheticMethod(label="hybridnorm", losses=(1.622, "rises", "not finite"), attention_norm="qkv-head"),
    SyntheticMethod(label="residual", losses=(1.659, "spiked 1.627", "spiked 1.745"), step_seconds=0.151),
    SyntheticMethod(label="dhc-2", losses=(1.631, 1.577, 1.593), parameters=1_664_500, step_seconds=0.231),
    SyntheticMethod(label="siamese-post-pre", losses=(1.628, 1.569, 1.586), parameters=1_650_304, step_seconds=0.163),
    SyntheticMethod(label="siamese", losses=(1.601, 1.541, 1.566), attention_norm="qkv-head", parameters=1_650_560,
                    step_seconds=0.166),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """One run to write; `until` is the step it was interrupted at."""

    method: SyntheticMethod
    rate: float
    seed: int
    wanted: float | str
    steps: int = 400
    until: int | None = None
    batch_tokens: int = 2048
    train_tokens: int = 2_214_000

    @property
    def identity(self) -> str:
        return f"{zlib.crc32(json.dumps(self.config(), sort_keys=True).encode()):08x}cafe"

    def config(self) -> dict[str, Any]:
        return {
            "task": {"tag": "language", "digest": "5f1c0a7be2", "model": {
                "depth": 8, "dim": 128, "heads": 4, "kv_heads": 4, "hidden": 512,
                "vocabulary": 257, "context": 256, "attention_norm": self.method.attention_norm,
                "topology": {"name": self.method.topology, "options": self.method.label.partition(":")[2]},
                "norm": {"name": self.method.norm, "eps": 1e-5},
            }},
            "optimizer": {"learning_rate": self.rate, "warmup_steps": self.steps // 10},
            "steps": self.steps, "batch": self.batch_tokens // 256, "seed": self.seed, "precision": "float32",
        }  # fmt: skip


def runs_of(
    methods: Iterable[SyntheticMethod] = METHODS,
    rates: Sequence[float] = RATES,
    seeds: Sequence[int] = (0,),
    **facts: Any,
) -> list[SyntheticRun]:
    """Return the full grid of runs."""
    return [
        SyntheticRun(method=method, rate=rate, seed=seed, wanted=loss, **facts)
        for method in methods
        for rate, loss in zip(rates, method.losses, strict=False)
        for seed in seeds
    ]


def realistic_runs(steps: int = 400) -> list[SyntheticRun]:
    """Return what a real comparison has: seed 0 everywhere, five seeds where it matters, one run interrupted."""
    more_seeds = {"pre", "dhc-2", "hybridnorm", "siamese", "siamese-post-pre"}
    runs = runs_of(seeds=range(3), steps=steps) + [
        run for run in runs_of(seeds=(3, 4), steps=steps) if run.method.label in more_seeds and run.rate == 8e-3
    ]
    return [*runs[:-1], replace(runs[-1], until=int(0.6 * steps))]


def write_sweep(path: Path, runs: Sequence[SyntheticRun], *, missing: Sequence[str] = (), **description: Any) -> Path:
    """Write a sweep directory with its runs."""
    for run in runs:
        write_run(path / "runs" / run.identity, run)
    content = {
        "schema": 1,
        "data": {
            "source": "the built-in corpus", "digest": "5f1c0a7be2",
            "tokenizer": {"kind": "bytes", "name": "bytes", "vocabulary": 257, "end_of_text": 256},
        },
        "runs": [f"runs/{run.identity}" for run in runs] + [f"runs/{name}" for name in missing],
        "grid": {"learning_rates": sorted({run.rate for run in runs})},
        "command": "siamesenorm sweep --data builtin --learning-rates 2e-3 8e-3 3e-2 --seeds 0 1 2",
    } | description  # fmt: skip
    (path / "sweep.json").write_text(json.dumps(content))
    return path


def write_run(path: Path, run: SyntheticRun) -> None:
    """Write a run directory as training does; an interrupted one has no end and no verdict."""
    path.mkdir(parents=True)
    records = list(_records(run))
    (path / "config.json").write_text(encode_json(run.config()))
    (path / "environment.json").write_text(
        encode_json({"python": "3.11.7", "torch": "2.13.0+cpu", "cores": 2, "commit": None, "accelerators": []})
    )
    (path / "metrics.jsonl").write_text("".join(encode_json(record) + "\n" for record in records))
    if records[-1]["kind"] == "end":
        (path / "verdict.json").write_text(encode_json(judge(records).to_json()))


def _records(run: SyntheticRun) -> Iterable[dict[str, Any]]:
    losses, norms = _curves(run)
    held_out = _held_out(run)
    yield {
        "kind": "model", "label": run.method.label, "attention_norm": run.method.attention_norm,
        "parameters": run.method.parameters, "non_embedding_parameters": run.method.parameters - 65_792,
        "flops_per_sample": 256 * 6.0 * run.method.parameters, "floor": UNIGRAM_ENTROPY, "scale": 1.0,
        "steps": run.steps, "warmup_steps": run.steps // 10, "batch": run.batch_tokens // 256,
        "items_per_sample": 256, "train_items": run.train_tokens,
    }  # fmt: skip
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        seconds = run.method.step_seconds * (1.0 if step % 3 else 1.8)  # every third step is disturbed by a neighbour
        yield {
            "kind": "train", "step": step, "samples": step * run.batch_tokens // 256, "loss": float(loss),
            "learning_rate": run.rate, "gradient_norm": float(norm), "time": step * seconds, "step_seconds": seconds,
        }  # fmt: skip
        if step % (run.steps // 4) == 0:
            validation = held_out + 1.2 * (1 - step / run.steps) if np.isfinite(loss) else float("nan")
            yield {"kind": "validation", "step": step, "loss": validation, "items": 65536, "time": step * seconds}
    if run.until is None:
        status = "finished" if len(losses) == run.steps else "stopped_early"
        yield {"kind": "end", "step": len(losses), "status": status, "time": 120.1, "peak_memory_bytes": 612 * 2**20}


def _held_out(run: SyntheticRun) -> float:
    """Return the loss wanted, moved by what all methods share on a seed and by a little of the method's own."""
    if isinstance(run.wanted, str) and not run.wanted.startswith("spiked"):
        return 3.1 if run.wanted != "rises" else 1.7
    wanted = float(str(run.wanted).removeprefix("spiked"))
    shared = 0.012 * np.random.default_rng([1, run.seed]).standard_normal()
    own = np.random.default_rng([2, run.seed, zlib.crc32(f"{run.method}{run.rate}".encode())])
    return float(wanted + shared + 0.003 * own.standard_normal())


def _curves(run: SyntheticRun) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses and gradient norms of all steps done."""
    steps = np.arange(1, run.steps + 1)
    data = np.random.default_rng([3, run.seed]).standard_normal(run.steps)
    own = np.random.default_rng([4, run.seed, zlib.crc32(run.identity.encode())]).standard_normal((2, run.steps))
    progress = steps / run.steps
    floor = _held_out(run)
    losses = floor + (INITIAL_LOSS - floor) * np.exp(-progress * 22) + 0.75 * (1 - progress) ** 2.2 * np.exp(-progress)
    if run.wanted == "not learned":
        losses = np.maximum(losses - 0.14, 2.96)
    losses = losses * (1 + 0.022 * data + 0.004 * own[0])
    norms = np.exp(0.35 * own[1]) * (0.28 + 2.5 * np.exp(-progress * 30))
    if run.wanted in ("rises", "not finite"):
        start = int(0.35 * run.steps)
        losses[start:] += 1.6 * (1 - np.exp(-(steps[start:] - start) / (0.03 * run.steps)))
        norms[start:] *= 40
    if run.wanted == "not finite":
        losses[run.steps // 2 :] = np.nan
        norms[run.steps // 2 :] = np.inf
    if str(run.wanted).startswith("spiked"):
        for start in (int(0.45 * run.steps), int(0.71 * run.steps)):
            losses[start : start + 4] += 1.1
            norms[start : start + 4] *= 15
    done = run.until or (run.steps // 2 + 20 if run.wanted == "not finite" else run.steps)
    return losses[:done], norms[:done]
