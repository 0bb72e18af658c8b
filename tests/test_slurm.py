"""Runs as jobs of Slurm, whose commands are scripts here: a job is a process of this machine.

`benchmarks/slurm_on_one_machine.py` does the same, and kills and requeues, with a real Slurm.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("submitit")

from siamesenorm.cli import main  # noqa: E402
from siamesenorm.errors import UserError  # noqa: E402
from siamesenorm.training.config import Execution  # noqa: E402
from siamesenorm.training.run_directory import RunDirectory  # noqa: E402
from siamesenorm.training.run_record import read_metrics  # noqa: E402
from siamesenorm.training.slurm import SlurmJob, require_slurm  # noqa: E402

SBATCH = """#!/bin/sh
env -u SLURM_NTASKS SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 \\
    SLURM_JOB_NODELIST=localhost setsid sh "$1" > JOBS/out 2>&1 &
echo $! > JOBS/7
cp "$1" JOBS/script
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do case "$1" in --output|--error) shift;; esac; shift; done
exec "$@"
"""
SQUEUE = "#!/bin/sh\nfor job in JOBS/[0-9]*; do kill -0 $(cat $job) 2>/dev/null && basename $job; done; true\n"
SCANCEL = "#!/bin/sh\njob=$(cat JOBS/$1)\nkill -s KILL -- -$job || kill -s KILL $job\nrm JOBS/$1\n"
DIGITS = ["digits", "--steps", "3", "--optimizer.warmup-steps", "1", "--execution.compile", "off"]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put scripts in place of Slurm's commands; return the directory of their jobs."""
    programs, jobs = tmp_path / "bin", tmp_path / "jobs"
    programs.mkdir()
    jobs.mkdir()
    for name, script in {"sbatch": SBATCH, "srun": SRUN, "squeue": SQUEUE, "scancel": SCANCEL}.items():
        (programs / name).write_text(script.replace("JOBS", str(jobs)))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr("siamesenorm.training.slurm.POLL_SECONDS", 0.1)
    return jobs


def test_a_sweep_trains_its_runs_as_jobs(jobs: Path, tmp_path: Path) -> None:
    grid = ["--methods", "pre", "--learning-rates", "2e-3", "--no-control"]
    options = ["--execution.slurm", "time=20", "partition=gpu", "--out", str(tmp_path / "sweep")]
    assert main(["sweep", *DIGITS, *grid, *options]) == 0
    (run,) = (tmp_path / "sweep/runs").iterdir()
    metrics = read_metrics(RunDirectory(run).metrics_file)
    assert [record["step"] for record in metrics if record["kind"] == "train"] == [1, 2, 3]
    assert RunDirectory(run).read_verdict() is not None
    assert json.loads((run / "slurm.json").read_text()) == {"job": "7"}
    script = (jobs / "script").read_text()
    assert "--time=20\n" in script and "--partition=gpu\n" in script and "--kill-on-bad-exit=1" in script


def test_a_job_that_runs_is_watched_and_a_failed_one_submitted_again(jobs: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (jobs / "3").write_text(str(os.getpid()))
    run.slurm_file.write_text('{"job": "3"}')
    job = SlurmJob(tmp_path, ["-c", "pass"], {})
    assert (job.id, job.poll()) == ("3", None)
    (jobs / "3").unlink()
    assert job.wait() == 1, "it ended without a verdict"
    again = SlurmJob(tmp_path, ["-c", "pass"], {})
    assert again.id == "7"
    again.terminate()


def test_a_job_is_cancelled(jobs: Path, tmp_path: Path) -> None:
    job = SlurmJob(tmp_path, ["-c", "import time; time.sleep(600)"], {})
    assert job.poll() is None
    job.terminate()
    assert job.poll() == -15
    assert require_slurm() == set()


@pytest.mark.parametrize("words", ["nodes", "nodes=", "=2", "time=1:00:00"])
def test_words_that_are_no_options_are_refused(words: str) -> None:
    with pytest.raises(UserError, match="execution.slurm"):
        Execution(slurm=(words,))


def test_without_slurm_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError):
        require_slurm()
    for command in ("train", "sweep"):
        assert main([command, *DIGITS, "--execution.slurm", "time=20", "--out", str(tmp_path / "run")]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "run").exists()
