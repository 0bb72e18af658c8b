"""The record of a run: what is written is read back, and no crash makes it unreadable."""

from __future__ import annotations

import errno
import json
import math
import os

import numpy as np
import pytest

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, encode_json
from siamesenorm.training.run_record import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def train(step, loss=2.5):
    return {"kind": "train", "step": step, "loss": loss, "gradient_norm": 0.7, "time": 0.1 * step, "step_seconds": 0.1}


def test_records_are_read_back_with_every_bit(path):
    records = [train(1, 0.1 + 0.2), train(2, 5e-324), {"kind": "model", "label": "siamese", "options": [1, None, True]}]
    with MetricsLog(path) as log:
        for record in records:
            log.append(record)
    assert read_metrics(path) == records


def test_non_finite_numbers_are_strings_in_the_file_and_floats_again(path):
    with MetricsLog(path) as log:
        log.append(train(1, math.nan))
        log.append({"kind": "train", "loss": math.inf, "gradient_norm": -math.inf})
    lines = path.read_text().splitlines()
    assert json.loads(lines[0], parse_constant=pytest.fail)["loss"] == "nan"
    assert json.loads(lines[1])["gradient_norm"] == "-inf"
    first, second = read_metrics(path)
    assert math.isnan(first["loss"])
    assert (second["loss"], second["gradient_norm"]) == (math.inf, -math.inf)


def test_every_record_is_in_the_file_when_append_returns(path):
    log = MetricsLog(path)
    for step in range(1, 4):
        log.append(train(step))
        assert log.sync() == path.stat().st_size
        assert len(read_metrics(path)) == step
    log.sync()
    log.close()


def test_truncate_goes_back_to_a_checkpoint_and_the_log_goes_on(path):
    with MetricsLog(path) as log:
        log.append(train(1))
        offset, content = log.sync(), path.read_bytes()
        log.append(train(2, 9.9))
        log.truncate(offset)
        assert path.read_bytes() == content
        log.append(train(2, 2.4))
    assert [record["loss"] for record in read_metrics(path)] == [2.5, 2.4]


def test_resuming_gives_the_same_bytes_as_never_stopping(path, tmp_path):
    whole = tmp_path / "whole.jsonl"
    with MetricsLog(whole) as log:
        for step in range(1, 7):
            log.append(train(step))
    with MetricsLog(path) as log:
        for step in range(1, 4):
            log.append(train(step))
        offset = log.sync()
        log.append(train(4))
    with open(path, "ab") as file:
        file.write(b'{"kind": "train", "st')
    with MetricsLog(path) as log:
        log.truncate(offset)
        for step in range(4, 7):
            log.append(train(step))
    assert path.read_bytes() == whole.read_bytes()


def test_opening_cuts_off_a_half_written_line_however_long(path):
    path.write_bytes(b'{"step": 1}\n' + b"x" * 200_000)
    with MetricsLog(path) as log:
        assert log.sync() == 12
        log.append({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("offset", [-1, 13, 5])
def test_truncate_refuses_an_offset_where_no_line_ends(path, offset):
    path.write_bytes(b'{"step": 1}\n')
    with MetricsLog(path) as log, pytest.raises(UserError):
        log.truncate(offset)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_half_written_last_line_is_dropped_and_a_whole_one_without_its_end_is_not(path):
    path.write_bytes(b'{"step": 1}\n{"step": 2, "loss": 2.')
    assert read_metrics(path) == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b'{"step": 1}\n\0\0\0\0')
    assert read_metrics(path) == [{"step": 1}]


@pytest.mark.parametrize("broken", [b'{"step": 2', b"\xff\xfe", b"[1]", b"3"])
def test_a_broken_line_in_the_middle_is_named(path, broken):
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2"):
        read_metrics(path)


def test_a_missing_file_is_reported_in_one_line(path):
    with pytest.raises(UserError, match="metrics.jsonl"):
        read_metrics(path)


def test_a_full_disk_takes_the_line_back(path, monkeypatch):
    log = MetricsLog(path)
    log.append(train(1))
    content = path.read_bytes()

    class FullDisk:
        """Takes ten bytes, then has no room."""

        def __init__(self, file):
            self.file, self.room = file, 10

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written, self.room = self.file.write(data[: self.room]), 0
            return written

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(log, "_file", FullDisk(log._file))
    with pytest.raises(UserError):
        log.append(train(2))
    assert path.read_bytes() == content
    assert log.sync() == len(content)
    log.close()


def test_a_directory_that_is_not_there_is_a_user_error(tmp_path):
    with pytest.raises(UserError):
        MetricsLog(tmp_path / "absent" / "metrics.jsonl")


def test_json_holds_numpy_numbers_and_refuses_what_it_would_change():
    assert decode_json(encode_json({"a": np.float32(0.1), "b": np.int64(3), "c": (1, 2)})) == {
        "a": float(np.float32(0.1)),
        "b": 3,
        "c": [1, 2],
    }
    with pytest.raises(TypeError):
        encode_json({1: 2})
    with pytest.raises(TypeError):
        encode_json([np.zeros(2)])
    with pytest.raises(ValueError):
        encode_json({"label": "nan"})
