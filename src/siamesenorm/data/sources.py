"""Where documents come from: files, directories and globs, a Hugging Face dataset, or the built-in corpus.

A source is named by one string (`open_source`), streams its documents in an order that never changes, and has a
fingerprint, by which an interrupted preparation recognises the same input. Bad content raises a `UserError` that names
the file, the line and the remedy.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import itertools
import json
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol
from urllib.parse import parse_qsl

from siamesenorm.data import builtin
from siamesenorm.errors import UserError
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


# --- formats of files


def is_readable(path: Path) -> bool:
    """Return whether a file has a suffix that can be read."""
    return path.name.lower().endswith(KNOWN_SUFFIXES)


def read_documents(path: Path, *, text_field: str, cut: Cut) -> Documents:
    """Return the documents of a file, read as its suffix says.

    Raises `UserError` for a suffix that has no reader, and, while reading, for anything wrong in the file.
    """
    name = path.name.lower().removesuffix(".gz")
    if not is_readable(path):
        raise UserError(f"{path}: no reader for this kind of file: choose one of {' '.join(KNOWN_SUFFIXES)}")
    if name.endswith(PARQUET_SUFFIX):
        return read_parquet(path, text_field)
    if name.endswith(TEXT_SUFFIXES):
        return read_text(path, cut)
    return read_json_lines(path, text_field)


def read_text(path: Path, cut: Cut) -> Documents:
    """Yield the passages of a plain text file (cut at blank lines after about 30,000 characters) or its paragraphs."""
    is_end = _ends_passage if cut == "passages" else _ends_paragraph
    pieces: list[str] = []
    length = position = 0
    for piece, position in _decoded_pieces(path):
        pieces.append(piece)
        length += len(piece)
        if is_end(piece, length):
            text = "".join(pieces).strip("\n")
            pieces, length = [], 0
            if text.strip():
                yield text, position
    text = "".join(pieces).strip("\n")
    if text.strip():
        yield text, position


def _ends_passage(piece: str, length: int) -> bool:
    return length >= (4 if piece.strip() else 1) * PASSAGE_CHARACTERS


def _ends_paragraph(piece: str, length: int) -> bool:
    return not piece.strip() or length >= 4 * PASSAGE_CHARACTERS


def _decoded_pieces(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the lines of a UTF-8 file with `\\n` endings; an overlong line comes in several pieces."""
    # utf-8-sig drops the byte order mark that some editors put at the start.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    number, position = 1, 0
    for number, piece, position in _raw_pieces(path, PASSAGE_CHARACTERS):
        yield _decode(path, number, piece, decoder.decode).replace("\r\n", "\n"), position
    _decode(path, number, b"", lambda piece: decoder.decode(piece, final=True))


def read_json_lines(path: Path, text_field: str) -> Documents:
    """Yield the field `text_field` of every line of a JSON lines file; blank lines and empty texts are skipped."""
    for number, line, position in _raw_pieces(path):
        text = _decode(path, number, line, lambda line: line.decode("utf-8-sig"))
        if not text.strip():
            continue
        document = text_of(f"{path}: line {number}", _parse_json(path, number, text), text_field)
        if document.strip():
            yield document, position


def _parse_json(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the object on a line."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(
            f"{path}: line {number}: not JSON ({error}): every line must be one whole JSON object"
        ) from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: line {number}: a JSON {type(record).__name__}: every line must be one JSON object")
    return record


def text_of(place: str, record: dict[str, Any], text_field: str) -> str:
    """Return the text in a field of a record.

    Raises `UserError`, beginning with `place`, if there is no such field or no Unicode text in it.
    """
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


def _raw_pieces(path: Path, limit: int = -1) -> Iterator[tuple[int, bytes, int]]:
    """Yield `(line number, line, bytes of the file read)`; a line longer than `limit` bytes comes in pieces."""
    number, whole = 0, True
    with open(path, "rb") as file:
        stream = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file
        while piece := _read_line(path, number + 1, stream, limit):
            number += whole
            whole = piece.endswith(b"\n")
            if b"\0" in piece:
                raise UserError(f"{path}: line {number}: holds a NUL byte: a binary file, give UTF-8 text")
            yield number, piece, file.tell()


def _read_line(path: Path, number: int, stream: BinaryIO | gzip.GzipFile, limit: int) -> bytes:
    """Read a line; raises `UserError` for a damaged gzip stream."""
    try:
        return stream.readline(limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path}: line {number}: truncated or damaged gzip ({error}): fetch or write the file again"
        ) from error


def _decode(path: Path, number: int, piece: bytes, decode: Callable[[bytes], str]) -> str:
    """Decode bytes of a line; raises `UserError` where they are not UTF-8."""
    try:
        return decode(piece)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: line {number}: not UTF-8 ({error.reason}): a binary file or another encoding, give UTF-8 text"
        ) from error


def read_parquet(path: Path, text_field: str) -> Documents:
    """Yield the column `text_field` of a parquet file, a batch in memory at a time; empty texts are skipped."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: parquet needs the package pyarrow: pip install 'siamesenorm[data]'") from error
    size = path.stat().st_size
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_column(path, file.schema_arrow.names, text_field)
            rows = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=256, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    document = text_of(f"{path}: row {row}", {text_field: text}, text_field)
                    if document.strip():
                        yield document, size * row // rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: truncated or damaged parquet after row {row} ({reason}): fetch or write the file again"
        ) from error


def _require_column(path: Path, columns: list[str], text_field: str) -> None:
    if text_field not in columns:
        names = ", ".join(columns) or "none"
        raise UserError(f"{path}: no column {text_field!r} (columns: {names}): name the column with --text-field")
