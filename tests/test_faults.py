"""Whatever happens to a run, it leaves with a defined code, loses nothing, and ends with the same bits when resumed.

The faults are in `fault_cases.py`, one process that forks all others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fault_cases import KILLS, kills
from siamesenorm.training.stop_signals import Interrupted, StopSignals

DRIVER = Path(__file__).with_name("fault_cases.py")
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "kills.jsonl"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of every fault."""
    out = tmp_path_factory.mktemp("faults")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, DRIVER, out], capture_output=True, text=True, env=environment, timeout=280)
    assert run.returncode == 0, run.stderr + (out / "log").read_text()[-3000:]
    return json.loads((out / "found.json").read_text())


def test_sigterm_leaves_a_checkpoint_of_the_step(found: dict[str, Any]) -> None:
    case = found["SIGTERM"]
    assert (case["codes"], case["checkpoints"][-1]) == ([143], "step-00000005")
    assert case["notes"] == ["SIGTERM: left after step 5; the same command resumes"]
    assert (case["again"], case["different"]) == ([0], [])


def test_a_signal_for_one_process_ends_all_and_an_unreadable_part_is_passed_over(found: dict[str, Any]) -> None:
    case = found["SIGINT, damaged"]
    assert (case["codes"], case["checkpoints"]) == ([130, 130], ["step-00000004", "step-00000005"])
    (line,) = case["notes"]
    assert "optimizer-2-of-2.safetensors cannot be read" in line and line.endswith("resumes after step 4")
    assert (case["again"], case["different"]) == ([0, 0], [])


def test_a_full_disk_of_one_process_stops_all_and_leaves_what_was_there(found: dict[str, Any]) -> None:
    case = found["full disk"]
    written = ["step-00000002", "step-00000004"]  # the second one may be in writing when the disk becomes full
    assert case["codes"] == [2, 2] and case["checkpoints"] in (written, written[:1])
    assert "no room left" in case["line"] and "\n" not in case["line"]
    assert (case["again"], case["different"]) == ([0, 0], [])


def test_a_second_job_on_a_directory_is_refused_in_all_its_processes(found: dict[str, Any]) -> None:
    case = found["second job"]
    assert (case["codes"], case["files"]) == ([2, 2], ["config.json", "lock"])
    assert "another process is writing here" in case["line"]


def test_a_worker_without_its_experiment_leaves_a_checkpoint(found: dict[str, Any]) -> None:
    assert found["orphan"] == {"code": 143, "lost": 0}


def test_parts_of_three_processes_are_read_by_two_and_become_the_file_of_one(found: dict[str, Any]) -> None:
    case = found["shared out"]
    assert case["written"] == [0, 0, 0] and case["read"] == case["by torch"] == [0, 0]
    assert {f"model-{number}-of-3.safetensors" for number in (1, 2, 3)} < set(case["files"])
    assert case["consolidated"] == ["manifest.json", "model.safetensors", "state.json"]
    assert case["whole"] and case["same bytes"]


def test_killed_runs_end_with_the_same_bits(found: dict[str, Any]) -> None:
    """The short form of benchmarks/kills.py, with two processes; test_resume.py has one."""
    line = found["kills"]
    assert (line["different"], len(line["kills"])) == ([], KILLS)
    waited = [kill["others_ended_after"] for kill in line["kills"] if "others_ended_after" in kill]
    assert waited and max(waited) < kills.SECONDS_TO_NOTICE


def test_the_committed_thousand_kills() -> None:
    lines = kills.read_lines(RESULTS)
    killed = [kill for line in lines for kill in line["kills"]]
    assert len(killed) == 1000 and not any(line["different"] for line in lines)
    assert sum(kill["stage"] is not None for kill in killed) >= 300
    assert {kill["stage"] for kill in killed} == {*kills.STAGES, None}
    assert sum(line["seconds"] for line in lines) < 3600
    assert kills.summary(lines) in (RESULTS.parents[1] / "docs" / "faults.md").read_text()


def test_a_second_sigint_interrupts_at_once() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.received == signal.SIGINT and Interrupted(signals.received).exit_code == 130
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_signals_stay_what_they_were_in_other_threads() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run() -> None:
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[Any] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
