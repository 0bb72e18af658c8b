"""Small trained runs on text with a tokenizer of its own, and the same run for any model: what export is tested on."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

from checkpoint_stages import save_checkpoint
from siamesenorm import LanguageModel, build_language_model
from siamesenorm.cli import main
from siamesenorm.training.run_directory import RunDirectory

CONTEXT = 32
SHAPE = {"depth": 2, "dim": 16, "heads": 4, "kv_heads": 2, "hidden": 24, "context": CONTEXT}


def prepare(directory: Path, *, tokenizer: str = "bpe:300") -> Path:
    """Write sums as prepared data and return their directory."""
    text, data = directory / "sums.txt", directory / "data"
    directory.mkdir(parents=True, exist_ok=True)
    text.write_text("\n\n".join(f"{number} and {number + 1} are {2 * number + 1}." for number in range(400)))
    run("prepare", "--source", text, "--documents", "paragraphs", "--validation-fraction", 0.1,
        "--tokenizer", tokenizer, "--out", data)  # fmt: skip
    return data


def train(data: Path, out: Path, *options: Any) -> Path:
    """Train a tiny model for 20 steps, with a checkpoint every 10, and return the directory of the run."""
    shape = [part for name, value in SHAPE.items() for part in (f"--model.{name.replace('_', '-')}", value)]
    run("train", "mini", "--data", data, "--out", out, "--steps", 20, "--batch", 128 // CONTEXT,
        "--execution.compile", "off", "--execution.keep-states",
        "--optimizer.warmup-steps", 2, "--optimizer.learning-rate", 0.01, "--validation-every", 10,
        "--validation-tokens", 128, "--execution.checkpoint-every", 10, "--model.size", "nano",
        *shape, *options)  # fmt: skip
    return out


def run(*arguments: Any) -> None:
    """Run a command of siamesenorm that succeeds."""
    assert main([str(argument) for argument in arguments]) == 0


def with_model(trained: Path, out: Path, **fields: Any) -> tuple[Path, LanguageModel]:
    """Copy a run as if it had trained another model, whose every weight is random; return both."""
    source, directory = RunDirectory(trained), RunDirectory(out)
    config = source.read_config()
    shape = {**SHAPE, "vocabulary": config.task.model.vocabulary, "residual_dtype": "float32"}
    native = build_language_model("nano", **{**shape, **fields}).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in native.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    task = dataclasses.replace(config.task, model=native.config)
    directory.prepare(dataclasses.replace(config, task=task))
    shutil.copy(source.metrics_file, directory.metrics_file)
    save_checkpoint(directory.checkpoints, config.steps, {"model": dict(native.state_dict())}, {}, keep=1)
    return out, native
