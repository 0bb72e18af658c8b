"""The disturbances are what they say, and the calibration counts what the verdict finds of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json
from siamesenorm.training.loss_curve import LossCurve
from siamesenorm.training.run_record import MetricsLog
from siamesenorm.training.verdict import DETECTOR, Thresholds
from siamesenorm.training.verdict_calibration import (
    DEFAULT_GRID,
    CalibrationReport,
    Detection,
    Fault,
    Grid,
    calibrate,
    inject_high_part,
    inject_plateau,
    inject_rise,
    inject_spike,
    read_runs,
)

ROOT = Path(__file__).parents[1]
CALIBRATIONS = {"safe": 27, "safe_digits": 20, "safe_mae": 8, "safe_dit": 8}
"""Directories of committed calibrations, and how many runs they are of."""
SMALL = Grid(
    spike_heights=(0.02, 2.0),
    spike_widths=(1, 3),
    spike_places=3,
    divergence_heights=(0.2, 1.5),
    divergence_places=1,
    high_heights=(0.1, 1.5),
    high_parts=(0.25,),
    plateau_offsets=(-0.3, 0.05),
)


def curve(seed, steps=200, **facts):
    step = np.arange(1, steps + 1)
    losses = 2.3 + 3.2 * np.exp(-step / 20) + 0.03 * np.random.default_rng(seed).standard_normal(steps)
    facts = {"steps_total": steps, "warmup_steps": 20, "floor": 3.0, "held_out": 2.3, **facts}
    return LossCurve.of(losses.tolist(), **facts)


@pytest.fixture(scope="module")
def report():
    curves = {f"run-{seed}": curve(seed) for seed in range(3)}
    spiked = dataclasses.replace(curve(9), losses=tuple(inject_spike(curve(9).losses, at=100, height=3.0, width=4)))
    return calibrate({**curves, "bad": spiked}, grid=SMALL)


def rates(report):
    """Return trials and detections by fault, height and width, all tenths together."""
    found = {}
    for each in report.detections:
        key = (each.fault, each.height, each.width)
        trials, detected = found.get(key, (0, 0))
        found[key] = (trials + each.trials, detected + each.detected)
    return found


def test_a_spike_is_a_rectangle():
    assert inject_spike([1.0] * 6, at=3, height=0.5, width=2) == [1.0, 1.0, 1.5, 1.5, 1.0, 1.0]


def test_a_rise_reaches_its_height_at_the_end():
    assert inject_rise([1.0] * 5, at=2, height=2.0) == [1.0, 1.5, 2.0, 2.5, 3.0]


def test_a_part_of_the_steps_is_high():
    high = np.array(inject_high_part([1.0] * 1000, part=0.25, height=2.0))
    assert set(high) == {1.0, 3.0}
    assert np.mean(high == 3.0) == pytest.approx(0.25, abs=0.04)


def test_a_plateau_stays_at_its_level_with_the_noise_of_the_run():
    losses = curve(1).losses
    plateau = np.array(inject_plateau(losses, level=3.0))
    assert np.array_equal(plateau[:10], losses[:10]), "above its level the run is as it was"
    assert plateau[-60:].mean() == pytest.approx(3.0, abs=0.02)
    assert plateau[-60:].std() == pytest.approx(np.std(losses[-60:]), rel=0.3)
    assert inject_plateau(losses, level=1.0) == list(losses)


def test_runs_that_are_not_stable_are_false_positives_and_get_no_faults(report):
    assert report.runs == ("run-0", "run-1", "run-2", "bad")
    assert list(report.flagged) == ["bad"]
    assert len(report.detections) == SMALL.cells
    assert {trials for trials, _ in rates(report).values()} == {3, 9}, "three runs, at one place or at three"


def test_faults_that_are_plain_to_see_are_detected_and_others_are_not(report):
    expected = {
        (Fault.SPIKE, 0.02, 1): (9, 0),
        (Fault.SPIKE, 0.02, 3): (9, 0),
        (Fault.SPIKE, 2.0, 1): (9, 0),
        (Fault.SPIKE, 2.0, 3): (9, 9),
        (Fault.STAYS, 0.2, None): (3, 0),
        (Fault.STAYS, 1.5, None): (3, 3),
        (Fault.RISES, 0.2, None): (3, 0),
        (Fault.RISES, 1.5, None): (3, 3),
        (Fault.NAN, None, None): (3, 3),
        (Fault.OFTEN_HIGH, 0.1, None): (3, 0),
        (Fault.OFTEN_HIGH, 1.5, None): (3, 3),
        (Fault.PLATEAU, -0.3, None): (3, 0),
        (Fault.PLATEAU, 0.05, None): (3, 3),
        (Fault.SHORT, None, None): (3, 0),
    }
    assert rates(report) == expected


def test_faults_begin_between_the_first_step_after_the_warmup_and_the_last(report):
    spikes = [each for each in report.detections if (each.fault, each.height, each.width) == (Fault.SPIKE, 2.0, 3)]
    assert [each.tenth for each in spikes if each.trials] == [0, 5, 9]


def test_what_the_thresholds_do_not_see_is_not_detected():
    found = calibrate({"run": curve(0)}, thresholds=Thresholds(spike_rise=5.0), grid=SMALL)
    assert rates(found)[Fault.SPIKE, 2.0, 3] == (3, 0)


def test_without_the_floor_there_are_no_plateaus():
    found = rates(calibrate({"run": curve(0, floor=None)}, grid=SMALL))
    assert found[Fault.PLATEAU, 0.05, None] == found[Fault.SHORT, None, None] == (0, 0)


@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_a_task_of_another_scale_has_the_same_rates(report, scale):
    curves = {f"run-{seed}": curve(seed, floor=3.0 * scale, scale=scale, held_out=2.3 * scale) for seed in range(3)}
    curves = {
        name: dataclasses.replace(each, losses=tuple(scale * loss for loss in each.losses))
        for name, each in curves.items()
    }
    assert rates(calibrate(curves, grid=SMALL)) == rates(report)


def test_gradient_norms_are_counted_beside():
    norms = [0.5 + 0.01 * (-1) ** step for step in range(200)]
    norms[150] = 40.0
    report = calibrate({"a": curve(0, gradient_norms=tuple(norms)), "b": curve(1)}, grid=SMALL)
    assert (report.gradient_spiked, len(report.flagged)) == (1, 0)


def test_the_report_is_json_and_markdown(report, tmp_path):
    report.write(tmp_path / "calibration.json")
    text = (tmp_path / "calibration.json").read_text()
    values = json.loads(text, parse_constant=pytest.fail)
    assert (values["thresholds"]["rise"], values["detector"]) == (0.5, DETECTOR)
    assert values["flagged"] == report.flagged
    assert [Detection(**{**each, "fault": Fault(each["fault"])}) for each in values["detections"]] == list(
        report.detections
    )
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]
    for fault in Fault:
        rows = report.table(fault).splitlines()
        assert len(rows) > 2 and len({row.count("|") for row in rows}) == 1
        assert report.table(fault) in report.markdown() or fault not in (Fault.SPIKE, Fault.OFTEN_HIGH)


# --- the committed calibration


def committed(directory):
    values = decode_json((ROOT / "benchmarks" / directory / "calibration.json").read_bytes())
    detections = tuple(Detection(**{**each, "fault": Fault(each["fault"])}) for each in values["detections"])
    return CalibrationReport(
        runs=tuple(values["runs"]),
        flagged=values["flagged"],
        gradient_spiked=values["gradient_spiked"],
        detections=detections,
        thresholds=Thresholds(**values["thresholds"]),
        unit=values["unit"],
        scale=values["scale"],
        detector=values["detector"],
    )


@pytest.mark.parametrize(("directory", "runs"), CALIBRATIONS.items())
def test_a_committed_calibration_is_of_this_detector_and_on_the_page(directory, runs):
    report = committed(directory)
    assert (report.detector, report.thresholds) == (DETECTOR, Thresholds())
    assert (len(report.runs), report.flagged) == (runs, {})
    assert len(report.detections) == DEFAULT_GRID.cells
    assert report.markdown() in (ROOT / "docs/verdict.md").read_text()


@pytest.mark.every_nth(2)
@pytest.mark.parametrize("directory", CALIBRATIONS)
def test_a_part_of_a_committed_calibration_follows_from_the_runs(directory):
    """Spikes of one nat and three steps at every place, and the plateaus."""
    report = committed(directory)
    paths = [path for name in report.runs for path in (ROOT / "benchmarks").glob(f"*/runs/{name}")]
    grid = dataclasses.replace(
        DEFAULT_GRID, spike_heights=(1.0,), spike_widths=(3,), divergence_heights=(), divergence_places=1, high_parts=()
    )
    again = calibrate(read_runs(paths), grid=grid)
    assert (again.runs, again.flagged, again.gradient_spiked) == (report.runs, {}, report.gradient_spiked)
    for fault in (Fault.SPIKE, Fault.PLATEAU, Fault.SHORT):
        now = [each for each in again.detections if each.fault is fault]
        assert now == [
            each for each in report.detections if each.fault is fault and (each.height, each.width) in
            {(found.height, found.width) for found in now}
        ]  # fmt: skip


def test_every_spike_of_one_nat_and_two_steps_is_detected_wherever_it_is():
    for each in committed("safe").detections:
        if each.fault is Fault.SPIKE and each.height in (1.0, 2.0) and each.width in (2, 3):
            assert each.detected == each.trials > 0


def test_heights_are_in_the_unit_of_the_record_and_tasks_are_not_mixed():
    report = calibrate({"a": curve(0, unit="bits", scale=0.5)}, grid=SMALL)
    assert (report.unit, report.scale) == ("bits", 0.5) and "0.5 bits" in report.markdown()
    for other in ({"unit": "nats", "scale": 0.5}, {"unit": "bits", "scale": 1.0}):
        with pytest.raises(UserError, match="each task by itself"):
            calibrate({"a": curve(0, unit="bits", scale=0.5), "b": curve(1, **other)}, grid=SMALL)


def test_calibrating_twice_gives_the_same_report():
    curves = {"run": curve(4)}
    assert calibrate(curves, grid=SMALL).to_json() == calibrate(curves, grid=SMALL).to_json()


def test_run_directories_are_read_by_name(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with MetricsLog(run / "metrics.jsonl") as log:
        log.append({"kind": "model", "steps": 2, "warmup_steps": 1, "floor": 2.9, "unit": "nats/token"})
        log.append({"kind": "train", "step": 1, "loss": 5.0})
        log.append({"kind": "train", "step": 2, "loss": 4.0})
    (name, read), *others = read_runs([run]).items()
    assert (name, others) == ("run", [])
    assert (read.losses, read.steps_total, read.floor, read.unit) == ((5.0, 4.0), 2, 2.9, "nats/token")


def test_two_runs_of_one_name_are_refused(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "losses.csv").write_text("3\n2\n")
    with pytest.raises(UserError):
        read_runs([tmp_path / "a" / "losses.csv", tmp_path / "b" / "losses.csv"])


def test_no_runs_are_refused():
    with pytest.raises(UserError):
        calibrate({})
