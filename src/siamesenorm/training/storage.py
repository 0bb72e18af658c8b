"""What a run puts on disk: files that are whole or absent after a crash, and JSON that can hold NaN.

JSON has no NaN and no infinity; here they are the strings "nan", "inf" and "-inf", and nothing else may be those strings.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """Size in bytes and SHA-256 (hex) of a file that is on the disk."""

    size: int
    sha256: str


def encode_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON text, on one line unless `indent` is given; non-finite floats become strings.

    Raises `TypeError` for what JSON cannot hold exactly (keys that are no strings, tensors), and `ValueError` for a
    string that would be read back as a float.
    """
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def decode_json(text: str | bytes) -> Any:
    """Return what `encode_json` was given (tuples as lists); raises `ValueError` on text that is not JSON."""
    return _restored(json.loads(text))


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


def write_failure(error: OSError, path: Path) -> UserError:
    """Return the one line to show when writing `path` failed: a full disk says so, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "disk quota is used up" if error.errno == errno.EDQUOT else "no space is left on the disk"
        return UserError(f"cannot write {path}: {what}: free some space or choose a directory on another disk")
    return UserError(f"cannot write {path}: {error.strerror or error}: check the path and its permissions")


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write the pieces to a new file and wait until they are on the disk; raises `OSError`."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(size=size, sha256=digest.hexdigest())


def replace_text(path: Path, text: str) -> None:
    """Give `path` this content (UTF-8): a crash leaves the old file or the new one; raises `UserError`."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        write_file(partial, [text.encode()])
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise write_failure(error, path) from error


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk: a renamed file is not safe before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
