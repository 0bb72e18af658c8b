"""Run jobs of a real Slurm on one machine: a run of two processes and a sweep, killed and requeued.

    apt-get install slurmctld slurmd slurm-client munge && pip install -e '.[lab,cluster]'
    python benchmarks/slurm_on_one_machine.py benchmarks/slurm.json        # as root

The script starts a controller and a node of its own in a temporary directory, and stops them at the end. What it
compares: every loss and gradient norm of runs that were requeued, killed or cancelled with those of runs of the same
configuration that nothing disturbed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from siamesenorm.training.execution import describe_environment

CONFIGURATION = """ClusterName=local
SlurmctldHost={host}
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldLogFile={root}/controller.log
SlurmdLogFile={root}/node.log
SlurmctldPidFile={root}/controller.pid
SlurmdPidFile={root}/node.pid
ReturnToService=2
MpiDefault=none
KillWait=10
AuthInfo=cred_expire=20
NodeName={host} CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
COMMON = ["--optimizer.warmup-steps", "4", "--execution.checkpoint-every", "10", "--execution.compile", "off"]
TRAIN = ["train", "digits", "--steps", "150", *COMMON]
SWEEP = ["sweep", "digits", "--methods", "pre", "siamese", "--learning-rates", "2e-3", "--no-control", "--seeds", "1"]
SWEEP += ["--steps", "60", *COMMON, "--jobs", "2"]


@contextmanager
def slurm(root: Path) -> Iterator[None]:
    """Run a controller and a node of Slurm until the context ends."""
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(program) is None:
            sys.exit(f"{program} is not installed: see the first lines of this script")
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (root / name).mkdir()
    (root / "slurm.conf").write_text(CONFIGURATION.format(host=host, root=root, cpus=os.cpu_count()))
    os.environ["SLURM_CONF"] = str(root / "slurm.conf")
    if subprocess.run(["pgrep", "munged"], capture_output=True).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge")
        subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", shutil.which("munged") or "munged"], check=True)
    subprocess.run(["slurmctld"], check=True)
    subprocess.run(["slurmd"], check=True)
    try:
        until(lambda: "idle" in output("sinfo", "--noheader", "--format=%T"))
        yield
    finally:
        for name in ("node", "controller"):
            subprocess.run(["kill", (root / f"{name}.pid").read_text().strip()], check=False)


def siamesenorm(*words: str) -> subprocess.Popen[str]:
    """Start a command of the library."""
    return subprocess.Popen([sys.executable, "-m", "siamesenorm", *words], stdout=subprocess.PIPE, text=True)


def output(*words: str) -> str:
    """Return what a command prints."""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def until(true: Any, seconds: float = 600) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen")
        time.sleep(0.2)


def steps(run: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by step."""
    file = run / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {each["step"]: (each["loss"], each["gradient_norm"]) for each in records if each["kind"] == "train"}


def past(run: Path, step: int) -> Any:
    """Return whether a run has recorded a step, as a function."""
    return lambda: max(steps(run), default=0) >= step


def active() -> str:
    """Return the jobs that wait or run."""
    return output("squeue", "--noheader", "--format=%i")


def two_processes(root: Path) -> dict[str, Any]:
    """Train with two processes, requeued once and once ended by the signal that comes before the end of its time."""
    run, alone = root / "two", root / "alone"
    siamesenorm(*TRAIN, "--out", str(run), "--execution.slurm", "ntasks-per-node=2", "time=20").wait()
    number = json.loads((run / "slurm.json").read_text())["job"]
    until(past(run, 20))
    subprocess.run(["scontrol", "requeue", number], check=True)
    requeued_after = max(steps(run))
    until(past(run, max(60, requeued_after + 20)))
    subprocess.run(["scancel", "--signal=USR2", number], check=True)
    warned_after = max(steps(run))
    until(lambda: (run / "verdict.json").is_file() and not active())
    siamesenorm(*TRAIN, "--out", str(alone)).wait()
    mine, theirs = steps(run), steps(alone)
    assert mine.keys() == theirs.keys()
    worst = max(abs(mine[step][0] - theirs[step][0]) / theirs[step][0] for step in theirs)
    environments = json.loads((run / "environment.json").read_text())
    return {
        "processes": environments["processes"],
        "requeued_after_step": requeued_after,
        "warned_after_step": warned_after,
        "steps": len(mine),
        "largest_relative_difference_to_one_process": worst,
    }


def sweep(root: Path) -> dict[str, Any]:
    """Run a sweep, kill the process that watches it and one of its jobs, and repeat the command."""
    out, undisturbed = root / "sweep", root / "undisturbed"
    first = siamesenorm(*SWEEP, "--out", str(out), "--execution.slurm", "time=20")
    until(lambda: len(list((out / "runs").glob("*/checkpoints/step-*"))) > 1)
    first.kill()
    first.wait()
    numbers = active().split()
    subprocess.run(["scancel", "--signal=KILL", numbers[0]], check=True)
    until(lambda: numbers[0] not in active().split())
    second = siamesenorm(*SWEEP, "--out", str(out), "--execution.slurm", "time=20")
    code = second.wait()
    siamesenorm(*SWEEP, "--out", str(undisturbed)).wait()
    runs = sorted((out / "runs").iterdir())
    equal = [steps(run) == steps(undisturbed / "runs" / run.name) for run in runs]
    return {"runs": len(runs), "killed_jobs": 1, "exit_code": code, "runs_with_the_same_bits": sum(equal)}


def main() -> None:
    """Run both and write what came out."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        with slurm(root):
            found = {
                "version": output("sinfo", "--version").strip(),
                "train": two_processes(root),
                "sweep": sweep(root),
            }
    found["environment"] = describe_environment("cpu")
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
