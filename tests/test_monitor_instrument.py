"""`train --monitor.every`: streams in the record of a run, and no number of it changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from checkpoint_stages import watch_stages
from refusals import complete
from siamesenorm.analysis.monitor_instrument import MonitorInstrument, MonitorOptions
from siamesenorm.cli import main
from siamesenorm.errors import UserError
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loop import train
from training_runs import records, tiny_run, write_data


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    data = write_data(tmp_path_factory.mktemp("data") / "data")
    return tiny_run(
        data,
        model={"topology": "siamese", "dropout": 0.2},
        steps=12,
        micro_batch=2,
        validation_every=4,
        execution={"checkpoint_every": 5},
    )


def kinds(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    lines = records(run)
    return [line for line in lines if line["kind"] != "streams"], records(run, "streams")


def test_a_monitored_run_has_the_numbers_of_one_without(config: RunConfig, tmp_path: Path) -> None:
    alone = train(config, tmp_path / "alone")
    monitored = train(config, tmp_path / "monitored", instruments=(MonitorInstrument(4),))
    rest, streams = kinds(tmp_path / "monitored")
    assert monitored == alone and rest == kinds(tmp_path / "alone")[0]
    assert [line["step"] for line in streams] == [1, 4, 8, 12]
    norms = {line["step"]: line["gradient_norm"] for line in rest if line["kind"] == "train"}
    assert list(streams[0]["sublayers"]["blocks.0.mlp"]["streams"]) == ["bounded", "identity"]
    assert all(0 < line["gradient_norm"] <= norms[line["step"]] * 1.0001 for line in streams), "after clipping"


def test_an_interrupted_run_resumes_to_the_same_record(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted while it writes the checkpoint of step 10, and resumes after step 5."""
    train(config, tmp_path / "whole", instruments=(MonitorInstrument(4),))
    written = []

    def interrupt(stage: str) -> None:
        written.append(stage)
        if written.count(stage) == 2:
            raise KeyboardInterrupt

    killed = tmp_path / "killed"
    models: list[nn.Module] = []

    class Spy(MonitorInstrument):
        def on_start(self, loop: Any, step: int) -> None:
            super().on_start(loop, step)
            models.append(loop.model)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch_stages(interrupt, patch.setattr)
        train(config, killed, instruments=(Spy(4),))
    assert not any(module._forward_hooks for module in models[0].modules()), "its probes are removed"
    train(config, killed, instruments=(MonitorInstrument(4),))
    assert records(killed) == records(tmp_path / "whole")


def test_the_command_records_streams(config: RunConfig, tmp_path: Path) -> None:
    words = ["train", "mini", "--data", str(config.task.data), "--steps", "4", "--monitor.every", "2"]
    assert main(complete(words, tmp_path / "run")) == 0
    assert [line["step"] for line in records(tmp_path / "run", "streams")] == [1, 2, 4]


def test_it_is_off_by_default_and_refuses_a_negative_interval() -> None:
    assert MonitorOptions().instruments() == ()
    assert len(MonitorOptions(every=3).instruments()) == 1
    with pytest.raises(UserError):
        MonitorOptions(every=-1)
