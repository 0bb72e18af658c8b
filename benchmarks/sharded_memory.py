"""A model of 101 million parameters under FSDP2 on two processes of a CPU, beside one process that trains it alone.

    python benchmarks/sharded_memory.py    # writes sharded_memory.json and fills the table of docs/scale.md from it

The peak of a process's resident memory is read after the last training step, before the checkpoint. `held_MB` is what
`siamesenorm sizes --memory` counts: weights, gradients and optimizer state, and of two processes what they gather.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from memory import HUNDRED_MILLION
from pages import fill_tables
from siamesenorm.benchmark.memory import StepLayout, memory_of
from siamesenorm.benchmark.results import Results, Row
from siamesenorm.data import PrepareConfig, prepare
from siamesenorm.models.language import language_model_config
from siamesenorm.tasks.language import LanguageTaskConfig
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import TrainingLoop
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.world import World

HERE = Path(__file__).parent
FILE, PAGE = HERE / "sharded_memory.json", HERE.parent / "docs/scale.md"
TOPOLOGIES, STEPS, BATCH, CONTEXT = ("siamese",), 3, 2, 64


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Memory that is freed returns to the system: else the peak is what glibc's heap has been fragmented to."""


class Measured(TrainingLoop):
    """A run that ends before its checkpoint and writes this process's memory in MB; `before` is that at its start."""

    before: float
    built: float

    def _save(self, step: int) -> None:
        found = {
            "rank": self.world.rank,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "before_MB": self.before,
            "built_MB": self.built,
            "peak_MB": resident("VmHWM"),
        }
        (self.run_directory.path / f"memory-{self.world.rank}.json").write_text(json.dumps(found))
        raise SystemExit


def resident(field: str) -> float:
    """Return a field of the memory of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1e6


def configuration(topology: str, data: Path) -> RunConfig:
    """Return the run."""
    shape: dict[str, Any] = {**HUNDRED_MILLION, "context": CONTEXT}
    model = language_model_config("nano", topology=topology, **shape)
    return RunConfig(
        task=LanguageTaskConfig(data=data, model=model, validation_tokens=model.context),
        steps=STEPS,
        batch=BATCH,
        micro_batch=BATCH // 2,
        execution=Execution(parallel="shard", compile="off", threads=1),
    ).resolved()


def train(topology: str, data: Path, out: Path) -> None:
    """Take the steps as one of the processes that share the run."""
    config = configuration(topology, data)
    with World.joined(torch.device("cpu")) as world:
        before = resident("VmRSS")
        out.mkdir(exist_ok=True)
        Measured.before = before
        loop = Measured(config, RunDirectory(out), world)
        Measured.built = resident("VmHWM")
        loop.run()


def measure(topology: str, processes: int, data: Path, out: Path) -> list[Row]:
    """Return a row for each of the processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else ()), __file__, topology, str(data), str(out)]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})
    steps = (json.loads(line) for line in RunDirectory(out).metrics_file.read_text().splitlines())
    losses = [step["loss"] for step in steps if step["kind"] == "train"]
    config = configuration(topology, data).task.model
    memory = memory_of(config, StepLayout(samples=BATCH // 2, processes=processes, shards=processes))
    rows = []
    for rank in range(processes):
        found = json.loads((out / f"memory-{rank}.json").read_text())
        held = (memory.total - memory.kept) / 1e6
        rows.append(
            {
                "topology": topology,
                "processes": processes,
                **found,
                "beyond_MB": found["peak_MB"] - found["before_MB"],
                "held_MB": held,
                "kept_MB": memory.kept / 1e6,
                "last_loss": losses[-1],
            }
        )
    return rows


def main() -> None:
    """Train with one process and with two, write the file and fill the page."""
    if arguments := sys.argv[1:]:
        return train(arguments[0], Path(arguments[1]), Path(arguments[2]))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        text, data = Path(directory) / "text.txt", Path(directory) / "data"
        text.write_text("".join(f"{number} and {number} make {2 * number}.\n\n" for number in range(3000)))
        prepare(PrepareConfig(source=str(text), out=data, tokenizer="bytes"))
        for topology in TOPOLOGIES:
            for processes in (1, 2):
                rows += measure(topology, processes, data, Path(directory) / f"{topology}-{processes}")
    Results(benchmark="sharded-memory", device="cpu", settings=HUNDRED_MILLION, rows=rows).show(FILE)
    PAGE.write_text(fill_tables(PAGE.read_text(), PAGE.parent))


if __name__ == "__main__":
    main()
