"""A driver of `test_resume.py`: one process imports torch and forks a child for every life of a run.

It does no torch work itself, so a fork copies neither threads nor a used autograd engine. `killed_training.py DATA OUT`
leaves three runs in OUT (never interrupted, killed twenty times, its newest checkpoint damaged) and prints how every
life ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # AdamW imports it, in every child if not here; the same goes for distributed checkpoints

from checkpoint_stages import STAGES, watch_stages
from siamesenorm.tasks.language import LanguageTask
from siamesenorm.training import distributed_checkpoint, execution, run_directory
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loop import Instrument, TrainingLoop, train
from siamesenorm.training.run_record import MetricsLog
from training_runs import tiny_run

STEPS, CHECKPOINT_EVERY, VALIDATION_EVERY = 40, 3, 5


def configuration(data: Path) -> RunConfig:
    return tiny_run(
        data,
        model={"topology": "siamese", "dropout": 0.2},
        steps=STEPS,
        micro_batch=2,
        validation_every=VALIDATION_EVERY,
        execution={"checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": STEPS, "keep_states": True},
    )


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer(Instrument):
    """Ends the process at a moment, and writes down the notes."""

    def __init__(self, lines: Path, **moment: Any) -> None:
        self.lines, self.moment = lines, moment

    def on_start(self, loop: TrainingLoop, step: int) -> None:
        if self.moment.get("kind") == "start":
            die()

    def on_record(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        if self.moment.items() <= record.items():
            die()

    def on_note(self, loop: TrainingLoop, line: str) -> None:
        with open(self.lines, "a") as file:
            file.write(f"{line}\n")


def replaced(owner: Any, name: str, *, after: bool, when: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Die on the way into a function, or out of it, at the call that is meant."""
    function = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        meant = when(*arguments, **options)
        if meant and not after:
            die()
        result = function(*arguments, **options)
        if meant:
            die()
        return result

    setattr(owner, name, call)


def nth(number: int) -> Callable[..., bool]:
    calls = count(1)
    return lambda *_, **__: next(calls) == number


def half_a_line(log: MetricsLog, record: dict[str, Any]) -> None:
    """Write what a process leaves that dies while the record of step 32 is written."""
    if record.get("step") != 32:
        return whole_append(log, record)
    log._file.write(b'{"kind": "train", "step": 32, "lo')
    die()


whole_append = MetricsLog.append


def at_stage(stage: str) -> dict[str, Any]:
    """Die at a stage of the first checkpoint that this life writes."""
    return {"setup": lambda: watch_stages(lambda reached: die() if reached == stage else None)}


def setup(*arguments: Any, **options: Any) -> dict[str, Any]:
    return {"setup": lambda: replaced(*arguments, **options)}


def config_written(path: Path, content: bytes) -> bool:
    return path.name == "config.json"


def verdict_written(path: Path, content: bytes) -> bool:
    return path.name == "verdict.json"


def evaluates(task: LanguageTask, model: torch.nn.Module, batch: torch.Tensor) -> bool:
    return not model.training


# In the order of the run. A life that dies at a stage before "renamed" loses its steps since the last checkpoint.
LIVES: dict[str, dict[str, Any]] = {
    "between the directory and its configuration": setup(
        run_directory, "write_atomically", after=False, when=config_written
    ),
    "before the environment is written": setup(execution, "describe_environment", after=False),
    "before the first record": {"moment": {"kind": "start"}},
    "after the first record": {"moment": {"kind": "model"}},
    "after the record of step 1": {"moment": {"kind": "train", "step": 1}},
    "stage begin": at_stage("begin"),
    "stage partial-made": at_stage("partial-made"),
    "stage model-half-written": at_stage("model-half-written"),
    "in the middle of the second backward pass of a step": setup(torch.Tensor, "backward", after=True, when=nth(4)),
    "stage model-written": at_stage("model-written"),
    "stage renamed": at_stage("renamed"),
    "before an update": setup(torch.optim.AdamW, "step", after=False, when=nth(6)),
    "stage optimizer-half-written": at_stage("optimizer-half-written"),
    "stage pruned": at_stage("pruned"),
    "between an update and its record": setup(torch.optim.AdamW, "step", after=True, when=nth(7)),
    "during an evaluation": setup(LanguageTask, "_forward", after=True, when=evaluates),
    "after an evaluation, before its checkpoint": {"moment": {"kind": "validation", "step": 30}},
    "stage optimizer-written": at_stage("optimizer-written"),
    "stage state-written": at_stage("state-written"),
    "stage manifest-written": at_stage("manifest-written"),
    "in the middle of a line of the record": {"setup": lambda: setattr(MetricsLog, "append", half_a_line)},
    "after the record of a step that is checkpointed": {"moment": {"kind": "train", "step": 36}},
    "after the end, before the verdict": {"moment": {"kind": "end"}},
    "while the verdict is written": setup(run_directory, "write_atomically", after=False, when=verdict_written),
}  # fmt: skip


BETWEEN_CHECKPOINTS = setup(distributed_checkpoint, "begin_checkpoint", after=False, when=lambda root, step: step == 33)
"""The checkpoint of step 30 is whole, and nothing of the next one is written."""


def live(config: RunConfig, run: Path, life: dict[str, Any] | None = None) -> int:
    """Train in a child; returns how it ended: its exit code, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            life = life or {}
            life.get("setup", lambda: None)()
            killer = Killer(run.with_suffix(".lines"), **life.get("moment", {"kind": None}))
            train(config, run, instruments=(killer,))
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def damage_newest(run: Path) -> str:
    newest = max((run / "checkpoints").iterdir())
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    return newest.name


def main(data: Path, out: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = configuration(data)
    ended: dict[str, Any] = {"whole": live(config, out / "whole")}
    ended["lives"] = {name: live(config, out / "killed", life) for name, life in LIVES.items()}
    ended["last life"] = live(config, out / "killed")

    ended["before damage"] = live(config, out / "damaged", BETWEEN_CHECKPOINTS)
    ended["damaged"] = damage_newest(out / "damaged")
    ended["after damage"] = live(config, out / "damaged")
    return ended


if __name__ == "__main__":
    assert set(STAGES) == {name.removeprefix("stage ") for name in LIVES if name.startswith("stage ")}
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
