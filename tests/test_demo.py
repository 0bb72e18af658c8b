"""The demo: what it prepares and what it asks the experiment to train; the training itself is the sweep's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from siamesenorm.cli import demo
from siamesenorm.comparison.experiment_runner import Experiment
from siamesenorm.comparison.sweep_grid import SweepGrid
from siamesenorm.data import PreparedData


def test_the_demo_compares_five_topologies_and_the_control_on_the_builtin_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def run_sweep(grid: SweepGrid, experiment: Experiment, *, report: Path) -> None:
        asked.update(grid=grid, experiment=experiment, report=report)

    monkeypatch.setattr(demo, "run_sweep", run_sweep)
    demo.run(demo.DemoArguments(out=tmp_path, jobs=2))

    experiment, report = asked["experiment"], asked["report"]
    runs = asked["grid"].selection_runs(experiment.template)
    assert {run.method for run, _ in runs} == {"pre", "post", "hybridnorm", "siamese-post-pre", "siamese", "pre + qkv"}
    assert len({run.learning_rate for run, _ in runs}) >= 2
    assert len({config.identity for _, config in runs}) == len(runs)
    template = experiment.template
    data = PreparedData.open(tmp_path / "data")
    assert data.digest == template.task.digest
    assert template.steps * template.batch * template.task.model.context < data.split("train").tokens
    assert (experiment.jobs, report) == (2, tmp_path / "report")
    assert f"{len(runs)} runs of {template.steps} steps" in capsys.readouterr().err, "it says what it will take"
