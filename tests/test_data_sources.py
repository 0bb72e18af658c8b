"""Readers: documents out of every format, and one clear line for whatever is wrong with a file."""

from __future__ import annotations

import glob
import gzip
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from siamesenorm.data import sources
from siamesenorm.data.sources import PASSAGE_CHARACTERS, open_source
from siamesenorm.errors import UserError
from siamesenorm.files import StoppedError

LINES = b'{"id": 1, "text": "one"}\n\n{"text": "two\\nlines"}\n{"text": ""}\n{"text": "three"}'


def documents(spec: Path | str, **options: Any) -> list[str]:
    return list(open_source(str(spec), **options).documents())


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "A.JSONL"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    assert documents(written(tmp_path / name, LINES)) == ["one", "two\nlines", "three"]


def test_json_lines_with_another_field(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"body": "naïve"}\r\n'.encode("utf-8-sig"))
    assert documents(path, text_field="body") == ["naïve"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md"])
def test_paragraphs_of_a_text(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, "\ufeffone\r\nstill one\r\n\r\n \n\n\ntwo\n\n  three".encode())
    assert documents(path, cut="paragraphs") == ["one\nstill one", "two", "  three"]


def test_passages_end_at_the_next_blank_line(tmp_path: Path) -> None:
    paragraph = "words and words\n" * 700
    path = written(tmp_path / "a.txt", "\n".join([paragraph] * 7).encode())
    passages = documents(path)
    assert [passage.count("words and words") // 700 for passage in passages] == [3, 3, 1]
    assert "\n\n".join(passages) == path.read_text().strip("\n")
    assert all(len(passage) > PASSAGE_CHARACTERS for passage in passages[:-1])


def test_a_text_without_lines_is_cut_anywhere_and_whole(tmp_path: Path) -> None:
    text = "é" * 500_001
    pieces = documents(written(tmp_path / "a.txt", text.encode()))
    assert "".join(pieces) == text
    assert len(pieces) > 3


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"row {i}" for i in range(1000)]
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(1000)), "text": texts}), path, row_group_size=300)
    source = open_source(str(path))
    assert list(source.documents()) == texts
    assert source.position == source.size == path.stat().st_size


def test_directories_and_globs_in_the_order_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.txt", "sub/a.txt", "a.jsonl", ".hidden/c.txt", "notes.csv"):
        text = json.dumps({"text": name}) if name.endswith("jsonl") else name
        written(tmp_path / name, text.encode())
    assert documents(tmp_path) == ["a.jsonl", "b.txt", "sub/a.txt"]
    assert documents(f"{tmp_path}/*.txt") == ["b.txt"]
    found = glob.glob(f"{tmp_path}/**/*.txt", recursive=True)
    for order in (found, found[::-1]):  # that of the file system
        monkeypatch.setattr(glob, "glob", lambda *arguments, order=order, **options: order)
        assert documents(f"{tmp_path}/**/*.txt") == ["b.txt", "sub/a.txt"]
    monkeypatch.undo()
    assert documents(f"{tmp_path}/**/*.txt") == ["b.txt", "sub/a.txt"]


def test_position_grows_to_the_size(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", LINES)
    written(tmp_path / "b.jsonl.gz", LINES)
    source = open_source(str(tmp_path))
    positions = [source.position for _ in source.documents()]
    assert positions == sorted(positions)
    assert positions[0] < source.position == source.size == sum(f.stat().st_size for f in tmp_path.iterdir())


def test_fingerprint_tells_content_and_reading_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"one")
    first = open_source(str(path)).fingerprint()
    assert open_source(str(path)).fingerprint() == first
    assert open_source(str(path), cut="paragraphs").fingerprint() != first
    written(path, b"two")
    assert open_source(str(path)).fingerprint() != first


@pytest.mark.parametrize("place", [0, 99])
def test_fingerprint_of_a_large_file_is_that_of_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(sources, "FINGERPRINT_BYTES", 10)
    path = written(tmp_path / "a.txt", b"a" * 100)
    first = open_source(str(path)).fingerprint()
    written(path, b"a" * place + b"b" + b"a" * (99 - place))
    assert open_source(str(path)).fingerprint() != first


def parquet_bytes(path: Path) -> bytes:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words"] * 5000, "n": list(range(5000))}), path)
    return path.read_bytes()


