"""Readers of one file of documents: plain text, JSON lines, parquet; the first two also gzipped.

Each reader yields `(document, position)`: the text of a document, and how many bytes of the file were read so far.
Bad content raises a `UserError` that names the file, the line and the remedy.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from siamesenorm.errors import UserError

Cut = Literal["passages", "paragraphs"]
Documents = Iterator[tuple[str, int]]

# A passage ends at the first blank line after so many characters, or, where there is none, at four times as many.
PASSAGE_CHARACTERS = 30_000
TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
PLAIN_SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES)
KNOWN_SUFFIXES = (*PLAIN_SUFFIXES, *(suffix + ".gz" for suffix in PLAIN_SUFFIXES), PARQUET_SUFFIX)


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
