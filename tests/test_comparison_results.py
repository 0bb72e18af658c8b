"""Run and sweep directories read back: what a result is, and what unfinished, missing and damaged runs become."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from comparison_sweeps import METHODS, PRE, SyntheticRun, runs_of, write_run, write_sweep
from siamesenorm.comparison.experiment_plan import Part
from siamesenorm.comparison.results import read_experiment, read_run, read_single_run, undisturbed_step_seconds
from siamesenorm.errors import UserError
from training_runs import edit_json

RUN = SyntheticRun(method=PRE, rate=2e-3, seed=3, wanted=1.64, steps=80)


def records_of(path: Path, kind: str) -> list[dict[str, float]]:
    records = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RUN)
    result = read_run(tmp_path / "run")
    losses = [record["loss"] for record in records_of(tmp_path / "run", "train")]
    assert (result.method, result.label, result.part) == ("pre", "pre", Part.SELECTION)
    assert (result.learning_rate, result.seed, result.status, result.word) == (2e-3, 3, "finished", "stable")
    assert result.train_loss == pytest.approx(np.mean(losses[72:]))
    assert result.held_out["loss"] == records_of(tmp_path / "run", "validation")[-1]["loss"]
    assert (result.held_out_step, result.steps, result.steps_done) == (80, 80, 80)
    assert (result.parameters, result.flops_per_item) == (1_648_000, 9_888_000.0)
    assert result.held_out["perplexity"] == pytest.approx(np.exp(result.held_out["loss"]))
    assert result.peak_memory_bytes == 612 * 2**20
    assert result.losses.values.tolist() == losses
    assert len(result.gradient_norms.steps) == 80
    assert result.complete and result.has_result and result.score == result.held_out["loss"]


def test_step_time_is_that_of_the_undisturbed_half(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RUN)
    assert read_run(tmp_path / "run").step_seconds == pytest.approx(PRE.step_seconds)
    assert undisturbed_step_seconds([9.0, 1.0, 3.0, 2.0, 8.0]) == 2.0
    assert undisturbed_step_seconds([]) is None


@pytest.mark.parametrize(("tokens", "passes"), [(163_840, 1.0), (40_960, 4)])
def test_how_often_the_data_was_seen(tmp_path: Path, tokens: int, passes: float) -> None:
    write_run(tmp_path / "run", dataclasses.replace(RUN, train_tokens=tokens))
    result = read_run(tmp_path / "run")
    assert result.passes_over_data == pytest.approx(passes, rel=1e-4)


def test_a_run_that_lost_its_numbers_diverged_and_has_no_score(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dataclasses.replace(RUN, wanted="not finite"))
    result = read_run(tmp_path / "run")
    assert (result.status, result.word, result.steps_done) == ("stopped_early", "diverged", 60)
    assert result.verdict is not None and result.verdict.reasons[0] == "not finite"
    assert not result.has_result and result.score == float("inf")
    assert result.train_loss is None
    assert np.isnan(result.losses.values[-1])


def test_an_unfinished_run_has_no_verdict_and_no_train_loss(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dataclasses.replace(RUN, until=50))
    result = read_run(tmp_path / "run")
    assert (result.status, result.verdict, result.train_loss, result.steps_done) == ("unfinished", None, None, 50)
    assert not result.complete and not result.has_result


def test_a_line_that_a_killed_process_left_half_written_is_dropped(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dataclasses.replace(RUN, until=50))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 51, "lo')
    assert read_run(tmp_path / "run").steps_done == 50


def test_a_verdict_that_is_not_stored_is_judged_from_the_record(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dataclasses.replace(RUN, wanted="rises"))
    stored = read_run(tmp_path / "run").verdict
    (tmp_path / "run" / "verdict.json").unlink()
    assert read_run(tmp_path / "run").verdict == stored
    assert stored is not None and stored.label == "diverged"


def test_a_sweep_lists_what_is_unfinished_missing_and_damaged(tmp_path: Path) -> None:
    runs = runs_of([PRE], seeds=(0, 1), steps=40)
    runs[1] = dataclasses.replace(runs[1], until=20)
    write_sweep(tmp_path, runs, missing=["never"])
    damaged = tmp_path / "runs" / runs[2].identity
    (damaged / "config.json").write_text("{")
    (tmp_path / "runs" / runs[3].identity / "metrics.jsonl").unlink()
    sweep = read_experiment(tmp_path)
    assert [run.seed for run in sweep.unfinished] == [1]
    assert sweep.missing["never"] == sweep.missing[runs[3].identity] == "not started"
    assert damaged.name in sweep.missing
    assert len(sweep.runs) == 4


def test_methods_and_rates_come_in_order(tmp_path: Path) -> None:
    write_sweep(tmp_path, list(reversed(runs_of(METHODS[:2], steps=40))))
    sweep = read_experiment(tmp_path)
    assert sweep.methods == ("pre + qkv", "pre")
    assert [sweep.runs_of(method)[0].normalises_values for method in sweep.methods] == [True, False]
    assert sweep.learning_rates == (2e-3, 8e-3, 3e-2)


def test_a_single_run_is_read_as_an_experiment_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RUN)
    (run,) = read_single_run(tmp_path / "run").runs
    assert (run.method, run.learning_rate, run.seed, run.part) == ("pre", 2e-3, 3, Part.SELECTION)


def test_runs_computed_with_different_kernels_are_not_compared_unless_asked(tmp_path: Path) -> None:
    runs = runs_of([PRE], steps=40)
    write_sweep(tmp_path, runs)
    file = tmp_path / "runs" / runs[0].identity / "environment.json"
    for changes in ({"kernels": "fused"}, {"compiled": True}):
        before = file.read_text()
        edit_json(file, **changes)
        with pytest.raises(UserError):
            read_experiment(tmp_path)
        assert len(read_experiment(tmp_path, mixed=True).runs) == 3
        file.write_text(before)
    assert len(read_experiment(tmp_path).runs) == 3


def test_directories_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        read_experiment(tmp_path)
    write_sweep(tmp_path, [], missing=["never"])
    with pytest.raises(UserError):
        read_experiment(tmp_path)
    for content in ("{", "[]", '{"schema": 1}', '{"schema": 2}'):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(UserError):
            read_experiment(tmp_path)
    write_run(tmp_path / "run", RUN)
    (tmp_path / "run" / "config.json").write_text('{"schema": 2, "model": {}}')
    with pytest.raises(UserError):
        read_run(tmp_path / "run")