def damaged_pages(path: Path) -> bytes:
    """Return a parquet file whose footer is whole and whose pages are not."""
    content = parquet_bytes(path)
    return b"PAR1" + b"\x00" * (len(content) // 2 - 4) + content[len(content) // 2 :]


BAD_FILES: dict[str, tuple[str, bytes | Callable[[Path], bytes], str]] = {
    "empty text": ("a.txt", b"", "a.txt"),
    "blank text": ("a.txt", b" \n\n \n", "a.txt"),
    "empty lines": ("a.jsonl", b"", "a.jsonl"),
    "blank lines": ("a.jsonl", b"\n\n", "a.jsonl"),
    "binary text": ("a.txt", b"line\nabc\0def\n", "a.txt: line 2:"),
    "binary lines": ("a.jsonl", LINES + b"\n\x00\x01", "a.jsonl: line 6:"),
    "latin-1 text": ("a.txt", b"line\nna\xefve\n", "a.txt: line 2:"),
    "cut UTF-8 text": ("a.txt", "line\nna\u00ef".encode()[:-1], "a.txt: line 2:"),
    "latin-1 lines": ("a.jsonl", b'{"text": "na\xefve"}', "a.jsonl: line 1:"),
    "torn JSON": ("a.jsonl", LINES[:-3], "a.jsonl: line 5:"),
    "array": ("a.jsonl", b'{"text": "a"}\n["text"]', "a.jsonl: line 2:"),
    "missing field": ("a.jsonl", b'{"id": 1, "body": ""}', "a.jsonl: line 1: .*'text'.* id, body"),
    "number": ("a.jsonl", b'{"text": 5}', "a.jsonl: line 1: .*'text'.* int"),
    "half a pair": ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl: line 1: .*'text'"),
    "no gzip": ("a.txt.gz", lambda path: b"plain words", "a.txt.gz: line 1:"),
    "truncated gzip": (
        "a.jsonl.gz",
        lambda path: gzip.compress(b"\n".join([LINES] * 3))[:-9],
        "a.jsonl.gz: line 1?[0-9]:",
    ),
    "no parquet": ("a.parquet", b"PAR1 is not enough", "a.parquet"),
    "truncated parquet": ("a.parquet", lambda path: parquet_bytes(path)[:-100], "a.parquet"),
    "damaged parquet": ("a.parquet", damaged_pages, "a.parquet: .* row 0"),
    "other suffix": ("a.csv", b"a,b", "a.csv: .* .txt"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_have_one_clear_line(tmp_path: Path, case: str) -> None:
    name, content, message = BAD_FILES[case]
    path = tmp_path / name
    path.write_bytes(content(path) if callable(content) else content)
    with pytest.raises(UserError, match=message) as caught:
        documents(path)
    assert "\n" not in str(caught.value)


def test_parquet_without_the_column_or_with_a_null(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", None], "n": [1, 2]}), path)
    with pytest.raises(UserError, match="'text'.* body, n.*--text-field"):
        documents(path)
    with pytest.raises(UserError, match="row 2: .*'body'.* NoneType"):
        documents(path, text_field="body")


@pytest.mark.parametrize("spec", ["nowhere.txt", "nowhere/*.jsonl", "hf", "build-in"])
def test_nothing_under_the_name(spec: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(spec))):
        open_source(spec)


def test_a_directory_without_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        open_source(str(tmp_path))


def hub(monkeypatch: pytest.MonkeyPatch, rows: Callable[[], Iterator[dict[str, Any]]]) -> dict[str, Any]:
    """Put a stand-in for the package `datasets` in its place; what it was asked for is returned."""
    asked: dict[str, Any] = {}

    def load_dataset(path: str, **options: Any) -> Iterator[dict[str, Any]]:
        asked.update(options, path=path)
        return rows()

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_hub_dataset_is_streamed_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, lambda: iter([{"text": "one"}, {"text": " "}, {"text": "two"}]))
    assert documents("hf:HuggingFaceFW/fineweb-edu?name=sample-10BT") == ["one", "two"]
    expected = {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "split": "train", "streaming": True}
    assert asked == expected


def test_hub_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield {"text": "one"}
        raise ConnectionError("reset by peer\nmore")

    hub(monkeypatch, broken)
    with pytest.raises(StoppedError, match="row 1 .*reset by peer"):
        documents("hf:a/b")
    hub(monkeypatch, lambda: iter([{"body": "one"}]))
    with pytest.raises(UserError, match="row 1: .*'text'.* body"):
        documents("hf:a/b")

    def unreachable() -> Iterator[dict[str, Any]]:
        raise ConnectionError("no route")

    hub(monkeypatch, unreachable)
    with pytest.raises(StoppedError, match="no route"):
        documents("hf:a/b")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="datasets"):
        documents("hf:a/b")


@pytest.mark.parametrize("spec", ["hf:", "hf:a/b?nmae=x"])
def test_hub_spec_is_checked(spec: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(spec))):
        open_source(spec)
