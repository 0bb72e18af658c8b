"""Runs of several processes for `test_parallel.py`: `parallel_training.py DATA OUT [all]`.

One process imports everything and forks those of each world size, which train their cases one after the other in
OUT/CASE-LAYOUT-SIZE. Some are interrupted and continued, in OUT/CASE-LAYOUT-SIZE-resumed or, by another number of
processes, in OUT/OLD-to-NEW. Without `all` each case runs in one layout or two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401 - once, before forking
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sharded_training
from siamesenorm.analysis.monitor_instrument import MonitorInstrument
from siamesenorm.analysis.post_mortem import PostMortem
from siamesenorm.cli import main as command
from siamesenorm.models.diffusion import DiffusionTransformerConfig
from siamesenorm.models.masked_autoencoder import MaskedAutoencoderConfig
from siamesenorm.models.vision import VisionTransformerConfig
from siamesenorm.tasks.autoencoding import AutoencodingTaskConfig
from siamesenorm.tasks.classification import ClassificationTaskConfig
from siamesenorm.tasks.diffusion import DiffusionTaskConfig
from siamesenorm.topologies import build_topology
from siamesenorm.training import optimizer
from siamesenorm.training.config import Execution, RunConfig
from siamesenorm.training.loop import TrainingLoop, train
from siamesenorm.training.optimizer import OptimizerConfig
from siamesenorm.training.verdict import Reason
from siamesenorm.world import World
from training_runs import tiny_run

STEPS, SAVED = 20, 8
LANGUAGE = ("pre", "siamese", "dhc-2", "attnres")
EXACT = ("siamese, moe",)
"""In fp64: rounding may choose another expert."""
RANDOM = ("siamese, dropout",)
"""Processes drop other elements than one does."""
ROUNDED = ("siamese, rounded",)
"""Sums in another order turn roundings to bf16: losses differ by more."""
OTHERS = ("siamese, accumulated", "digits siamese", "mae siamese", "dit siamese")
CASES = (*LANGUAGE, *EXACT, *RANDOM, *ROUNDED, *OTHERS)
LAYOUTS = {"replicate": {}, "shard": {}, "hybrid": {"shards": 2}, "experts": {"expert_shards": 2}}
TINY_IMAGES = {"depth": 2, "dim": 16, "heads": 2, "hidden": 32, "image_size": 8, "patch_size": 4, "channels": 1}


class Run(NamedTuple):
    """A case as it is trained by `size` processes."""

    case: str
    layout: str
    size: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


TOGETHER = [
    Run(case, layout, size)
    for size in (2, 4)
    for case in CASES
    for layout in LAYOUTS
    if (layout != "hybrid" or size == 4) and (layout != "experts" or "moe" in case)
]
PAIRED = [
    Run("pre", "shard", 2),
    Run("attnres", "shard", 2),
    Run("siamese, moe", "experts", 2),
    Run("siamese, dropout", "replicate", 2),
    Run("dit siamese", "replicate", 2),
    Run("siamese", "hybrid", 4),
    Run("dhc-2", "replicate", 4),
]
"""What is trained where not everything is: every topology, every layout, and every world size."""
ALONE = [Run(case, "replicate", 1) for case in CASES if case not in RANDOM]
ALONE_OF_PAIRS = [run for run in ALONE if run.case in {paired.case for paired in PAIRED}]
RESUMED = [run for run in TOGETHER if run.size == 2 and (run.layout == "shard" or run.case in RANDOM)]
RESUMED_OF_PAIRS = [Run("pre", "shard", 2), Run("siamese, dropout", "replicate", 2)]
CONTINUED = [
    (Run("pre", "shard", 2), Run("pre", "shard", 4)),
    (Run("siamese", "hybrid", 4), Run("siamese", "replicate", 1)),
]
"""Runs that begin, and those that continue them."""


def configuration(run: Run, data: Path) -> RunConfig:
    """Return the run of a case; evaluation does not divide by the number of processes."""
    parallel = "replicate" if run.layout == "replicate" else "shard"
    execution = Execution(
        checkpoint_every=SAVED, keep_checkpoints=STEPS, keep_states=True, threads=1, compile="off", parallel=parallel,
        **LAYOUTS[run.layout],
    )  # fmt: skip
    kind, _, what = run.case.partition(" ")
    if kind in ("digits", "mae", "dit"):
        return RunConfig(
            task=image_task(kind, what),
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=4),
            execution=execution,
            steps=STEPS,
            batch=16 if kind == "dit" else 64,
            validation_every=10,
        ).resolved()
    topology, _, what = run.case.partition(", ")
    model = {"topology": topology, "dropout": 0.2 if what == "dropout" else 0.0}
    if what == "moe":
        model |= {"experts": 4, "residual_dtype": "float64", "compute_dtype": "float64"}
    others = {"optimizer": {"skip_above": 1.02}} if run.case == "pre" else {}
    rounded = {"precision": "bfloat16", "bf16_parameters": True} if what == "rounded" else {}
    accumulates = what in ("accumulated", "moe")
    config = tiny_run(data, model=model, steps=STEPS, batch=8, micro_batch=2 if accumulates else 0, **rounded, **others)
    return dataclasses.replace(config, execution=execution)


def image_task(kind: str, topology: str) -> ClassificationTaskConfig | AutoencodingTaskConfig | DiffusionTaskConfig:
    """Return a task on digits."""
    shape = {**TINY_IMAGES, "topology": build_topology(topology)}
    if kind == "digits":
        return ClassificationTaskConfig(model=VisionTransformerConfig(**shape, classes=10, bias=True))
    if kind == "mae":
        decoder = {"decoder_depth": 1, "decoder_dim": 16, "decoder_heads": 2, "decoder_hidden": 32}
        return AutoencodingTaskConfig(model=MaskedAutoencoderConfig(**shape, **decoder, mask_ratio=0.5))
    return DiffusionTaskConfig(model=DiffusionTransformerConfig(**shape, classes=10), validation_images=8)


class Examined(PostMortem):
    """Examines a step of a run that is well, which goes on."""

    def before_update(self, loop: TrainingLoop, record: dict[str, Any], norms: list[torch.Tensor]) -> None:
        super().before_update(loop, record, norms)
        if record["step"] == STEPS // 2:
            self._examine(loop, Reason.NOT_FINITE)


def train_run(run: Run, data: Path, directory: Path) -> None:
    """Train or resume a run in this process, as one of those of its world."""
    torch.set_default_dtype(torch.float64 if run.case in EXACT else torch.float32)
    watching = (MonitorInstrument(7), Examined()) if run.case == "pre" else ()
    train(configuration(run, data), directory, instruments=watching)
    torch.set_default_dtype(torch.float32)


def interrupt(directory: Path, copy: Path) -> None:
    """Copy a finished run as if it had been killed at its end, with its first checkpoint alone."""
    shutil.copytree(directory, copy)
    checkpoints = sorted((copy / "checkpoints").iterdir(), key=lambda each: int(each.name.rpartition("-")[2]))
    assert int(checkpoints[0].name.rpartition("-")[2]) == SAVED
    for checkpoint in checkpoints[1:]:
        shutil.rmtree(checkpoint)
    (copy / "verdict.json").unlink()


def train_all(size: int, data: Path, out: Path, *, everything: bool) -> None:
    """Train what a world of this size has to train, as one of its processes."""
    resumed = RESUMED if everything else RESUMED_OF_PAIRS
    for run in (*ALONE, *TOGETHER) if everything else (*ALONE_OF_PAIRS, *PAIRED):
        if run.size != size:
            continue
        train_run(run, data, out / run.name)
        if run in resumed:
            continue_run(run, run, data, out / f"{run.name}-resumed", out)
    for first, second in CONTINUED:
        if second.size == size:
            continue_run(first, second, data, out / f"{first.name}-to-{second.name}", out)


def continue_run(first: Run, second: Run, data: Path, copy: Path, out: Path) -> None:
    """Interrupt a copy of a run and end it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        interrupt(out / first.name, copy)
    if dist.is_initialized():
        dist.barrier()
    train_run(second, data, copy)


