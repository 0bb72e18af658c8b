"""What a model on disk offers, whichever library wrote it; a new directory to write one into, whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.files import disk_errors, sync_directory

Step = dict[str, Any]
"""One conversion of a model, as JSON; see `wiring`."""


@dataclass(frozen=True, kw_only=True)
class StoredModel(ABC):
    """A model in a directory. Every method raises UserError for files that are missing or damaged."""

    library: ClassVar[str]
    path: Path
    record: dict[str, Any]
    """The content of config.json."""
    name: str
    """The library's name of the model: its type or its class."""

    @property
    def converted(self) -> bool:
        """Whether the model is of another library and was rewired or had its norms swapped."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, such as a damaged checkpoint that was skipped."""
        return ()

    @abstractmethod
    def load(self, **options: Any) -> nn.Module:
        """Return the model with its weights, in evaluation mode; `options` are those of the library's loading."""

    def initialise(self, seed: int) -> nn.Module:
        """Return the model; where there are no weights at all, with the library's initial ones of this seed."""
        return self.load()

    @abstractmethod
    def save(self, model: Any, target: Path) -> None:
        """Write a model, this one after a conversion, and its tokenizer; raises OSError for errors of the disk."""


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json in a directory, empty without one; raises UserError for a damaged one."""
    file = directory / "config.json"
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{file} holds a {type(record).__name__}, no configuration of a model: name another directory")
    return record


def write_json(path: Path, record: Any) -> None:
    """Write a file of JSON with sorted keys."""
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


@contextmanager
def safetensors_errors(target: Path) -> Iterator[None]:
    """Raise errors of the disk as OSError, which safetensors reports in an error of its own."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from error


def check_new(out: Path) -> None:
    """Raise UserError unless `out` is absent or empty and can be created."""
    with disk_errors(out):
        if out.is_symlink():
            raise UserError(f"{out} is a link: choose another directory, or name {out.readlink()} itself")
        if out.is_dir() and any(out.iterdir()):
            raise UserError(f"{out} is not empty: choose another directory")
        places = [path for path in (out.absolute(), *out.absolute().parents) if path.exists()]
        if not places[0].is_dir():
            raise UserError(f"{out} cannot be created, {places[0]} is a file: choose another directory")
        if not os.access(places[1] if out.exists() else places[0], os.W_OK | os.X_OK):
            raise UserError(f"{out} cannot be created in {places[0]}: choose another directory, or permissions")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a directory beside `out`, which becomes `out` if no error is raised; raises UserError as `check_new`."""
    check_new(out)
    out = out.absolute()
    with disk_errors(out):
        missing = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f".{out.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            yield unfinished
            for file in unfinished.iterdir():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            sync_directory(unfinished)
            if out.exists():
                out.rmdir()
            unfinished.rename(out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            with suppress(OSError):  # another process may have written something there
                for parent in missing:
                    parent.rmdir()
            raise
        sync_directory(out.parent)
