"""Law 6: several processes train as one does, and resume with the same bits; through torchrun.

Each case runs with one kind of parallelism, with `--laws` with both.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
import torch

from parallel_training import CASES, PAIRED, RESUMED, RESUMED_OF_PAIRS, STEPS, configuration, interrupt
from siamesenorm.analysis.monitor_instrument import MonitorInstrument
from siamesenorm.errors import UserError
from siamesenorm.training.checkpoint import load_checkpoint
from siamesenorm.training.loop import TrainingLoop, train
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import read_metrics
from siamesenorm.world import World
from training_runs import write_data

TESTS = Path(__file__).parent
KINDS = ("replicate", "shard")
over_parallels = pytest.mark.parametrize("parallel", KINDS)


def over_pairs(*, default: Collection[tuple[str, str]], every: Iterable[tuple[str, str]]) -> pytest.MarkDecorator:
    marked = [pytest.param(*pair, marks=[] if pair in default else pytest.mark.laws) for pair in every]
    return pytest.mark.parametrize(("case", "parallel"), marked)


def torchrun(*command: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *command], capture_output=True, text=True, env=environment, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("parallel") / "data")


@pytest.fixture(scope="module")
def together(data: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Every case, trained by two processes."""
    out = tmp_path_factory.mktemp("together")
    run_all = ["all"] if pytestconfig.getoption("--laws") else []
    result = torchrun(str(TESTS / "parallel_training.py"), str(data), str(out), *run_all)
    assert result.returncode == 0, result.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case without dropout, trained by this process."""
    out = tmp_path_factory.mktemp("alone")
    for case in CASES:
        if "dropout" not in case:
            train(configuration(case, data), out / case)
    return out


def numbers(directory: Path) -> list[tuple[float, ...]]:
    """Return loss and gradient norm of every step, and the metrics of every validation."""
    records = list(read_metrics(RunDirectory(directory).metrics_file))
    steps = [(r["loss"], r["gradient_norm"]) for r in records if r["kind"] == "train"]
    evaluations = [(r["loss"], r["items"]) for r in records if r["kind"] == "validation"]
    assert len(steps) == STEPS and len(evaluations) == 2
    return [*steps, *evaluations]


@over_pairs(
    default=[(case, kind) for case, kinds in PAIRED.items() for kind in kinds],
    every=[(case, kind) for case in CASES if "dropout" not in case for kind in KINDS],  # processes drop other elements
)
def test_two_processes_train_as_one(case: str, parallel: str, alone: Path, together: Path) -> None:
    ours, expected = numbers(together / f"{case}-{parallel}"), numbers(alone / case)
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert [other for _, other in ours] == pytest.approx([other for _, other in expected], rel=1e-5)
    assert expected[STEPS - 1][0] < 0.95 * expected[0][0], "a run that learns"


@over_pairs(default=RESUMED_OF_PAIRS, every=RESUMED)
def test_a_resumed_run_has_the_same_bits(case: str, parallel: str, together: Path) -> None:
    whole, resumed = together / f"{case}-{parallel}", together / f"{case}-{parallel}-resumed"
    records = [
        [
            {name: value for name, value in record.items() if name not in ("time", "step_seconds")}
            for record in read_metrics(RunDirectory(each).metrics_file)
            if record["kind"] not in ("note", "end")
        ]
        for each in (whole, resumed)
    ]
    assert records[0] == records[1]
    first, second = (load_checkpoint(RunDirectory(each).checkpoints) for each in (whole, resumed))
    assert first is not None and second is not None and first.step == second.step == STEPS
    for kind, tensors in first.tensors.items():
        assert tensors.keys() == second.tensors[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second.tensors[kind][name]), (kind, name)


@over_parallels
def test_a_checkpoint_is_that_of_one_process(parallel: str, data: Path, together: Path, alone: Path) -> None:
    """Sharded tensors are stored whole, under the same names."""
    stored = load_checkpoint(RunDirectory(together / f"siamese-{parallel}").checkpoints)
    single = load_checkpoint(RunDirectory(alone / "siamese").checkpoints)
    assert stored is not None and single is not None
    for kind in ("model", "optimizer"):
        assert stored.tensors[kind].keys() == single.tensors[kind].keys()
        for name, tensor in single.tensors[kind].items():
            torch.testing.assert_close(stored.tensors[kind][name], tensor, rtol=1e-4, atol=1e-6)


def test_one_process_continues_what_two_began(data: Path, together: Path, alone: Path, tmp_path: Path) -> None:
    """The number of processes is no part of a run's identity; the record notes the change."""
    directory = interrupt(together / "pre-shard", tmp_path / "run")
    train(configuration("pre", data), directory)
    losses = [[loss for loss, _ in numbers(each)] for each in (directory, alone / "pre")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    notes = [r for r in read_metrics(RunDirectory(directory).metrics_file) if r["kind"] == "note"]
    assert any("processes 1" in note["text"] for note in notes)


COMMAND = ("-m", "siamesenorm", "train", "digits", "--steps", "3", "--optimizer.warmup-steps", "1", "--json")


def test_the_command_line_prints_once(tmp_path: Path) -> None:
    run = torchrun(*COMMAND, "--batch", "6", "--out", str(tmp_path / "run"), "--execution.compile", "off")
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("label") == 1
    assert RunDirectory(tmp_path / "run").read_environments()[0]["processes"] == 2


@pytest.mark.laws
def test_the_command_line_refuses_a_batch_that_does_not_divide(tmp_path: Path) -> None:
    refused = torchrun(*COMMAND, "--batch", "5", "--out", str(tmp_path / "other"))
    assert refused.returncode != 0 and "batch is 5" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_refusals_before_anything_is_built(data: Path, tmp_path: Path) -> None:
    two, run = World(size=2), RunDirectory(tmp_path / "run")
    with pytest.raises(UserError, match=r"monitor\.every"):
        TrainingLoop(configuration("pre", data, "shard"), run, two, (MonitorInstrument(5),))
    accumulated = dataclasses.replace(configuration("pre", data), batch=12, micro_batch=4)
    with pytest.raises(UserError, match="4: choose a divisor of 6"):
        TrainingLoop(accumulated, run, two)
    with pytest.raises(UserError, match="batch is 5"):
        TrainingLoop(dataclasses.replace(configuration("pre", data), batch=5), run, two)
    assert not run.path.exists()


def test_shares_of_the_work() -> None:
    worlds = [World(rank=rank, size=3) for rank in range(3)]
    found = [list(world.share_out(range(7))) for world in worlds]
    assert [[item for item, counts in each if counts] for each in found] == [[0, 3, 6], [1, 4], [2, 5]]
    assert {len(each) for each in found} == {3}, "sharded models run equally often in every process"
    assert World().sum(1.5, 2.0) == [1.5, 2.0] and World().gather("x") == ["x"]
