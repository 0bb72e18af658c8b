"""Loss curves from anybody's file, and one clear line about what cannot be read."""

from __future__ import annotations

import json
import math

import pytest

from siamesenorm.errors import UserError
from siamesenorm.training.curves import LossCurve, loss_curve, read_loss_curve
from siamesenorm.training.metrics import MetricsLog

OUR_RECORDS = [
    {"kind": "model", "label": "pre", "floor": 2.9, "steps": 400, "warmup_steps": 40},
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
    assert (curve.steps_total, curve.warmup_steps, curve.unigram_entropy) == (400, 40, 2.9)


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
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        (b"\x80\x04\x95\xff", "is not text"),
        (b"loss\n1\n\x00\x00\x002\n", "is not text"),
        ("step,los\n1,2\n", "unknown column 'loss': did you mean los"),
        ("step,accuracy\n1,2\n", "unknown column 'loss'.* accuracy, step"),
        ("loss\n", "has no loss"),
        ("loss\n2\nabc\n", "line 3: loss is 'abc', not a number"),
        ("loss,step\n2,1\n3,x\n", "line 3: step is 'x', not a number"),
        ("loss,step\n2,1\n3,1.5\n", "line 3: step is '1.5', not a whole number"),
        ("loss,grad_norm\n2,1\n3,big\n", "line 3: grad_norm is 'big', not a number"),
        ("step,loss\n1,2\n3,2\n2,2\n", "line 4: step 2 follows step 3"),
        ("step,loss\n1,2\n2\n", "line 3: 1 cells where the first line has 2"),
        ("1,2,3,4\n", "4 columns and no header"),
        ('loss\n"2\n', "is not CSV"),
        ('{"loss": 2}\n{"loss":\n{"loss": 3}\n', "line 2 is not JSON"),
        ('{"loss": 2}\n{"loss": true}\n', "line 2: loss is True, not a number"),
        ("[1, 2,\n x]", "line 2 is not JSON"),
        ("[[1, 2], [2, 3]]", "item 1: expected a number or an object with a 'loss'"),
        ('[1, "x"]', "item 2: loss is 'x', not a number"),
        ("[]", "has no loss"),
        ('{"kind": "model", "steps": 4}\n', "has no loss"),
        ('{"kind": "model", "steps": "x"}\n{"kind": "train", "loss": 2}\n', "line 1: steps is 'x', not a"),
        ('{"kind": "model", "steps": 2.5}\n{"kind": "train", "loss": 2}\n', "line 1: steps is 2.5, not a whole number"),
        ('{"kind": "model", "warmup_steps": []}\n{"kind": "train", "loss": 2}\n', r"line 1: warmup_steps is \[\]"),
        ('{"kind": "model", "floor": "nan"}\n{"kind": "train", "loss": 2}\n', "unigram_entropy is nan"),
        ('{"kind": "model", "steps": 1}\n[]\n', "line 2: expected a number or an object"),
        ("[" * 200_000, "line 1 is not JSON: nested too deeply"),
        ('{"a":' * 200_000 + "\n2\n", "line 1 is not JSON"),
        ("[1" + "0" * 400 + "]", "item 1: loss is 1000.*, not a number"),
        ("[1" + "0" * 5000 + "]", "is not JSON that can be read"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(write, text, message):
    path = write(text)
    with pytest.raises(UserError, match=message) as caught:
        read_loss_curve(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_headerless_table_has_no_named_columns(write):
    with pytest.raises(UserError, match="has no header, so no column 'train'"):
        read_loss_curve(write("1\n2\n"), column="train")


def test_a_missing_file_and_an_empty_directory(tmp_path):
    with pytest.raises(UserError, match="cannot read .*curve.csv: No such file"):
        read_loss_curve(tmp_path / "curve.csv")
    with pytest.raises(UserError, match="cannot read .*metrics.jsonl"):
        read_loss_curve(tmp_path)
