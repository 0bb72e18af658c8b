"""Where documents come from: files, directories and globs, a Hugging Face dataset, or the built-in corpus.

A source is named by one string (`open_source`), streams its documents in an order that never changes, and has a
fingerprint, by which an interrupted preparation recognises the same input.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from siamesenorm.data import builtin
from siamesenorm.data.formats import Cut, is_readable, read_documents, text_of
from siamesenorm.errors import UserError
from siamesenorm.files import StoppedError

HUB_OPTIONS = frozenset({"name", "split", "revision"})
# Files up to twice this size are fingerprinted whole, larger ones by their size and this much of both ends.
FINGERPRINT_BYTES = 32 * 2**20


class Source(Protocol):
    """A stream of documents: the same ones in the same order every time."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def size(self) -> int | None:
        """Bytes to read, None where that is unknown."""

    @property
    def position(self) -> int:
        """Bytes read so far, of `size`."""

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the content, as JSON."""

    def documents(self) -> Iterator[str]:
        """Yield the documents; raises `UserError` naming the place where the input is bad."""


def open_source(spec: str, *, text_field: str = "text", cut: Cut = "passages") -> Source:
    """Return the source that a string names; nothing is read yet but the sizes of files.

    `builtin`; `hf:OWNER/NAME?name=CONFIG&split=train`; or a file, a directory or a glob.
    Raises `UserError` if there is nothing under the name, or an empty file.
    """
    if spec == "builtin":
        return BuiltinSource()
    if spec.startswith("hf:"):
        return HubSource(spec, text_field)
    return FileSource(spec, _find_files(spec), text_field, cut)


def _find_files(spec: str) -> list[Path]:
    """Return the files that a path or glob names, sorted, none of them empty."""
    path = Path(spec)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and is_readable(file))
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    elif path.exists():
        files = [path]
    else:
        files = sorted(Path(match) for match in glob.glob(spec, recursive=True) if os.path.isfile(match))
    if not files:
        what = "no .txt, .jsonl or .parquet file in it" if path.is_dir() else "no such file, directory or glob"
        raise UserError(f"source {spec!r}: {what}: give 'builtin', 'hf:OWNER/NAME', or the path of your text")
    for file in files:
        if file.is_file() and file.stat().st_size == 0:
            raise UserError(f"{file}: an empty file: remove it or write it again")
    return files


class FileSource:
    """Documents of local files, in the order of their names."""

    def __init__(self, name: str, files: list[Path], text_field: str, cut: Cut) -> None:
        self.name = name
        self.files = files
        self.text_field = text_field
        self.cut: Cut = cut
        self.size: int = sum(file.stat().st_size for file in files)
        self.position = 0

    def fingerprint(self) -> dict[str, Any]:
        """Return name, size and checksum of each file (of its ends, where it is large), and how they are read."""
        files = [[file.name, file.stat().st_size, _fingerprint(file)] for file in self.files]
        return {"kind": "files", "files": files, "text_field": self.text_field, "cut": self.cut}

    def documents(self) -> Iterator[str]:
        """Yield the documents of all files; a file without any is an error."""
        before = 0
        for file in self.files:
            found = False
            for text, position in read_documents(file, text_field=self.text_field, cut=self.cut):
                found = True
                self.position = before + position
                yield text
            if not found:
                raise UserError(f"{file}: holds no text: remove it or write it again")
            before += file.stat().st_size
        self.position = self.size


def _fingerprint(path: Path) -> str:
    """Return the sha256 of a file, or of both its ends where it is large."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(file.tell(), path.stat().st_size - FINGERPRINT_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


class HubSource:
    """Documents of a dataset on the Hugging Face Hub, streamed: nothing but the tokens is stored."""

    size = None
    position = 0

    def __init__(self, spec: str, text_field: str) -> None:
        path, _, query = spec.removeprefix("hf:").partition("?")
        options = dict(parse_qsl(query))
        if not path or not options.keys() <= HUB_OPTIONS:
            raise UserError(f"source {spec!r}: write it as hf:OWNER/NAME?name=CONFIG&split=train&revision=COMMIT")
        self.name = spec
        self.path = path
        self.options = {"split": "train", **options}
        self.text_field = text_field

    def fingerprint(self) -> dict[str, Any]:
        """Return the name and options of the dataset; pin its `revision` to be sure of its content."""
        return {"kind": "hub", "path": self.path, "options": self.options, "text_field": self.text_field}

    def documents(self) -> Iterator[str]:
        """Yield the documents as they arrive, empty ones left out; `StoppedError` if none, or no more, arrive."""
        rows = self._open()
        for number in itertools.count(1):
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # the network raises anything
                raise StoppedError(
                    f"source {self.name!r}: no more after row {number - 1} ({_first_line(error)}): repeat the command, "
                    "it resumes where it stopped"
                ) from error
            text = text_of(f"source {self.name!r}: row {number}", row, self.text_field)
            if text.strip():
                yield text

    def _open(self) -> Iterator[dict[str, Any]]:
        """Return the rows of the dataset."""
        try:
            import datasets
        except ImportError as error:
            raise UserError(
                f"source {self.name!r} needs the package datasets: pip install 'siamesenorm[data]'"
            ) from error
        try:
            return iter(datasets.load_dataset(self.path, streaming=True, **self.options))
        except Exception as error:  # the network and the Hub raise anything
            raise StoppedError(f"source {self.name!r}: the dataset cannot be opened: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


class BuiltinSource:
    """The built-in corpus."""

    name = f"builtin demo corpus (Python {platform.python_version()})"
    size = None
    position = 0

    def __init__(self) -> None:
        self._documents: list[str] = []

    def fingerprint(self) -> dict[str, Any]:
        """Return the version of Python, on which the text depends, and the revision of the generator."""
        return {"kind": "builtin", "python": platform.python_version(), "revision": builtin.REVISION}

    def documents(self) -> Iterator[str]:
        """Yield the documents; they are collected once, for they are read more than once."""
        if not self._documents:
            self._documents = list(builtin.builtin_documents())
        return iter(self._documents)
