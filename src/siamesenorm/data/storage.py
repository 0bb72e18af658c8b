"""Durable files: nothing stands half-written under a final name, and a full disk is told in one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from siamesenorm.errors import UserError

# What a write raises when there is no room: the disk, the user's quota, or the file size limit of the process.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StoppedError(UserError):
    """Work stopped for a reason outside its input: what was written is whole, repeating the command goes on."""


class DiskFullError(StoppedError):
    """There was no room to write."""


@contextmanager
def room_expected(directory: Path) -> Iterator[None]:
    """Turn an `OSError` that means "no room left" into a `DiskFullError` naming the directory and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        reason = os.strerror(error.errno).lower()
        raise DiskFullError(
            f"{directory}: no room left ({reason}): free some space and repeat the command, it goes on where it stopped"
        ) from error


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
    """Rename a file into another directory of the same file system, durably; a target is replaced."""
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
