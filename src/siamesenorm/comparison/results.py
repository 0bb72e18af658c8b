"""What the runs of a sweep left on disk, read back: a `RunResult` a run directory, `SweepResults` a sweep directory.

Reading a sweep never fails because of one run: a run that has not ended has the status `unfinished`, and one that has
not been started or cannot be read is listed as missing, with the reason. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json
from siamesenorm.training.metrics import read_bytes, read_metrics
from siamesenorm.training.verdict import Verdict, judge

FINISHED, STOPPED_EARLY, UNFINISHED = "finished", "stopped_early", "unfinished"
STABLE, SPIKED, NOT_LEARNED, DIVERGED = "stable", "spiked", "not learned", "diverged"
QKV_NORM = "qkv-head"
FINAL_FRACTION = 0.1
"""The last part of the steps whose mean training loss is the training loss of a run."""

FloatArray = npt.NDArray[np.float64]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What is compared: one model configuration, by a name that no other method of its sweep has."""

    name: str
    topology: str
    norm: str
    attention_norm: str
    specification: tuple[tuple[str, str], ...]

    @property
    def normalises_values(self) -> bool:
        """Whether its attention has QKV-norm, which `pre` must then have too in a control row."""
        return self.attention_norm == QKV_NORM


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """One value a training step."""

    steps: FloatArray
    values: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunResult:
    """One run: what was run, how it ended, what it reached and what it cost; losses in nats per token."""

    path: Path
    method: Method
    learning_rate: float
    seed: int
    status: str
    verdict: Verdict | None
    train_loss: float | None
    held_out_loss: float | None
    held_out_step: int | None
    steps: int
    steps_done: int
    batch_tokens: int | None
    train_tokens_available: int | None
    parameters: int | None
    flops_per_token: float | None
    step_seconds: float | None
    peak_memory_bytes: int | None
    unigram_entropy: float | None
    losses: Curve = field(repr=False)
    gradient_norms: Curve = field(repr=False)
    config: Record = field(repr=False)
    environment: Record = field(repr=False)

    @property
    def complete(self) -> bool:
        """Whether the run has ended: finished, or stopped early because it diverged."""
        return self.status in (FINISHED, STOPPED_EARLY)

    @property
    def word(self) -> str | None:
        """The word of its verdict."""
        return None if self.verdict is None else self.verdict.label

    @property
    def diverged(self) -> bool:
        """Whether it diverged or has not learned."""
        return self.word in (DIVERGED, NOT_LEARNED)

    @property
    def converged(self) -> bool:
        """Whether it ended without diverging and has a held-out loss: only such runs have a result."""
        loss = self.held_out_loss
        return self.complete and not self.diverged and loss is not None and math.isfinite(loss)

    @property
    def score(self) -> float:
        """The held-out loss that it is compared by: infinite where the run has no result."""
        return self.held_out_loss if self.converged and self.held_out_loss is not None else math.inf

    @property
    def train_perplexity(self) -> float | None:
        """The exponential of the training loss; None where there is none, or it is no number a double holds."""
        return _perplexity(self.train_loss)

    @property
    def held_out_perplexity(self) -> float | None:
        """The same of the held-out loss."""
        return _perplexity(self.held_out_loss)

    @property
    def passes_over_data(self) -> float | None:
        """How often the planned steps go over the training data; None where the record does not say."""
        if self.batch_tokens is None or not self.train_tokens_available:
            return None
        return self.batch_tokens * self.steps / self.train_tokens_available

    @property
    def saw_data_at_most_once(self) -> bool | None:
        """Whether the run asked for no more tokens than the data has; None where the record does not say."""
        return None if self.passes_over_data is None else self.passes_over_data <= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRun:
    """A run that the sweep names and that has not been started, or cannot be read."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResults:
    """The runs of one sweep, with what `sweep.json` says of them."""

    path: Path
    runs: tuple[RunResult, ...]
    missing: tuple[MissingRun, ...]
    data: Record
    command: str | None
    selection_seed: int

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods in the order of the sweep."""
        return tuple({run.method: None for run in self.runs})

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates, ascending."""
        return tuple(sorted({run.learning_rate for run in self.runs}))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, ascending."""
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def unfinished(self) -> tuple[RunResult, ...]:
        """The runs that have not ended."""
        return tuple(run for run in self.runs if not run.complete)


def read_run(path: Path) -> RunResult:
    """Read one run directory; raise `UserError` where its configuration is absent or not as written by a run."""
    config = _read_json(path / "config.json")
    environment = _read_json(path / "environment.json") if (path / "environment.json").exists() else {}
    records = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    verdict = _verdict(path / "verdict.json", records) if _last(records, "end") else None
    try:
        return _run_result(path, config, environment, records, verdict)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a run this version can read ({error}): train it again") from error


def read_sweep(path: Path) -> SweepResults:
    """Read a sweep directory with all its runs; raise `UserError` where it is not one or nothing has started."""
    if not (path / "sweep.json").exists():
        raise UserError(f"{path} has no sweep.json: name the directory that `siamesenorm sweep` wrote")
    description = _read_json(path / "sweep.json")
    runs: list[RunResult] = []
    missing: list[MissingRun] = []
    for name in description.get("runs", []):
        run_path = path / name
        if not (run_path / "metrics.jsonl").exists():
            missing.append(MissingRun(path=run_path, reason="not started"))
            continue
        try:
            runs.append(read_run(run_path))
        except UserError as error:
            missing.append(MissingRun(path=run_path, reason=str(error).replace(f"{run_path}/", "")))
    if not runs:
        raise UserError(f"no run of {path} has started: run `siamesenorm sweep` before the report")
    return SweepResults(
        path=path,
        runs=_with_distinct_names(runs),
        missing=tuple(missing),
        data=description.get("data") or {},
        command=description.get("command"),
        selection_seed=_selection_seed(runs, (description.get("grid") or {}).get("selection_seed")),
    )