def launch(rank: int, size: int, port: int) -> None:
    """Make the environment that torchrun makes."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none"}


def leave_before_a_replica(rank: int, port: int) -> None:
    """Release a replica after its process group, as `train` may; this must not wait for the group's thread."""
    launch(rank, 2, port)
    with World.joined(torch.device("cpu")):
        replica = DistributedDataParallel(nn.Linear(2, 2))
        replica(torch.ones(1, 2)).sum().backward()
        dist.broadcast_object_list([rank])
    del replica


def train_by_command(rank: int, port: int, out: Path) -> None:
    """Train by the command line in the environment that torchrun makes; OUT/printed-RANK has what it prints."""
    launch(rank, 2, port)
    options = "--steps 3 --optimizer.warmup-steps 1 --batch 6 --execution.compile off --json"
    with open(out / f"printed-{rank}", "w") as file, contextlib.redirect_stdout(file):
        assert command(["train", "digits", *options.split(), "--out", str(out / "command")]) == 0


def join_and_train(rank: int, size: int, data: Path, out: Path, *, everything: bool) -> None:
    """Train everything of a world size, as one of its processes."""
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous-{size}", rank=rank, world_size=size)
    train_all(size, data, out, everything=everything)
    if size == 2:
        seen: dict[str, Any] = {"reductions": sharded_training.count_reductions()}
        if everything:
            seen["cases"] = {name: sharded_training.train_together(c) for name, c in sharded_training.CASES.items()}
        if rank == 0:
            (out / "sharded.json").write_text(json.dumps(seen))


def fork_world(size: int, work: Callable[[int], None]) -> None:
    """Do the work of each rank in a process of its own; ends all of them, and this one, when one fails."""
    ranks = [_fork(rank, work) for rank in range(size)]
    for _ in ranks:
        pid, status = os.wait()
        if status:
            for other in set(ranks) - {pid}:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a process of {size} ended with status {status}")


def _fork(rank: int, work: Callable[[int], None]) -> int:
    if pid := os.fork():
        return pid
    try:
        work(rank)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Train everything."""
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    optimizer.SKIP_HISTORY = 4  # so that "pre" skips its fifth and sixth step
    for size in (2, 4, 1):
        fork_world(size, partial(join_and_train, size=size, data=data, out=out, everything=sys.argv[3:] == ["all"]))
    for work in (leave_before_a_replica, partial(train_by_command, out=out)):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        fork_world(2, partial(work, port=port))


if __name__ == "__main__":
    main()
