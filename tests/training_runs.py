"""Tiny prepared data and tiny runs: what the tests of training, resuming, sweeps and the command line share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from siamesenorm.data import Manifest, Split, TokenizerEntry
from siamesenorm.models.language import language_model_config
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import Instrument, TrainingLoop, train
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.run_record import TIME_FIELDS, read_metrics

VOCABULARY, END_OF_TEXT, CONTEXT = 17, 16, 16
TINY = {"depth": 2, "dim": 16, "heads": 2, "hidden": 32, "context": CONTEXT, "vocabulary": 0}


def structured_tokens(count: int, seed: int) -> np.ndarray:
    """Return documents of about 40 ids that count upwards modulo 16, with one id in eight replaced by chance."""
    generator = np.random.default_rng(seed)
    ids = (np.arange(count) + generator.integers(16)) % 16
    surprises = generator.random(count) < 1 / 8
    ids[surprises] = generator.integers(16, size=int(surprises.sum()))
    ids[generator.random(count) < 1 / 40] = END_OF_TEXT
    ids[-1] = END_OF_TEXT
    return ids.astype("<u2")


def write_data(path: Path, *, train: int = 4000, validation: int = 500, seed: int = 0) -> Path:
    """Write prepared data as the contract says; the manifest comes from counting, not from the preparation."""
    (path / "shards").mkdir(parents=True)
    splits = {}
    for name, count in (("train", train), ("validation", validation)):
        ids = structured_tokens(count, seed + len(name))
        (path / "shards" / f"{name}-00000.bin").write_bytes(ids.tobytes())
        documents = int((ids == END_OF_TEXT).sum())
        splits[name] = Split(
            tokens=count, documents=documents, bytes=count - documents,
            sha256=hashlib.sha256(ids.tobytes()).hexdigest(), shards=(count,),
        )  # fmt: skip
    shares = np.bincount(structured_tokens(train, seed + len("train"))) / train
    manifest = Manifest(
        source="counting",
        tokenizer=TokenizerEntry(kind="bytes", name="bytes", vocabulary=VOCABULARY, end_of_text=END_OF_TEXT),
        dtype="uint16",
        splits=splits,
        unigram_entropy=float(-(shares * np.log(shares, where=shares > 0, out=np.zeros_like(shares))).sum()),
    )
    (path / "manifest.json").write_bytes(manifest.to_json())
    return path


def tiny_plan(data: Path, **changes: Any) -> RunConfig:
    """Return a run of some seconds' parts; `model`, `optimizer` and `execution` are dicts of further changes."""
    fields = {**TINY, **changes.pop("model", {})}
    model = language_model_config("nano", **fields)
    task = LanguageTaskConfig(data=data, model=model, validation_tokens=changes.pop("validation_tokens", 128))
    warmup_steps = min(4, changes.get("steps", 20) - 1)
    optimizer = OptimizerConfig(**{"learning_rate": 1e-2, "warmup_steps": warmup_steps, **changes.pop("optimizer", {})})
    execution = Execution(**{"checkpoint_every": 10, "threads": 1, **changes.pop("execution", {})})
    defaults = {"steps": 20, "batch": 4, "validation_every": 10}
    return RunConfig(task=task, optimizer=optimizer, execution=execution, **{**defaults, **changes})


def tiny_run(data: Path, **changes: Any) -> RunConfig:
    """Return the resolved configuration of `tiny_plan`."""
    return tiny_plan(data, **changes).resolved()


def with_model(config: RunConfig, **changes: Any) -> RunConfig:
    """Return the run with fields of its model changed."""
    return with_task(config, model=dataclasses.replace(config.task.model, **changes))


def with_task(config: RunConfig, **changes: Any) -> RunConfig:
    """Return the run with fields of its task changed."""
    return dataclasses.replace(config, task=dataclasses.replace(config.task, **changes))


def records(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a run without their time fields; notes only if asked for."""
    kept = [
        {name: value for name, value in record.items() if name not in TIME_FIELDS}
        for record in read_metrics(run / "metrics.jsonl")
    ]
    return [record for record in kept if record["kind"] == kind or (kind is None and record["kind"] != "note")]


def losses(run: Path) -> list[float]:
    """Return the training losses of a run."""
    return [record["loss"] for record in records(run, "train")]


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_resumes(config: RunConfig, path: Path, *, after: int) -> None:
    """Train a run in `path/whole`, and in `path/resumed` interrupted after a step: the bits at the end are the same."""

    class Interruption(Instrument):
        def on_step(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
            if record["step"] == after:
                raise KeyboardInterrupt

    whole, resumed = path / "whole", path / "resumed"
    train(config, whole)
    with pytest.raises(KeyboardInterrupt):
        train(config, resumed, instruments=(Interruption(),))
    train(config, resumed)
    assert records(resumed) == records(whole)
    last = f"checkpoints/step-{config.steps:08d}"
    groups = sorted(file.name for file in (whole / last).glob("*.safetensors"))
    assert {"model.safetensors", "optimizer.safetensors", "random.safetensors"} <= set(groups)
    for name in [*groups, *["ema.safetensors"] * bool(config.ema)]:
        assert (resumed / last / name).read_bytes() == (whole / last / name).read_bytes(), name