def undisturbed_step_seconds(seconds: Sequence[float]) -> float | None:
    """Return the median over the faster half of the steps: the half that compilation and neighbours left alone."""
    if not seconds:
        return None
    return float(np.median(sorted(seconds)[: (len(seconds) + 1) // 2]))


def _run_result(
    path: Path, config: Record, environment: Record, records: Sequence[Record], verdict: Verdict | None
) -> RunResult:
    model, validation, end = (_last(records, kind) for kind in ("model", "validation", "end"))
    train = [record for record in records if record.get("kind") == "train"]
    losses = _curve(train, "loss")
    steps = int(model.get("steps", config["steps"]))
    return RunResult(
        path=path,
        method=_method(config, model),
        learning_rate=float(config["optimizer"]["learning_rate"]),
        seed=int(config["seed"]),
        status=str(end.get("status", UNFINISHED)),
        verdict=verdict,
        train_loss=_final_mean(losses, steps),
        held_out_loss=_number(validation.get("loss")),
        held_out_step=_integer(validation.get("step")),
        steps=steps,
        steps_done=len(train),
        batch_tokens=_product(config["batch"], model.get("items_per_sample")),
        train_tokens_available=_integer(model.get("train_items")),
        parameters=_integer(model.get("parameters")),
        flops_per_token=_ratio(model.get("flops_per_sample"), model.get("items_per_sample")),
        step_seconds=undisturbed_step_seconds([float(record["step_seconds"]) for record in train]),
        peak_memory_bytes=_integer(end.get("peak_memory_bytes")),
        unigram_entropy=_number(model.get("floor")),
        losses=losses,
        gradient_norms=_curve(train, "gradient_norm"),
        config=config,
        environment=environment,
    )


def _last(records: Sequence[Record], kind: str) -> Record:
    """Return the last record of a kind, or an empty one."""
    return next((record for record in reversed(records) if record.get("kind") == kind), {})


def _verdict(file: Path, records: Sequence[Record]) -> Verdict:
    """Return the verdict stored with the run, else the one its record gives."""
    return Verdict.from_json(_read_json(file)) if file.exists() else judge(records)


def _method(config: Record, model: Record) -> Method:
    """Return the method of a run: its record names it."""
    configured = config["task"]["model"]
    return Method(
        name=str(model.get("label") or configured["topology"]["name"]),
        topology=str(configured["topology"]["name"]),
        norm=str(configured["norm"]["name"]),
        attention_norm=str(model.get("attention_norm") or configured.get("attention_norm", "auto")),
        specification=tuple(sorted(_flattened(configured))),
    )


def _flattened(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield every leaf of a nested configuration as its dotted name and its JSON text."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flattened(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(inner, sort_keys=True)


def _with_distinct_names(runs: Sequence[RunResult]) -> tuple[RunResult, ...]:
    """Add to the name of every method that shares it with another what tells them apart."""
    alike: dict[str, set[Method]] = {}
    for run in runs:
        alike.setdefault(run.method.name, set()).add(run.method)
    renamed = {
        method: replace(method, name=" · ".join([name, *_distinguishing_parts(method, methods)]))
        for name, methods in alike.items()
        for method in methods
    }
    return tuple(replace(run, method=renamed[run.method]) for run in runs)


def _distinguishing_parts(method: Method, alike: Iterable[Method]) -> list[str]:
    common = set.intersection(*(set(other.specification) for other in alike))
    own = [(key, json.loads(text)) for key, text in method.specification if (key, text) not in common]
    return [str(value) if key.endswith("name") else f"{key.rpartition('.')[2]}={value}" for key, value in own]


def _selection_seed(runs: Sequence[RunResult], named: int | None) -> int:
    """Return the seed that chooses the rates: the one the sweep names, else the one run most often, then the lowest."""
    if named is not None:
        return int(named)
    count = Counter(run.seed for run in runs)
    return min(count, key=lambda seed: (-count[seed], seed))


def _curve(records: Sequence[Record], key: str) -> Curve:
    kept = [record for record in records if record.get(key) is not None]
    return Curve(
        steps=np.array([float(record["step"]) for record in kept]),
        values=np.array([float(record[key]) for record in kept]),
    )


def _final_mean(losses: Curve, steps: int) -> float | None:
    """Return the mean over the last tenth of the planned steps, or None where the run did not get to its end."""
    if not len(losses.steps) or losses.steps[-1] < steps:
        return None
    final = losses.values[losses.steps > steps - max(1, math.floor(FINAL_FRACTION * steps))]
    return float(np.mean(final))


def _read_json(path: Path) -> dict[str, Any]:
    text = read_bytes(path)
    try:
        content = decode_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): train this run again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object: train this run again")
    return content


def _perplexity(loss: float | None) -> float | None:
    return math.exp(loss) if loss is not None and loss < 700.0 else None  # e^709 is the largest double


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def _product(*values: Any) -> int | None:
    return None if None in values else math.prod(values)


def _ratio(value: Any, by: Any) -> float | None:
    return None if value is None or not by else float(value) / float(by)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
