"""The demo: what it prepares and what it asks the sweep to train; the training itself is the sweep's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from siamesenorm.cli import demo
from siamesenorm.comparison.grid import Grid
from siamesenorm.data import PreparedData
from siamesenorm.training.config import RunConfig


def test_the_demo_compares_the_story_s_topologies_on_the_builtin_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def run_sweep(grid: Grid, plan: RunConfig, out: Path, jobs: int, *, report: Path, command: str) -> None:
        asked.update(grid=grid, plan=plan, out=out, jobs=jobs, report=report, command=command)

    monkeypatch.setattr(demo, "run_sweep", run_sweep)
    demo.run(demo.Arguments(out=tmp_path, jobs=2))

    template = asked["plan"].resolved()
    runs = list(asked["grid"].selection_runs(template))
    labels = {run.label for run in runs}
    assert {"pre", "post", "hybridnorm", "siamese-post-pre", "siamese", "pre + qkv"} == labels
    assert len({run.optimizer.learning_rate for run in runs}) >= 2 and len({run.identity for run in runs}) == len(runs)
    assert PreparedData.open(tmp_path / "data").digest == template.task.digest
    assert (
        template.steps * template.batch * template.task.model.context
        < PreparedData.open(tmp_path / "data").split("train").tokens
    )
    assert asked["jobs"] == 2 and asked["report"] == tmp_path / "report"
