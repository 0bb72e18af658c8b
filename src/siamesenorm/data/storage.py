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


@contextmanager
def disk_errors_told(directory: Path) -> Iterator[None]:
    """Turn an `OSError` into one line: `StoppedError` where a directory has no room left, else `UserError`."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno in NO_ROOM:
            raise StoppedError(
                f"{directory}: no room left to write ({reason}): free some space and repeat the command, "
                "it goes on where it stopped"
            ) from error
        raise UserError(f"{error.filename or directory}: {reason}: choose another path or its permissions") from error


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
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock file against other processes; the lock of a killed holder is gone with it.

    Raises `StoppedError` if another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoppedError(f"{lock.parent}: another process is at work here: wait for its end") from error
        yield
