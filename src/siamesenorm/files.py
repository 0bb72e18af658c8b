"""Durable files and exact JSON.

A write is atomic: after any crash a name holds the old content or the new one. JSON has no NaN and no infinities: here
they are the strings "nan", "inf" and "-inf", and no text may be one of those strings.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError

# What a write raises when there is no room: the disk, the user's quota, or the file size limit of the process.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
ACCESS_REMEDY = "choose another path, or change its permissions"


class StoppedError(UserError):
    """Work stopped for a reason outside its input: what was written is whole, and the same command resumes."""


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn an `OSError` into one line: `StoppedError` where a directory has no room left, else `UserError`."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno in NO_ROOM:
            raise StoppedError(
                f"{directory}: no room left to write ({reason}): free some space and repeat the command"
            ) from error
        raise UserError(f"{error.filename or directory}: {reason}: {ACCESS_REMEDY}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after any crash its name holds the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def move_durably(source: Path, target: Path) -> None:
    """Rename a file within its file system so that a power failure cannot undo it; a target is replaced."""
    os.replace(source, target)
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power failure, where the system can open directories."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(lock: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file against other processes; the lock of a killed holder is gone with it.

    Raises `StoppedError` if another process holds it, unless `wait`.
    """
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise StoppedError(f"{lock.parent}: another process is writing here: wait for its end") from error
        yield


# --- exact JSON

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON text, on one line unless `indent` is given; non-finite floats become strings.

    Raises `TypeError` for what JSON cannot hold exactly (keys that are no strings, tensors), and `ValueError` for a
    string that would be read back as a float.
    """
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def decode_json(text: str | bytes) -> Any:
    """Return what `encode_json` was given (tuples as lists); raises `ValueError` on text that is not JSON."""
    try:
        return _restored(json.loads(text))
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if value in NON_FINITE:
            raise ValueError(f"the text {value!r} would be read back as a number: write the float, or another word")
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string: JSON would turn it into one")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
