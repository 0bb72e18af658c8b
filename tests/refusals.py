"""Command lines that are refused, for the tests of exit codes and of wording, and what a refusal looks like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from siamesenorm.cli import main

TINY = {
    "--model.size": "nano", "--model.depth": 1, "--model.dim": 8, "--model.heads": 2, "--model.hidden": 8,
    "--model.context": 16, "--steps": 8, "--batch": 2, "--optimizer.warmup-steps": 1,
    "--validation-every": 4, "--validation-tokens": 64, "--execution.checkpoint-every": 2,
}  # fmt: skip
REFUSED = (
    "trian",
    "--verbose",
    "train",
    "train min --data DATA",
    "train --data DATA",
    "train mini",
    "train mini --data DATA --model.topolgy pre",
    "train mini --data DATA --modle.size=nano",
    "train mini --data DATA --qqq 3",
    "train mini --data DATA extra",
    "train mini --data DATA --steps",
    "train mini --data DATA --steps 1.5",
    "train mini --data DATA --optimizer.learning-rate abc",
    "train mini --data DATA --optimizer.learning-rate nan",
    "train mini --data DATA --optimizer.learning-rate inf",
    "train mini --data DATA --optimizer.learning-rate 0",
    "train mini --data DATA --optimizer.learning-rate -1",
    "train mini --data DATA --precision bf16",
    "train mini --data DATA --model.topology siamse",
    "train mini --data DATA --model.topology dhc-2:stream=4",
    "train mini --data DATA --model.topology dhc-2:streams=x",
    "train mini --data DATA --model.norm rmsnrm",
    "train mini --data DATA --model.size mni",
    "train mini --data DATA --model.heads 3",
    "train mini --data DATA --model.kv-heads 3",
    "train mini --data DATA --model.attention-norm qkk",
    "train mini --data DATA --batch 8 --micro-batch 3",
    "train mini --data DATA --seed 99999999999999999999999",
    "train mini --data DATA --model.dim 100000000",
    "train mini --data DATA --model.vocabulary 9",
    "train mini --data DATA --model.context 4096",
    "train mini --data DATA --execution.device qpu",
    "train mini --data DATA --execution.device meta",
    "train mini --data DATA --execution.shards 2",
    "train mini --data DATA --execution.keep-every 3",
    "train digits --validation-fraction 0",
    "train mini --data NOWHERE",
    "explain siamse",
    "explain --json --markdown",
    "sizes --topologies siamse",
    "verdict",
    "verdict NOWHERE",
    "verdict NOWHERE --steps-total x",
    "report NOWHERE",
    "calibrate",
    "calibrate NOWHERE",
    "evaluate",
    "evaluate NOWHERE",
    "analyze",
    "analyze NOWHERE",
    "analyze NOWHERE --what prunning",
    "prepare",
    "train mini --data DATA --model.topology siamese --model.attention-norm qk",
    "bench boundry",
    "bench step --device tpu",
    "bench step --rounds 0",
    "generate NOWHERE --prompt x",
    "sample NOWHERE",
    "sample NOWHERE --count 0",
    "reproduce table2 --data DATA --tasks NOWHERE --out NOWHERE",
    "reproduce table2 --data DATA --task-limit 5 --out NOWHERE",
    "reproduce table2 --data DATA --minutes -1 --out NOWHERE",
    "reproduce --data DATA --minutes nan continued",
    "train digits-dit --model.topology peri",
    "train digits-dit --model.patch-size 3",
    "train digits-dit --model.classes 7",
    "train digits-dit --vae NOWHERE",
    "export NOWHERE --out NOWHERE",
    "rewire NOWHERE --topology siamese --out NOWHERE",
    "runs NOWHERE",
    "sweep mini --data DATA --methods siamse",
    "sweep mini --data DATA --jobs -1",
    "train digits --model.patch-size 3",
    "train digits --layer-decay 0",
    "train digits-mae --model.mask-ratio 1.5",
    "train digits-mae --model.mask-ratio 0.01",
    "train digits-mae --model.patch-size 1 --normalised-pixels",
    "train digits-mae --augmentation.mixup 0.8",
    "prepare --source NOWHERE --out NOWHERE",
    "prepare --source builtin --tokenizer bpe:0 --out NOWHERE",
)


def complete(words: Sequence[str], run: Path) -> list[str]:
    """Return the words of a command, those of `train` with the options of a tiny run."""
    if list(words[:2]) != ["train", "mini"] or "--data" not in words:
        return list(words)
    given = dict(zip(words[2::2], words[3::2], strict=False))
    tiny = {name: str(value) for name, value in TINY.items() if name not in given} | {"--out": str(run)}
    return [*words[:2], *(word for option in tiny.items() for word in option), *words[2:]]


SHOW_PROGRESS = ("analyze", "evaluate", "rewire", "sample")
"""Commands that may refuse after lines of progress, of others or their own."""


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command that refuses, and return its one line."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    *progress, line = said.err.strip().splitlines()
    assert said.out == "" and line.startswith("siamesenorm: ") and not set("╭│╰─") & set(line)
    assert not progress or words[0] in SHOW_PROGRESS
    assert not any(each.startswith(("siamesenorm: ", "Traceback")) for each in progress)
    return line.removeprefix("siamesenorm: ")
