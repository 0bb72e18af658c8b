"""Where documents come from: files, directories and globs, a Hugging Face dataset, or the built-in corpus.

A source is named by one string (`open_source`) and yields its documents in a fixed order. Its fingerprint shows whether
an interrupted preparation can resume from the same input. Bad content raises a `UserError` with file, line and remedy.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import json
import os
import platform
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from siamesenorm.data import builtin
from siamesenorm.errors import UserError, optional, reason
from siamesenorm.files import StoppedError

Cut = Literal["passages", "paragraphs"]
# The text of each document, and how many bytes of its file were read so far.
Documents = Iterator[tuple[str, int]]

# A passage ends at the first blank line after so many characters, or, where there is none, at four times as many.
PASSAGE_CHARACTERS = 30_000
TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
PLAIN_SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES)
KNOWN_SUFFIXES = (*PLAIN_SUFFIXES, *(suffix + ".gz" for suffix in PLAIN_SUFFIXES), PARQUET_SUFFIX)
HUB_OPTIONS = frozenset({"name", "split", "revision"})
# Files up to twice this size are fingerprinted whole, larger ones by their size and this much of both ends.
FINGERPRINT_BYTES = 32 * 2**20


class Source(ABC):
    """A stream of documents: the same ones in the same order every time."""

    name: str
    """Name to display."""
    size: int | None = None
    """Bytes to read, None where that is unknown."""
    position: int = 0
    """Bytes read so far, of `size`."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the content, as JSON."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yield the documents, none of them blank; raises `UserError` that names the place of bad input."""


def open_source(spec: str, *, text_field: str = "text", cut: Cut = "passages") -> Source:
    """Return the source named by a string; only the sizes of files are read yet.

    `builtin`; `hf:OWNER/NAME?name=CONFIG&split=train`; or a file, a directory or a glob.
    Raises `UserError` if there is nothing under the name, or an empty file.
    """
    if spec == "builtin":
        return BuiltinSource()
    if spec.startswith("hf:"):
        return HubSource(spec, text_field)
    return FileSource(spec, text_field, cut)


class BuiltinSource(Source):
    """The built-in corpus."""

    name = f"builtin demo corpus (Python {platform.python_version()})"

    def fingerprint(self) -> dict[str, Any]:
        """Return the version of Python, on which the text depends, and the revision of the generator."""
        return {"kind": "builtin", "python": platform.python_version(), "revision": builtin.REVISION}

    def documents(self) -> Iterator[str]:
        """Yield the documents; they are collected once, for a preparation reads them more than once."""
        return iter(self._collected)

    @cached_property
    def _collected(self) -> list[str]:
        return list(builtin.builtin_documents())


class HubSource(Source):
    """Documents of a dataset on the Hugging Face Hub, streamed: only the tokens are stored."""

    def __init__(self, spec: str, text_field: str) -> None:
        path, _, query = spec.removeprefix("hf:").partition("?")
        options = dict(parse_qsl(query))
        if not path or not options.keys() <= HUB_OPTIONS:
            raise UserError(f"source {spec!r}: write it as hf:OWNER/NAME?name=CONFIG&split=train&revision=COMMIT")
        self.name, self.path, self.text_field = spec, path, text_field
        self.options = {"split": "train", **options}

    def fingerprint(self) -> dict[str, Any]:
        """Return the name and options of the dataset; only a pinned `revision` fixes its content."""
        return {"kind": "hub", "path": self.path, "options": self.options, "text_field": self.text_field}

    def documents(self) -> Iterator[str]:
        """Yield the documents as they arrive; raises `StoppedError` where the connection breaks."""
        place = f"source {self.name!r}"
        datasets = optional("datasets", "data", place)
        number = 0
        try:
            found = False
            for number, row in enumerate(datasets.load_dataset(self.path, streaming=True, **self.options), 1):
                text = _text_of(f"{place}: row {number}", row, self.text_field)
                if text.strip():
                    found = True
                    yield text
            if not found:
                raise UserError(f"{place}: holds no text: name another dataset, split or --text-field")
        except UserError:
            raise
        except Exception as error:  # the network and the Hub raise anything
            raise StoppedError(
                f"{place}: no more rows after row {number} ({reason(error)}): check its name and the connection and "
                "repeat the command, it resumes where it stopped"
            ) from error


class FileSource(Source):
    """Documents of local files, in the order of their names."""

    def __init__(self, spec: str, text_field: str, cut: Cut) -> None:
        self.name, self.text_field, self.cut = spec, text_field, cut
        self.files = _find_files(spec)
        self.size = sum(file.stat().st_size for file in self.files)

    def fingerprint(self) -> dict[str, Any]:
        """Return name, size and checksum of each file (of its ends, where it is large), and how they are read."""
        files = [[file.name, file.stat().st_size, _checksum_of_ends(file)] for file in self.files]
        return {"kind": "files", "files": files, "text_field": self.text_field, "cut": self.cut}

    def documents(self) -> Iterator[str]:
        """Yield the documents of all files; raises `UserError` for a file without any."""
        before = 0
        for file in self.files:
            found = False
            for text, position in _read_documents(file, self.text_field, self.cut):
                if text.strip():
                    found = True
                    self.position = before + position
                    yield text
            if not found:
                raise UserError(f"{file}: holds no text: remove it or write it again")
            before += file.stat().st_size
        self.position = before


def _find_files(spec: str) -> list[Path]:
    """Return the files of a path or glob, sorted; raises `UserError` if there is none, or an empty one."""
    path = Path(spec)
    if path.is_dir():
        readable = (file for file in path.rglob("*") if file.name.lower().endswith(KNOWN_SUFFIXES) and file.is_file())
        files = sorted(file for file in readable if "/." not in f"/{file.relative_to(path).as_posix()}")
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


def _checksum_of_ends(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(file.tell(), path.stat().st_size - FINGERPRINT_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


# --- formats of files: a text may be blank


def _read_documents(path: Path, text_field: str, cut: Cut) -> Documents:
    """Return the documents of a file, whose format is that of its suffix."""
    name = path.name.lower().removesuffix(".gz")
    if not path.name.lower().endswith(KNOWN_SUFFIXES):
        raise UserError(f"{path}: no reader for this kind of file: choose one of {' '.join(KNOWN_SUFFIXES)}")
    if name.endswith(PARQUET_SUFFIX):
        return _read_parquet(path, text_field)
    if name.endswith(TEXT_SUFFIXES):
        return _read_text(path, cut)
    return ((_text_of(place, record, text_field), end) for place, record, end in read_json_lines(path))


def _read_text(path: Path, cut: Cut) -> Documents:
    """Yield the passages of a plain text file (cut at blank lines after about 30,000 characters) or its paragraphs."""
    pieces: list[str] = []
    length = position = 0
    for _, line, position in _read_lines(path, limit=PASSAGE_CHARACTERS):
        pieces.append(line.replace("\r\n", "\n"))
        length += len(pieces[-1])
        shortest = PASSAGE_CHARACTERS if cut == "passages" else 0
        if length >= (4 * PASSAGE_CHARACTERS if line.strip() else shortest):
            yield "".join(pieces).strip("\n"), position
            pieces, length = [], 0
    yield "".join(pieces).strip("\n"), position


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield `(place, object, bytes read)` for every line of a JSON lines file (.gz too) that is not blank.

    Raises `UserError`, which names the line, for a line that is no JSON object.
    """
    for number, line, position in _read_lines(path):
        place = f"{path}: line {number}"
        line = line.removeprefix("\ufeff")  # of a file appended to another one
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}): every line must be one whole JSON object") from error
        if not isinstance(record, dict):
            raise UserError(f"{place}: a JSON {type(record).__name__}: every line must be one JSON object")
        yield place, record, position


