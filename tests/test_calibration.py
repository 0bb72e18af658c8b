"""The disturbances are what they say, and the calibration counts what the verdict finds of them."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from siamesenorm.errors import UserError
from siamesenorm.training.calibration import (
    Grid,
    calibrate,
    inject_divergence,
    inject_plateau,
    inject_spike,
    read_runs,
)
from siamesenorm.training.curves import LossCurve
from siamesenorm.training.metrics import MetricsLog
from siamesenorm.training.verdict import Thresholds

SMALL = Grid(
    spike_heights=(0.02, 2.0),
    spike_widths=(1, 3),
    divergence_heights=(0.2, 1.5),
    plateau_offsets=(-0.3, 0.05),
    places=(0.5,),
)


def curve(seed, steps=200, **facts):
    step = np.arange(1, steps + 1)
    losses = 2.3 + 3.2 * np.exp(-step / 20) + 0.03 * np.random.default_rng(seed).standard_normal(steps)
    facts = {"steps_total": steps, "warmup_steps": 20, "unigram_entropy": 3.0, **facts}
    return LossCurve(steps=tuple(range(1, steps + 1)), losses=tuple(losses.tolist()), **facts)


@pytest.fixture(scope="module")
def report():
    curves = {f"run-{seed}": curve(seed) for seed in range(3)}
    spiked = dataclasses.replace(curve(9), losses=tuple(inject_spike(curve(9).losses, at=100, height=3.0, width=4)))
    return calibrate({**curves, "bad": spiked}, grid=SMALL)


def test_a_spike_is_a_rectangle():
    assert inject_spike([1.0] * 6, at=3, height=0.5, width=2) == [1.0, 1.0, 1.5, 1.5, 1.0, 1.0]


def test_divergences_reach_the_end():
    assert inject_divergence([1.0] * 4, at=3, height=2.0) == [1.0, 1.0, 3.0, 3.0]
    assert inject_divergence([1.0] * 5, at=2, height=2.0, kind="rise") == [1.0, 1.5, 2.0, 2.5, 3.0]
    broken = inject_divergence([1.0] * 4, at=3, height=2.0, kind="nan")
    assert broken[:2] == [1.0, 1.0]
    assert all(math.isnan(loss) for loss in broken[2:])


def test_a_plateau_stays_at_its_level_with_the_noise_of_the_run():
    losses = curve(1).losses
    plateau = np.array(inject_plateau(losses, level=3.0))
    assert np.array_equal(plateau[:10], losses[:10]), "above its level the run is as it was"
    assert plateau[-60:].mean() == pytest.approx(3.0, abs=0.02)
    assert plateau[-60:].std() == pytest.approx(np.std(losses[-60:]), rel=0.3)
    assert inject_plateau(losses, level=1.0) == list(losses)


def test_runs_that_are_not_stable_are_false_positives_and_are_not_disturbed(report):
    assert report.runs == ("run-0", "run-1", "run-2", "bad")
    assert list(report.flagged) == ["bad"]
    assert report.flagged["bad"].startswith("spiked 1x, at step 100")
    assert {detection.trials for detection in report.detections} == {3}


def test_the_rates_are_those_of_what_is_plain_to_see(report):
    rates = {(each.disturbance, each.height, each.width): each.rate for each in report.detections}
    assert rates == {
        ("spike", 0.02, 1): 0,
        ("spike", 0.02, 3): 0,
        ("spike", 2.0, 1): 0,
        ("spike", 2.0, 3): 1,
        ("rises and stays", 0.2, None): 0,
        ("rises and stays", 1.5, None): 1,
        ("rises to the end", 0.2, None): 0,
        ("rises to the end", 1.5, None): 1,
        ("rises shortly before the end", 0.2, None): 0,
        ("rises shortly before the end", 1.5, None): 1,
        ("becomes NaN", None, None): 1,
        ("stays at the unigram entropy plus", -0.3, None): 0,
        ("stays at the unigram entropy plus", 0.05, None): 1,
    }


def test_what_the_thresholds_do_not_see_is_not_detected():
    grid = dataclasses.replace(SMALL, spike_heights=(2.0,), spike_widths=(3,))
    detection = calibrate({"run": curve(0)}, thresholds=Thresholds(spike_rise=5.0), grid=grid).detections[0]
    assert (detection.disturbance, detection.trials, detection.detected) == ("spike", 1, 0)


def test_without_the_unigram_entropy_there_are_no_plateaus():
    report = calibrate({"run": curve(0, unigram_entropy=None)}, grid=SMALL)
    plateaus = [each for each in report.detections if each.disturbance.startswith("stays at")]
    assert [each.trials for each in plateaus] == [0, 0]
    assert all(math.isnan(each.rate) for each in plateaus)
    assert "no trial" in report.markdown()


def test_gradient_norms_are_counted_beside(tmp_path):
    norms = [0.5 + 0.01 * (-1) ** step for step in range(200)]
    norms[150] = 40.0
    report = calibrate({"a": curve(0, gradient_norms=tuple(norms)), "b": curve(1)}, grid=SMALL)
    assert (report.gradient_spiked, len(report.flagged)) == (1, 0)


def test_the_report_is_json_and_markdown(report, tmp_path):
    report.write(tmp_path / "calibration.json")
    text = (tmp_path / "calibration.json").read_text()
    values = json.loads(text, parse_constant=pytest.fail)
    assert values["thresholds"]["rise"] == 0.5
    assert values["flagged"] == report.flagged
    assert len(values["detections"]) == len(report.detections)
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]

    markdown = report.markdown()
    assert "False positives: 1 of 4 safe runs" in markdown
    assert (
        "| spike, nats | 1 step | 3 steps |\n| --- | ---: | ---: |\n| 0.02 | 0 % | 0 % |\n| 2 | 0 % | 100 % |"
        in markdown
    )
    assert "| rises and stays | +1.5 | 3 | 100 % |" in markdown
    assert "| becomes NaN |  | 3 | 100 % |" in markdown


def test_calibrating_twice_gives_the_same_report():
    curves = {"run": curve(4)}
    assert calibrate(curves, grid=SMALL).to_json() == calibrate(curves, grid=SMALL).to_json()


def test_run_directories_are_read_by_name(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with MetricsLog(run / "metrics.jsonl") as log:
        log.append({"kind": "model", "steps": 2, "warmup_steps": 1, "floor": 2.9})
        log.append({"kind": "train", "step": 1, "loss": 5.0})
        log.append({"kind": "train", "step": 2, "loss": 4.0})
    (name, read), *others = read_runs([run]).items()
    assert (name, others) == ("run", [])
    assert (read.losses, read.steps_total, read.unigram_entropy) == ((5.0, 4.0), 2, 2.9)


def test_two_runs_of_one_name_are_refused(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "losses.csv").write_text("3\n2\n")
    with pytest.raises(UserError, match="two runs are called losses.csv"):
        read_runs([tmp_path / "a" / "losses.csv", tmp_path / "b" / "losses.csv"])


def test_no_runs_are_refused():
    with pytest.raises(UserError, match="no runs"):
        calibrate({})
