"""The record of a run: `metrics.jsonl`, one JSON object per line, appended step by step.

Every line reaches the operating system before `append` returns, so a killed process loses nothing. A checkpoint stores
the length that `sync` returns, and an exact resume truncates the file to it. Apart from `TIME_FIELDS` the file is
bit-reproducible.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors, encode_json

TIME_FIELDS = ("time", "step_seconds", "peak_memory_bytes")


class MetricsLog:
    """An append-only file of records; opening one cuts off a line that a killed process left half-written."""

    def __init__(self, path: Path) -> None:
        """Open `path`, new or to append to; raises `UserError` when it cannot be written."""
        self.path = path
        with disk_errors(path):
            self._file = FileIO(path, "a+")
            self._offset = path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(self._offset)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; on a full disk the line is taken back and `UserError` raised."""
        line = encode_json(record).encode() + b"\n"
        with disk_errors(self.path):
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
            except OSError:
                self._file.truncate(self._offset)
                raise
        self._offset += len(line)

    def sync(self) -> int:
        """Wait until all records are on the disk (a power failure then keeps them) and return their length in bytes."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())
        return self._offset

    def truncate(self, offset: int) -> None:
        """Remove everything after the first `offset` bytes; raises `UserError` unless a line ends there."""
        if not 0 <= offset <= self._offset:
            raise UserError(
                f"{self.path} has {self._offset} bytes, its checkpoint was made at byte {offset}: "
                "restore the file, or remove the checkpoints to train this run from its start"
            )
        if offset and os.pread(self._file.fileno(), 1, offset - 1) != b"\n":
            raise UserError(f"{self.path} was changed: no line ends at byte {offset}, where its checkpoint was made")
        self._file.truncate(offset)
        self._offset = offset

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the log itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, without a half-written last line.

    Raises `UserError` when there is no such file, or naming the first line that is not a JSON object.
    """
    records = []
    for number, record in parse_lines(read_bytes(path), path):
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object, found {str(record)[:40]!r}")
        records.append(record)
    return records


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, without the zero bytes a power failure may leave at its end."""
    try:
        return path.read_bytes().rstrip(b"\0")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def parse_lines(data: bytes, path: Path) -> list[tuple[int, Any]]:
    """Return (line number, value) of every line of JSON, blank lines left out.

    A last line that does not end is what a killed process leaves: it counts when it is whole, and is dropped when not.
    """
    lines = data.split(b"\n")
    values = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append((number, decode_json(line)))
        except ValueError as error:
            if number == len(lines):
                break
            found = line[:40].decode(errors="replace")
            raise UserError(f"{path}, line {number} is not JSON: {found!r}: remove or repair that line") from error
    return values
