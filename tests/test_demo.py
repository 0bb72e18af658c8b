"""The demo: what it prepares and what it asks the experiment to train; the training itself is the sweep's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from siamesenorm.cli import demo
from siamesenorm.comparison.experiment_runner import Experiment
from siamesenorm.comparison.sweep_grid import SweepGrid
from siamesenorm.data import PreparedData
from siamesenorm.errors import UserError
from siamesenorm.tasks import available_tasks


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the demo asks the sweep to do, which is not done."""
    found: dict[str, Any] = {}

    def run_sweep(grid: SweepGrid, experiment: Experiment, *, report: Path) -> None:
        found.update(grid=grid, experiment=experiment, report=report)

    monkeypatch.setattr(demo, "run_sweep", run_sweep)
    return found


def test_the_demo_compares_five_topologies_and_the_control_on_the_builtin_corpus(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_the_demo_of_classification_compares_topologies_on_the_digits(asked: dict[str, Any], tmp_path: Path) -> None:
    demo.run(demo.DemoArguments(task="classification", out=tmp_path))
    template = asked["experiment"].template
    assert template.task.tag == "classification" and template.task.data == "digits"
    runs = asked["grid"].selection_runs(template)
    assert {run.method for run, _ in runs} == {"pre", "post", "siamese-post-pre", "siamese", "pre + qkv"}
    assert not (tmp_path / "data").exists(), "digits need no preparation"


def test_every_demo_is_of_a_task() -> None:
    assert demo.DEMOS.keys() <= set(available_tasks())
    assert all(each.run(Path("data")).task.tag == task for task, each in demo.DEMOS.items())
    with pytest.raises(UserError):
        demo.DemoArguments(task="letters")
