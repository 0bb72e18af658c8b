"""A driver of `test_faults.py`: `fault_cases.py OUT` writes what came of every fault into OUT/found.json.

One process imports torch and forks all others, as `benchmarks/kills.py` does, which is used here in its short form.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import torch
import torch.distributed as dist

import kills
from checkpoint_stages import save_checkpoint
from siamesenorm.comparison import worker
from siamesenorm.errors import UserError
from siamesenorm.files import exclusive
from siamesenorm.training.checkpoint import keep_last_weights, load_checkpoint
from siamesenorm.training.distributed_checkpoint import CheckpointSaver
from siamesenorm.training.loop import train
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.stop_signals import Interrupted
from training_runs import records, tiny_run

STEPS, KILLS = 8, 3
SHAPES = {"matrix": (3, 2), "one": (1,), "scalar": (), "even": (6, 1), "empty": (0, 3)}


def parts(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors that three processes cannot share evenly."""
    generator = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {"model": model, "optimizer": {f"{name}/step": torch.tensor(1.0) for name in SHAPES}}


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(each, mesh, [Shard(0)]) if each.ndim and each.numel() else each
        for name, each in tensors.items()
    }


class Faults:
    """Runs with a fault, in a directory."""

    def __init__(self, out: Path) -> None:
        self.out, self.killing = out, kills.Killing(out)

    def train(self, case: kills.Case, name: str, fault: Callable[[int], None] = lambda rank: None) -> list[int]:
        """Train a run with a fault, and return the exit codes; lines of errors go to OUT/NAME.RANK."""
        config = case.configuration(self.killing.data)

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            fault(rank)
            try:
                train(config, self.out / name)
            except Interrupted as stopped:
                raise SystemExit(stopped.exit_code) from None
            except UserError as error:
                (self.out / f"{name}.{rank}").write_text(str(error))
                raise SystemExit(2) from None

        return list(kills.live(work, case.processes, self.killing.log).codes)

    def checkpoints(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.out / name / "checkpoints").iterdir())

    def differences(self, case: kills.Case, name: str) -> list[str]:
        return kills.differences(self.out / name, self.killing.uninterrupted(case)[0])

    def signalled(self, case: kills.Case, name: str, number: int, damage: bool = False) -> dict[str, Any]:
        """One process gets a signal in step 5; with `damage` a part of its checkpoint cannot be read afterwards."""
        last = case.processes - 1
        codes = self.train(case, name, lambda rank: before_update(5, lambda: kill(number)) if rank == last else None)
        found: dict[str, Any] = {"codes": codes, "checkpoints": self.checkpoints(name)}
        if damage:
            part = self.out / name / "checkpoints" / "step-00000005" / "optimizer-2-of-2.safetensors"
            part.unlink()
            part.symlink_to(part.name)
        found["again"] = self.train(case, name)
        found["notes"] = [record["text"] for record in records(self.out / name, "note")]
        found["different"] = self.differences(case, name)
        return found

    def full_disk(self, case: kills.Case, name: str) -> dict[str, Any]:
        """The last process cannot write more than a part of its tensors from step 5 on."""
        limit = (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)  # noqa: E731
        codes = self.train(case, name, lambda rank: before_update(5, full) if rank == case.processes - 1 else None)
        found: dict[str, Any] = {"codes": codes, "checkpoints": self.checkpoints(name)}
        found["line"] = (self.out / f"{name}.0").read_text()
        found["again"] = self.train(case, name)
        found["different"] = self.differences(case, name)
        return found

    def second_job(self, name: str) -> dict[str, Any]:
        """Another process works in the directory that two processes are to train in."""
        RunDirectory(self.out / name).prepare(kills.SHARDED.configuration(self.killing.data))
        with exclusive(self.out / name / "lock"):
            codes = self.train(kills.SHARDED, name)
        return {
            "codes": codes,
            "files": sorted(path.name for path in (self.out / name).iterdir()),
            "line": (self.out / f"{name}.1").read_text(),
        }

    def orphan(self, name: str) -> dict[str, Any]:
        """The process that started a worker is gone: the worker's standard input is closed."""
        run = self.out / name
        RunDirectory(run).prepare(tiny_run(self.killing.data, steps=5000, execution={"compile": "off"}))
        reads, writes = os.pipe()

        def work(rank: int) -> None:
            os.close(writes)
            os.dup2(reads, 0)
            sys.argv = ["worker", str(run)]
            raise SystemExit(worker.main())

        pid = kills._fork(work, 0, 1, self.out / "unused", self.killing.log, None)
        while not (run / "metrics.jsonl").exists() or len(records(run, "train")) < 3:
            time.sleep(0.05)
        os.close(writes)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        checkpoint = load_checkpoint(run / "checkpoints")
        return {"code": code, "lost": records(run, "train")[-1]["step"] - checkpoint.step}

    def shared_out(self, name: str) -> dict[str, Any]:
        """Three processes write parts, two read them; the parts become the file of one process."""
        root, alone = self.out / name, self.out / f"{name}, alone"

        def write(rank: int) -> None:
            save_checkpoint(root, 1, {**parts(), "model": sharded(parts()["model"])}, {}, keep=1)

        def read(rank: int) -> None:
            empty = {group: {n: torch.empty_like(t) for n, t in named.items()} for group, named in parts(1).items()}
            ours, expected = {**empty, "model": sharded(empty["model"])}, sharded(parts()["model"])
            with CheckpointSaver(root, keep=1) as saver:
                saver.read_into(ours, load_checkpoint(root))
            for key, each in ours["model"].items():
                mine, theirs = (t.to_local() if hasattr(t, "to_local") else t for t in (each, expected[key]))
                assert torch.equal(mine, theirs), key

        def reads_torch(rank: int) -> None:
            """PyTorch's own reader of this format finds the parts."""
            import torch.distributed.checkpoint as dcp

            for part in root.glob("*/optimizer*"):
                part.unlink(missing_ok=True)
            ours = {key: torch.empty_like(each) for key, each in parts()["model"].items()}
            dcp.load(ours, storage_reader=dcp.HuggingFaceStorageReader(str(root / "step-00000001")))
            assert all(torch.equal(ours[key], each) for key, each in parts()["model"].items())

        found = {"written": kills.live(write, 3, self.killing.log).codes, "files": files(root)}
        whole = load_checkpoint(root).tensors
        found["whole"] = all(torch.equal(whole[g][n], t) for g, named in parts().items() for n, t in named.items())
        found["read"] = kills.live(read, 2, self.killing.log).codes
        kills.live(lambda rank: save_checkpoint(alone, 1, parts(), {}, keep=1), 1, self.killing.log)
        copy = self.out / "copy"
        shutil.copytree(root, copy)
        keep_last_weights(copy)
        found["consolidated"] = files(copy)
        ours, theirs = (each / "step-00000001/model.safetensors" for each in (copy, alone))
        found["same bytes"] = ours.read_bytes() == theirs.read_bytes() and load_checkpoint(copy) is not None
        found["by torch"] = kills.live(reads_torch, 2, self.killing.log).codes
        return found


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "step-00000001").iterdir())


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def before_update(step: int, act: Callable[[], None]) -> None:
    """Do something before the update of a step."""
    update, calls = torch.optim.AdamW.step, iter(range(1, 1000))

    def updated(*arguments: Any, **options: Any) -> Any:
        if next(calls) == step:
            act()
        return update(*arguments, **options)

    torch.optim.AdamW.step = updated


def main(out: Path) -> dict[str, Any]:
    kills.STEPS = STEPS
    faults = Faults(out)
    found: dict[str, Any] = {
        "SIGTERM": faults.signalled(kills.ONE, "sigterm", signal.SIGTERM),
        "SIGINT, damaged": faults.signalled(kills.REPLICATED, "sigint", signal.SIGINT, damage=True),
        "full disk": faults.full_disk(kills.REPLICATED, "full"),
        "second job": faults.second_job("second"),
        "orphan": faults.orphan("orphan"),
        "shared out": faults.shared_out("parts"),
    }
    found["kills"] = faults.killing.kill_often(1, kills.SHARDED, KILLS)
    return found


if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / "found.json").write_text(json.dumps(main(out)))
