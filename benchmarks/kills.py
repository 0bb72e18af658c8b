"""Kill runs while they train and while they write checkpoints, resume them, and compare what they end with.

    TMPDIR=/dev/shm OMP_NUM_THREADS=1 python benchmarks/kills.py benchmarks/kills.jsonl --kills 1000

A run has one process or two, sharded or replicated, and lives several times. Each life ends at a named stage of writing
a checkpoint (`os._exit` there) or at a random moment (SIGKILL), in one process or in all; the last one ends by itself.
Then record, verdict and checkpoints are compared, bit for bit, with those of a run that was never interrupted. Every
run adds a line to the results file at its end, so that the script itself may be stopped and continued. One process
imports torch, does no work with it, and forks all others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp  # imported before the forks, as the two above

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from checkpoint_stages import STAGES, STAGES_OF_OTHERS, watch_stages  # type: ignore[import-not-found]
from siamesenorm.training import execution
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loop import train
from siamesenorm.world import Parallelism
from training_runs import records, tiny_run, write_data  # type: ignore[import-not-found]

STEPS, CHECKPOINT_EVERY = 16, 2
SHARE_OF_STAGES = 0.6
DIED = 77
SECONDS_TO_NOTICE = 30
"""For a process to notice that another one is dead, before it is ended from outside as torchrun does at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of run."""

    name: str
    processes: int
    parallel: Parallelism = "replicate"

    def configuration(self, data: Path) -> RunConfig:
        """Return the run, whose dropout uses the random state of every process."""
        config: RunConfig = tiny_run(
            data,
            model={"topology": "siamese", "dropout": 0.1, "depth": 1},
            steps=STEPS,
            execution={
                "checkpoint_every": CHECKPOINT_EVERY,
                "keep_states": True,
                "compile": "off",
                "parallel": self.parallel,
            },
        )
        return config


ONE, SHARDED, REPLICATED = Case("one process", 1), Case("two, sharded", 2, "shard"), Case("two, replicated", 2)
TURNS = (ONE, SHARDED, ONE, REPLICATED, ONE)


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of a life: of these ranks, at a stage of a checkpoint of this life or after so many seconds."""

    ranks: tuple[int, ...]
    stage: str | None
    checkpoint: int
    seconds: float

    @classmethod
    def drawn(cls, chance: random.Random, case: Case, seconds: float) -> Kill:
        """Return a random one; `seconds` is the length of a whole run."""
        everyone = tuple(range(case.processes))
        ranks = everyone if chance.random() < 0.3 else (chance.choice(everyone),)
        stage = None
        if chance.random() < SHARE_OF_STAGES:
            stage = chance.choice(STAGES if ranks == (0,) else STAGES_OF_OTHERS)
        return cls(ranks, stage, chance.choice((1, 1, 2)), chance.uniform(0, 0.6 * seconds))

    def arm(self, rank: int) -> None:
        """Make this process end at the stage."""
        reached: Counter[str] = Counter()

        def announce(stage: str) -> None:
            reached[stage] += 1
            if stage == self.stage and reached[stage] == self.checkpoint:
                os._exit(DIED)

        if self.stage is not None and rank in self.ranks:
            watch_stages(announce)


@dataclass(frozen=True, slots=True)
class Life:
    """How the processes ended (exit code, or minus the signal), and how long the last one outlived the first death."""

    codes: tuple[int, ...]
    outlived: float


def live(work: Callable[[int], None], processes: int, log: Path, kill: Kill | None = None) -> Life:
    """Run `work(rank)` in forked processes, in a group if there are several, until all have ended."""
    rendezvous = Path(tempfile.mktemp(dir=log.parent))
    pids = [_fork(work, rank, processes, rendezvous, log, kill) for rank in range(processes)]
    begin = time.monotonic()
    codes: dict[int, int] = {}
    deaths: list[float] = []
    signalled = kill is None or kill.stage is not None
    while len(codes) < processes:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    deaths.append(time.monotonic())
        now = time.monotonic()
        if not signalled and kill is not None and now > begin + kill.seconds:
            signalled = True
            for rank in kill.ranks:
                if rank not in codes:
                    os.kill(pids[rank], signal.SIGKILL)
        if deaths and now > deaths[0] + SECONDS_TO_NOTICE:
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    rendezvous.unlink(missing_ok=True)
    return Life(tuple(codes[rank] for rank in range(processes)), deaths[-1] - deaths[0])


