"""Run and sweep directories read back: what a result is, and what unfinished, missing and damaged runs become."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from comparison_sweeps import METHODS, PRE, SyntheticMethod, SyntheticRun, runs_of, write_run, write_sweep
from siamesenorm.comparison.results import read_run, read_sweep, undisturbed_step_seconds
from siamesenorm.errors import UserError

RUN = SyntheticRun(method=PRE, rate=2e-3, seed=3, wanted=1.64, steps=80)


def records_of(path: Path, kind: str) -> list[dict[str, float]]:
    records = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RUN)
    result = read_run(tmp_path / "run")
    losses = [record["loss"] for record in records_of(tmp_path / "run", "train")]
    assert (result.method.name, result.method.topology, result.method.norm) == ("pre", "pre", "rmsnorm")
    assert (result.learning_rate, result.seed, result.status, result.word) == (2e-3, 3, "finished", "stable")
    assert result.train_loss == pytest.approx(np.mean(losses[72:]))
    assert result.held_out_loss == records_of(tmp_path / "run", "validation")[-1]["loss"]
    assert (result.held_out_step, result.steps, result.steps_done) == (80, 80, 80)
    assert (result.parameters, result.flops_per_token) == (1_648_000, 9_888_000.0)
    assert result.peak_memory_bytes == 612 * 2**20
    assert result.losses.values.tolist() == losses
    assert len(result.gradient_norms.steps) == 80
    assert result.complete and result.converged and result.score == result.held_out_loss


def test_step_time_is_that_of_the_undisturbed_half(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RUN)
    assert read_run(tmp_path / "run").step_seconds == pytest.approx(PRE.step_seconds)
    assert undisturbed_step_seconds([9.0, 1.0, 3.0, 2.0, 8.0]) == 2.0
    assert undisturbed_step_seconds([]) is None


@pytest.mark.parametrize(
    ("tokens", "passes", "once"), [(163_840, 1.0, True), (163_839, 1.0, False), (40_960, 4, False)]
)
def test_whether_data_was_seen_at_most_once(tmp_path: Path, tokens: int, passes: float, once: bool) -> None:
    write_run(tmp_path / "run", dataclasses.replace(RUN, train_tokens=tokens))
    result = read_run(tmp_path / "run")
    assert result.passes_over_data == pytest.approx(passes, rel=1e-4)
    assert result.saw_data_at_most_once is once


def test_a_run_that_lost_its_numbers_diverged_and_has_no_score(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dataclasses.replace(RUN, wanted="not finite"))
    result = read_run(tmp_path / "run")
    assert (result.status, result.word, result.steps_done) == ("stopped_early", "diverged", 60)
    assert result.verdict is not None and result.verdict.reasons[0] == "not finite"
    assert not result.converged and result.score == float("inf")
    assert result.train_loss is None
    assert np.isnan(result.losses.values[-1])


def test_an_unfinished_run_has_no_verdict_and_no_train_loss(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dataclasses.replace(RUN, until=50))
    result = read_run(tmp_path / "run")
    assert (result.status, result.verdict, result.train_loss, result.steps_done) == ("unfinished", None, None, 50)
    assert not result.complete and not result.converged


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
    sweep = read_sweep(tmp_path)
    assert [run.seed for run in sweep.unfinished] == [1]
    reasons = {run.path.name: run.reason for run in sweep.missing}
    assert reasons["never"] == reasons[runs[3].identity] == "not started"
    assert reasons[damaged.name].startswith("config.json is not JSON")
    assert len(sweep.runs) == 4


def test_methods_and_rates_come_in_order(tmp_path: Path) -> None:
    write_sweep(tmp_path, list(reversed(runs_of(METHODS[:2], steps=40))))
    sweep = read_sweep(tmp_path)
    assert [method.name for method in sweep.methods] == ["pre + qkv", "pre"]
    assert [method.normalises_values for method in sweep.methods] == [True, False]
    assert sweep.learning_rates == (2e-3, 8e-3, 3e-2)


def test_methods_that_share_a_label_are_told_apart(tmp_path: Path) -> None:
    same_label = [PRE, SyntheticMethod(label="pre", losses=PRE.losses, norm="layernorm")]
    write_sweep(tmp_path, runs_of(same_label, steps=40))
    assert {method.name for method in read_sweep(tmp_path).methods} == {"pre · rmsnorm", "pre · layernorm"}


def test_the_selection_seed_is_the_one_named_else_the_most_frequent(tmp_path: Path) -> None:
    runs = runs_of([PRE], seeds=(4,), steps=40) + runs_of([PRE], rates=(2e-3,), seeds=(1, 2), steps=40)
    write_sweep(tmp_path / "frequent", runs)
    write_sweep(tmp_path / "named", runs, grid={"selection_seed": 2})
    assert read_sweep(tmp_path / "frequent").selection_seed == 4
    assert read_sweep(tmp_path / "named").selection_seed == 2


def test_what_is_no_sweep_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no sweep\.json: name the directory"):
        read_sweep(tmp_path)
    write_sweep(tmp_path, [], missing=["never"])
    with pytest.raises(UserError, match="no run of .* has started"):
        read_sweep(tmp_path)
    write_run(tmp_path / "run", RUN)
    (tmp_path / "run" / "config.json").write_text('{"model": {"topology": {"name": "pre"}, "norm": {"name": "x"}}}')
    with pytest.raises(UserError, match="not a run this version can read"):
        read_run(tmp_path / "run")
