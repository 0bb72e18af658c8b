"""Loss curves from anybody's file, and one clear line about what cannot be read."""

from __future__ import annotations

import json
import math

import pytest

from siamesenorm.errors import UserError
from siamesenorm.training.loss_curve import LossCurve, loss_curve, read_loss_curve
from siamesenorm.training.run_record import MetricsLog

OUR_RECORDS = [
    {"kind": "model", "label": "pre", "floor": 2.9, "steps": 400, "warmup_steps": 40, "scale": 0.5},
    {"kind": "train", "step": 1, "loss": 5.5, "gradient_norm": 1.5, "time": 0.1},
    {"kind": "train", "step": 2, "loss": math.nan, "gradient_norm": math.inf, "time": 0.2},
    {"kind": "validation", "step": 2, "loss": 7.0},
    {"kind": "end", "step": 2, "status": "stopped_early"},
]


@pytest.fixture
def write(tmp_path):
    def written(text, name="curve.txt"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return written


def assert_our_curve(curve):
    assert curve.steps == (1, 2)
    assert curve.losses[0] == 5.5
    assert math.isnan(curve.losses[1])
    assert curve.gradient_norms == (1.5, math.inf)
    assert (curve.steps_total, curve.warmup_steps, curve.floor) == (400, 40, 2.9)
    assert (curve.scale, curve.held_out) == (0.5, 7.0)


def test_our_record_gives_training_losses_and_the_facts_of_the_run(tmp_path):
    assert_our_curve(loss_curve(OUR_RECORDS))
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for record in OUR_RECORDS:
            log.append(record)
    assert_our_curve(read_loss_curve(tmp_path))
    assert_our_curve(read_loss_curve(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize(
    "text",
    [
        "step,loss,grad_norm\n10,3.5,0.5\n20,3.25,\n30,3,1\n",
        "\ufeffgrad_norm;Loss;Step\r\n0.5;3.5;10\r\n;3.25;20\r\n1;3;30\r\n",
        "_step\tloss\tgradient_norm\n\n10\t3.5\t0.5\n20\t3.25\t\n25\t\t\n30\t3\t1",
        '[{"step": 10, "loss": 3.5, "grad_norm": 0.5}, {"step": 20, "loss": 3.25}, '
        '{"step": 30, "loss": 3, "grad_norm": 1}]',
        '{"global_step": 10, "loss": 3.5, "grad_norm": 0.5}\n{"global_step": 15, "eval_loss": 9}\n'
        '{"global_step": 20, "loss": 3.25, "grad_norm": null}\n{"global_step": 30, "loss": 3, "grad_norm": 1}\n',
        json.dumps(
            {
                "global_step": 30,
                "log_history": [
                    {"step": 10, "loss": 3.5, "grad_norm": 0.5},
                    {"step": 15, "eval_loss": 9},
                    {"step": 20, "loss": 3.25},
                    {"step": 30, "loss": 3, "grad_norm": 1},
                ],
            },
            indent=2,
        ),
    ],
)
def test_tables_of_every_kind_are_the_same_curve(write, text):
    assert read_loss_curve(write(text)) == LossCurve(
        steps=(10, 20, 30), losses=(3.5, 3.25, 3.0), gradient_norms=(0.5, None, 1.0)
    )


@pytest.mark.parametrize("text", ["3.5\n3.25\n3\n", "loss\n3.5\n3.25\n3\n", "[3.5, 3.25, 3]", "1,3.5\n2,3.25\n3,3\n"])
def test_losses_alone_count_their_steps_from_one(write, text):
    assert read_loss_curve(write(text)) == LossCurve(steps=(1, 2, 3), losses=(3.5, 3.25, 3.0))


def test_a_curve_downloaded_from_tensorboard_is_read(write):
    path = write("Wall time,Step,Value\n1700000000.1,10,3.5\n1700000001.2,20,3.25\n")
    assert read_loss_curve(path, column="Value") == LossCurve(steps=(10, 20), losses=(3.5, 3.25))


def test_the_held_out_loss_is_the_last_one():
    later = [*OUR_RECORDS, {"kind": "validation", "step": 4, "loss": 6.0}]
    assert loss_curve(later).held_out == 6.0
    assert loss_curve(OUR_RECORDS[:3]).held_out is None


def test_a_headerless_table_may_have_gradient_norms(write):
    curve = read_loss_curve(write("5,3.5,0.5\n6,nan,inf\n"))
    assert curve.steps == (5, 6)
    assert curve.gradient_norms == (0.5, math.inf)
    assert math.isnan(curve.losses[1])


def test_another_column_can_be_the_loss(write):
    path = write("Step,train/loss,loss\n1,2.5,9\n2,2.25,9\n")
    assert read_loss_curve(path, column="train/loss").losses == (2.5, 2.25)


@pytest.mark.parametrize("text", ['{"loss": NaN}\n{"loss": Infinity}\n', '{"loss": "nan"}\n{"loss": "inf"}\n'])
def test_both_ways_of_writing_nan_are_read(write, text):
    first, second = read_loss_curve(write(text)).losses
    assert math.isnan(first)
    assert second == math.inf


def test_a_half_written_last_line_does_not_count(write):
    assert read_loss_curve(write('{"loss": 2}\n{"loss": 1')).losses == (2.0,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\n",
        b"\x80\x04\x95\xff",
        b"loss\n1\n\x00\x00\x002\n",
        "step,los\n1,2\n",
        "step,accuracy\n1,2\n",
        "loss\n",
        "loss\n2\nabc\n",
        "loss,step\n2,1\n3,x\n",
        "loss,step\n2,1\n3,1.5\n",
        "loss,grad_norm\n2,1\n3,big\n",
        "step,loss\n1,2\n3,2\n2,2\n",
        "step,loss\n1,2\n2\n",
        "1,2,3,4\n",
        'loss\n"2\n',
        '{"loss": 2}\n{"loss":\n{"loss": 3}\n',
        '{"loss": 2}\n{"loss": true}\n',
        "[1, 2,\n x]",
        "[[1, 2], [2, 3]]",
        '[1, "x"]',
        "[]",
        '{"kind": "model", "steps": 4}\n',
        '{"kind": "model", "steps": "x"}\n{"kind": "train", "loss": 2}\n',
        '{"kind": "model", "steps": 2.5}\n{"kind": "train", "loss": 2}\n',
        '{"kind": "model", "warmup_steps": []}\n{"kind": "train", "loss": 2}\n',
        '{"kind": "model", "floor": "nan"}\n{"kind": "train", "loss": 2}\n',
        '{"kind": "model", "steps": 1}\n[]\n',
        "[" * 200_000,
        '{"a":' * 200_000 + "\n2\n",
        "[1" + "0" * 400 + "]",
        "[1" + "0" * 5000 + "]",
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(write, text):
    path = write(text)
    with pytest.raises(UserError) as caught:
        read_loss_curve(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_headerless_table_has_no_named_columns(write):
    with pytest.raises(UserError):
        read_loss_curve(write("1\n2\n"), column="train")


def test_a_missing_file_and_an_empty_directory(tmp_path):
    with pytest.raises(UserError):
        read_loss_curve(tmp_path / "curve.csv")
    with pytest.raises(UserError):
        read_loss_curve(tmp_path)