def _fork(
    work: Callable[[int], None], rank: int, processes: int, rendezvous: Path, log: Path, kill: Kill | None
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(errors, sys.stderr.fileno())
        if kill is not None:
            kill.arm(rank)
        if processes > 1:
            limit = timedelta(seconds=SECONDS_TO_NOTICE)
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=processes, timeout=limit
            )
        work(rank)
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def differences(run: Path, other: Path) -> list[str]:
    """Return what differs in what two runs left, but for times and notes."""
    found = [] if records(run) == records(other) else ["metrics.jsonl"]
    if (run / "verdict.json").read_bytes() != (other / "verdict.json").read_bytes():
        found.append("verdict.json")
    ours, theirs = ({p.relative_to(r): p for p in r.glob("checkpoints/*/*.safetensors")} for r in (run, other))
    if ours.keys() != theirs.keys():
        found.append("checkpoints")
    both = ours.keys() & theirs.keys()
    return found + [str(name) for name in both if ours[name].read_bytes() != theirs[name].read_bytes()]


class Killing:
    """Runs under a directory, each kind compared with one that is never interrupted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = write_data(directory / "data")
        self.log = directory / "log"
        self.whole: dict[str, tuple[Path, float]] = {}
        execution.describe_environment = cache(execution.describe_environment)
        execution.describe_environment("cpu")  # asks git, which every life would do again

    def train(self, case: Case, run: Path, kill: Kill | None = None) -> Life:
        """Train a run until it ends or is killed."""
        config = case.configuration(self.data)

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            train(config, run)

        return live(work, case.processes, self.log, kill)

    def uninterrupted(self, case: Case) -> tuple[Path, float]:
        """Return a run that was never interrupted, and how long it took in seconds."""
        if case.name not in self.whole:
            run, begin = self.directory / f"whole, {case.name}", time.monotonic()
            life = self.train(case, run)
            assert not any(life.codes), self.log.read_text()[-3000:]
            self.whole[case.name] = run, time.monotonic() - begin
        return self.whole[case.name]

    def kill_often(self, number: int, case: Case, kills: int) -> dict[str, Any]:
        """Kill one run up to so many times, let it end, and return the line of the results file."""
        whole, seconds = self.uninterrupted(case)
        chance, run, begin = random.Random(number), self.directory / f"run {number}", time.monotonic()
        killed: list[dict[str, Any]] = []
        while len(killed) < kills:
            kill = Kill.drawn(chance, case, seconds)
            life = self.train(case, run, kill)
            ranks = [rank for rank, code in enumerate(life.codes) if code in (DIED, -signal.SIGKILL)]
            if ranks:
                survived = {} if len(ranks) == case.processes else {"others_ended_after": round(life.outlived, 3)}
                killed.append({"stage": kill.stage, "ranks": ranks, **survived})
            if not any(life.codes):
                break
        life = self.train(case, run)
        different = ["not finished"] if any(life.codes) else differences(run, whole)
        if not different:
            shutil.rmtree(run)
        seconds = round(time.monotonic() - begin, 1)
        return {"run": number, "case": case.name, "kills": killed, "different": different, "seconds": seconds}


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Return a table of the results."""
    rows = ["| runs of | runs | kills | at stages | of all processes | equal to the bit | longest survivor |"]
    rows.append("|---|--:|--:|--:|--:|--:|--:|")
    for name in (*dict.fromkeys(line["case"] for line in lines), "all"):
        mine = [line for line in lines if name in (line["case"], "all")]
        kills = [(kill, line) for line in mine for kill in line["kills"]]
        stages = sum(kill["stage"] is not None for kill, _ in kills)
        everyone = sum("others_ended_after" not in kill for kill, _ in kills)
        equal = sum(not line["different"] for _, line in kills)
        survivors = [kill["others_ended_after"] for kill, _ in kills if "others_ended_after" in kill]
        longest = f"{max(survivors):.1f} s" if survivors else ""
        rows.append(f"| {name} | {len(mine)} | {len(kills)} | {stages} | {everyone} | {equal} | {longest} |")
    return "\n".join(rows)


def read_lines(results: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill runs until the results file has so many kills; returns 1 if a run ended with other bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a line of JSON for every run")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--kills-per-run", type=int, default=12)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, for pieces side by side")
    options = parser.parse_args(arguments)
    lines = read_lines(options.results)
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        killing = Killing(Path(directory))
        while (missing := options.kills - sum(len(line["kills"]) for line in lines)) > 0:
            number = options.first + len(lines)
            lines.append(killing.kill_often(number, TURNS[number % len(TURNS)], min(missing, options.kills_per_run)))
            with open(options.results, "a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print(summary(lines))
    return int(any(line["different"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
