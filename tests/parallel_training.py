"""Runs of several processes for `test_parallel.py`: `torchrun --nproc-per-node 2 parallel_training.py DATA OUT [all]`.

One launch trains every case, in OUT/CASE-PARALLEL, and resumes copies of some from the first checkpoint, in
OUT/CASE-PARALLEL-resumed. Without `all` each case runs with one kind of parallelism.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from siamesenorm.models.vision import VisionTransformerConfig
from siamesenorm.tasks.classification import ClassificationTaskConfig
from siamesenorm.topologies import build_topology
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import train
from siamesenorm.training.optimizer import OptimizerConfig
from training_runs import tiny_run

STEPS, SAVED = 20, 8
LANGUAGE = ("pre", "siamese", "dhc-2", "attnres")
CASES = (*LANGUAGE, "siamese, accumulated", "siamese, dropout", "digits siamese", "digits attnres")
PAIRED = {
    "pre": ["shard"],
    "siamese": ["replicate", "shard"],
    "dhc-2": ["replicate"],
    "attnres": ["shard"],
    "siamese, accumulated": ["shard"],
    "siamese, dropout": ["replicate"],
    "digits siamese": ["replicate"],
    "digits attnres": ["shard"],
}
"""How each case runs where not all do."""
RESUMED = [*((case, "shard") for case in CASES), ("siamese, dropout", "replicate")]
RESUMED_OF_PAIRS = [(case, kind) for case, kind in RESUMED if kind in PAIRED[case] and case not in LANGUAGE[:3]]
TINY_IMAGES = VisionTransformerConfig(
    depth=2, dim=16, heads=2, hidden=32, image_size=8, patch_size=4, channels=1, classes=10, bias=True
)


def configuration(case: str, data: Path, parallel: str = "replicate") -> RunConfig:
    """Return the run of a case; evaluation does not divide by the number of processes."""
    execution = {"checkpoint_every": SAVED, "keep_checkpoints": STEPS, "keep_states": True, "parallel": parallel}
    if case.startswith("digits"):
        model = dataclasses.replace(TINY_IMAGES, topology=build_topology(case.split()[1]))
        return RunConfig(
            task=ClassificationTaskConfig(model=model),
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=4),
            execution=Execution(**execution, threads=1, compile="off"),
            steps=STEPS,
            batch=8,
            validation_every=10,
        ).resolved()
    topology, _, what = case.partition(", ")
    return tiny_run(
        data,
        model={"topology": topology, "dropout": 0.2 if what == "dropout" else 0.0},
        steps=STEPS,
        batch=8,
        micro_batch=2 if what == "accumulated" else 0,
        execution={**execution, "compile": "off"},
    )


def interrupt(directory: Path, copy: Path) -> Path:
    """Copy a finished run as if it had been killed at its end, with its first checkpoint alone."""
    shutil.copytree(directory, copy)
    checkpoints = sorted((copy / "checkpoints").iterdir(), key=lambda each: int(each.name.rpartition("-")[2]))
    assert int(checkpoints[0].name.rpartition("-")[2]) == SAVED
    for checkpoint in checkpoints[1:]:
        shutil.rmtree(checkpoint)
    (copy / "verdict.json").unlink()
    return copy


def main() -> None:
    """Train all cases both ways, in one process group."""
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    run_all = sys.argv[3:] == ["all"]
    resumed = RESUMED if run_all else RESUMED_OF_PAIRS
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        for parallel in ("replicate", "shard") if run_all else PAIRED[case]:
            config = configuration(case, data, parallel)
            train(config, out / f"{case}-{parallel}")
            if (case, parallel) in resumed:
                copy = out / f"{case}-{parallel}-resumed"
                if dist.get_rank() == 0:
                    interrupt(out / f"{case}-{parallel}", copy)
                dist.barrier()
                train(config, copy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