def _text_of(place: str, record: dict[str, Any], text_field: str) -> str:
    """Return the text in a field of a record; raises `UserError` if there is no such field or no text in it."""
    if text_field not in record:
        fields = ", ".join(record) or "none"
        raise UserError(f"{place}: no field {text_field!r} (fields: {fields}): name the field with --text-field")
    text = record[text_field]
    if not isinstance(text, str):
        raise UserError(f"{place}: field {text_field!r} holds {type(text).__name__}, not text: choose --text-field")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: field {text_field!r} holds half a surrogate pair: repair the line") from error
    return text


def _read_lines(path: Path, limit: int = -1) -> Iterator[tuple[int, str, int]]:
    """Yield `(line number, line, bytes read)` of a UTF-8 file; a line of more than `limit` bytes comes in pieces."""
    # utf-8-sig drops the byte order mark that some editors put at the start.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    number, starts_line = 0, True
    with open(path, "rb") as file:
        stream = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file
        try:
            while piece := stream.readline(limit):
                number += starts_line
                starts_line = piece.endswith(b"\n")
                if b"\0" in piece:
                    raise UserError(f"{path}: line {number}: holds a NUL byte: a binary file, give UTF-8 text")
                yield number, decoder.decode(piece), file.tell()
            decoder.decode(b"", final=True)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: line {number + starts_line}: damaged gzip ({error}): fetch it again") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: line {number}: not UTF-8 ({error.reason}): give a file of UTF-8 text") from error


def _read_parquet(path: Path, text_field: str) -> Documents:
    """Yield the column `text_field` of a parquet file, with a batch in memory at a time."""
    pyarrow, parquet = (optional(name, "data", str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    size, row = path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_field not in columns:
                names = ", ".join(columns) or "none"
                raise UserError(f"{path}: no column {text_field!r} (columns: {names}): name one with --text-field")
            for batch in file.iter_batches(batch_size=256, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    document = _text_of(f"{path}: row {row}", {text_field: text}, text_field)
                    yield document, size * row // file.metadata.num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged parquet after row {row} ({reason(error)}): fetch it again") from error
