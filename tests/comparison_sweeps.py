"""Synthetic sweeps on disk, in the form that training leaves: plausible loss curves with a known truth behind them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.comparison.experiment_plan import ExperimentPlan, Part, PlannedRun, write_plan
from siamesenorm.comparison.sweep_grid import comparisons_of, configured, normalised
from siamesenorm.files import encode_json
from siamesenorm.models.language import language_model_config
from siamesenorm.tasks.language import LanguageTask, LanguageTaskConfig
from siamesenorm.training.config import RunConfig
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import judge

FLOOR = 2.93
INITIAL_LOSS = 5.56
RATES = (2e-3, 8e-3, 3e-2)


@dataclass(frozen=True, kw_only=True)
class SyntheticMethod:
    """A method whose held-out loss at each rate is given, a word instead of a number where it goes wrong."""

    label: str
    losses: Sequence[float | str]
    parameters: int = 1_648_000
    step_seconds: float = 0.142


PRE = SyntheticMethod(label="pre", losses=(1.640, 1.584, 1.602))
METHODS = (
    PRE,
    SyntheticMethod(label="pre + qkv", losses=(1.633, 1.571, 1.588),
                    parameters=1_648_384, step_seconds=0.148),
    SyntheticMethod(label="post", losses=(1.668, "rises", "not learned"), step_seconds=0.143),
    SyntheticMethod(label="deepnorm", losses=(1.731, 1.652, "not learned"), step_seconds=0.145),
    SyntheticMethod(label="hybridnorm", losses=(1.622, "rises", "not finite")),
    SyntheticMethod(label="residual", losses=(1.659, "spiked 1.627", "spiked 1.745"), step_seconds=0.151),
    SyntheticMethod(label="dhc-2", losses=(1.631, 1.577, 1.593), parameters=1_664_500, step_seconds=0.231),
    SyntheticMethod(label="siamese-post-pre", losses=(1.628, 1.569, 1.586), parameters=1_650_304, step_seconds=0.163),
    SyntheticMethod(label="siamese", losses=(1.601, 1.541, 1.566), parameters=1_650_560,
                    step_seconds=0.166),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """One run to write; `until` is the step at which it was interrupted."""

    method: SyntheticMethod
    rate: float
    seed: int
    wanted: float | str
    steps: int = 400
    until: int | None = None
    train_tokens: int = 2_214_000
    accuracy: bool = False

    @property
    def identity(self) -> str:
        return self.config().identity[:12]

    def config(self) -> RunConfig:
        return configured(template(self.steps), self.method.label, self.rate, self.seed)

    def planned(self) -> PlannedRun:
        label = normalised(self.method.label)
        part = Part.SELECTION if self.seed == 0 else Part.REPORT
        return PlannedRun(method=label, learning_rate=self.rate, seed=self.seed, part=part, label=label)


def template(steps: int = 400) -> RunConfig:
    """Return the run from which all are made; its data need not exist."""
    model = language_model_config("mini", topology="pre", dim=128, hidden=512, context=256, vocabulary=257)
    return RunConfig(
        task=LanguageTaskConfig(data=Path("data"), digest="5f1c0a7be2" * 6, model=model),
        steps=steps,
        batch=8,
        optimizer=OptimizerConfig(warmup_steps=steps // 10),
    )


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


def write_sweep(
    path: Path, runs: Sequence[SyntheticRun], *, missing: Sequence[str] = (), jobs: int = 1, **changes: Any
) -> Path:
    """Write a sweep's directory with its runs; `missing` are planned runs that do not exist."""
    for run in runs:
        write_run(path / "runs" / run.identity, run)
    planned = {run.identity: run.planned() for run in runs}
    absent = PlannedRun(method="pre", learning_rate=2e-3, seed=9, part=Part.REPORT, label="pre")
    methods = tuple(dict.fromkeys(run.method for run in planned.values()))
    plan = ExperimentPlan(
        command="siamesenorm sweep --data builtin --learning-rates 2e-3 8e-3 3e-2 --seeds 0 1 2",
        data={"name": "the built-in corpus", "details": "tokenizer bytes (vocabulary 257)"},
        runs=planned | dict.fromkeys(missing, absent),
        comparisons=comparisons_of(methods, template()),
        jobs=jobs,
    )
    path.mkdir(parents=True, exist_ok=True)
    write_plan(path, replace(plan, **changes))
    return path


def write_run(path: Path, run: SyntheticRun) -> None:
    """Write a run directory as training does; an interrupted one has no end and no verdict."""
    directory = RunDirectory(path)
    directory.prepare(run.config())
    records = list(_records(run))
    environment = {"python": "3.11.7", "torch": "2.13.0+cpu", "cores": 2, "commit": None, "accelerators": []}
    directory.environment_file.write_text(encode_json({**environment, "kernels": "plain", "compiled": False}))
    directory.metrics_file.write_text("".join(encode_json(record) + "\n" for record in records))
    if records[-1]["kind"] == "end":
        directory.write_verdict(judge(records))


def _records(run: SyntheticRun) -> Iterable[dict[str, Any]]:
    losses, norms = _curves(run)
    held_out = _held_out(run)
    metrics = [metric.to_json() for metric in LanguageTask.metrics]
    if run.accuracy:
        metrics[1] = {"name": "accuracy", "direction": "higher", "format": ".1%", "label": "accuracy", "of_loss": ""}
    yield {
        "kind": "model", "label": run.method.label,
        "attention_norm": run.config().task.model.attention_shape.attention_norm,
        "parameters": run.method.parameters, "non_embedding_parameters": run.method.parameters - 65_792,
        "flops_per_sample": 256 * 6 * run.method.parameters, "floor": FLOOR, "scale": 1.0, "unit": "nats/token",
        "item": "token", "items_per_sample": 256, "metrics": metrics, "steps": run.steps,
        "warmup_steps": run.steps // 10, "batch": 8, "train_items": run.train_tokens,
    }  # fmt: skip
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        seconds = run.method.step_seconds * (1.0 if step % 3 else 1.8)  # every third step is disturbed by a neighbour
        yield {
            "kind": "train", "step": step, "samples": 8 * step, "loss": float(loss),
            "learning_rate": run.rate, "gradient_norm": float(norm), "time": step * seconds, "step_seconds": seconds,
        }  # fmt: skip
        if step % (run.steps // 4) == 0:
            validation = held_out + 1.2 * (1 - step / run.steps) if np.isfinite(loss) else float("nan")
            accuracy = {"accuracy": float(np.exp(-validation))} if run.accuracy else {}
            yield {"kind": "validation", "step": step, "loss": validation, **accuracy, "time": step * seconds}
    if run.until is None:
        status = "finished" if len(losses) == run.steps else "stopped_early"
        yield {"kind": "end", "step": len(losses), "status": status, "time": 120.1, "peak_memory_bytes": 612 * 2**20}


def _held_out(run: SyntheticRun) -> float:
    """Return the loss wanted, moved by what all methods share on a seed and by a little of the method's own."""
    if isinstance(run.wanted, str) and not run.wanted.startswith("spiked"):
        return 3.1 if run.wanted != "rises" else 1.7
    wanted = float(str(run.wanted).removeprefix("spiked"))
    shared = 0.012 * np.random.default_rng([1, run.seed]).standard_normal()
    own = np.random.default_rng([2, run.seed, zlib.crc32(f"{run.method.label}{run.rate}".encode())])
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
