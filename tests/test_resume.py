"""Law 6: a run that is killed at any moment and resumed ends with the same bits as one never interrupted.

The lives and deaths are in `killed_training.py`, one process that forks them all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_stages import STAGES
from killed_training import CHECKPOINT_EVERY, LIVES, STEPS, VALIDATION_EVERY
from training_runs import records, write_data

pytestmark = pytest.mark.laws  # test_faults.py kills at the same stages, fewer times

KILLED = -signal.SIGKILL
DRIVER = Path(__file__).with_name("killed_training.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lives")


@pytest.fixture(scope="module")
def ended(out: Path) -> dict[str, Any]:
    """How every life ended."""
    data = write_data(out / "data")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, DRIVER, data, out], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def assert_same_bits(run: Path, other: Path) -> None:
    """Everything a run leaves is the same, but for times and where they make lines of the record longer."""
    assert records(run) == records(other)
    assert (run / "verdict.json").read_bytes() == (other / "verdict.json").read_bytes()
    assert checkpoints(run) == checkpoints(other)
    for name in checkpoints(run):
        ours, theirs = run / "checkpoints" / name, other / "checkpoints" / name
        for group in ("model", "optimizer", "random"):
            assert (ours / f"{group}.safetensors").read_bytes() == (theirs / f"{group}.safetensors").read_bytes(), name


def test_it_is_killed_at_twenty_moments_half_of_them_stages(ended: dict[str, Any]) -> None:
    assert ended["lives"] == dict.fromkeys(LIVES, KILLED), "a life that ended otherwise did not reach its moment"
    assert sum(name.startswith("stage ") for name in LIVES) == len(STAGES) == 10
    assert len(LIVES) >= 20
    assert (ended["whole"], ended["last life"]) == (0, 0)


def test_killed_and_resumed_it_ends_with_the_same_bits(ended: dict[str, Any], out: Path) -> None:
    assert_same_bits(out / "killed", out / "whole")


def test_the_run_never_interrupted_is_what_was_asked_for(ended: dict[str, Any], out: Path) -> None:
    """The comparison above is of something: every record, every checkpoint, and dropout that uses the random state."""
    run = out / "whole"
    validated = [*range(VALIDATION_EVERY, STEPS, VALIDATION_EVERY), STEPS]
    assert [record["step"] for record in records(run, "train")] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records(run, "validation")] == validated
    assert [record["kind"] for record in records(run)][:: len(records(run)) - 1] == ["model", "end"]
    steps = [*range(CHECKPOINT_EVERY, STEPS, CHECKPOINT_EVERY), STEPS]
    assert checkpoints(run) == [f"step-{step:08d}" for step in steps]
    states = [load_file(run / "checkpoints" / name / "random.safetensors")["cpu"] for name in checkpoints(run)[-2:]]
    assert not torch.equal(*states)
    optimizer = load_file(run / "checkpoints" / checkpoints(run)[-1] / "optimizer.safetensors")
    assert {name.rpartition("/")[2] for name in optimizer} == {"step", "exp_avg", "exp_avg_sq"}
    assert {float(value) for name, value in optimizer.items() if name.endswith("/step")} == {STEPS}


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_leads_to_the_same_bits(
    ended: dict[str, Any], out: Path
) -> None:
    assert (ended["before damage"], ended["damaged"], ended["after damage"]) == (KILLED, "step-00000030", 0)
    (line,) = (out / "damaged.lines").read_text().splitlines()
    assert "step-00000030" in line
    assert "the checksum of model.safetensors does not match" in line
    assert line.endswith("resumes after step 27")
    assert_same_bits(out / "damaged", out / "whole")


def test_checkpoints_left_unfinished_are_reported(ended: dict[str, Any], out: Path) -> None:
    lines = (out / "killed.lines").read_text().splitlines()
    assert lines
    assert all("never finished" in line for line in lines)
