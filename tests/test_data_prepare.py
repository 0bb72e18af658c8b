"""Preparing: the same bytes whatever the workers, nothing left behind by bad input, nothing done twice."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from siamesenorm.data import (
    PrepareConfig,
    PreparedData,
    PrepareProgress,
    StoppedError,
    encoding,
    load_tokenizer,
    preparation,
    prepare,
)
from siamesenorm.data.tokenizer import train_bpe
from siamesenorm.errors import UserError


def texts(count: int) -> list[str]:
    return [f"Document {i} says that {i} and {i * i} are numbers, naïvely." for i in range(count)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps({"text": text}) for text in texts(400)).encode()))
    return path


def config(path: Path, out: str = "data", **options: Any) -> PrepareConfig:
    return PrepareConfig(**{"source": str(path), "out": path.parent / out, "validation_fraction": 0.1, **options})


def contents(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def decoded(data: PreparedData, split: str) -> list[str]:
    """Return the documents of a split, from its ids."""
    ids, end = data.tokens(split).tolist(), data.end_of_text
    assert ids[-1] == end
    documents: list[list[int]] = [[]]
    for index in ids[:-1]:
        documents.append([]) if index == end else documents[-1].append(index)
    return [data.tokenizer.decode(document) for document in documents]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_every_document_stands_in_one_split_in_order(source: Path, tokenizer: str) -> None:
    data = prepare(config(source, tokenizer=tokenizer))
    train, validation = decoded(data, "train"), decoded(data, "validation")
    assert sorted(train + validation) == sorted(texts(400))
    assert train == [text for text in texts(400) if text in set(train)]
    assert 20 < len(validation) < 60
    assert sorted(contents(data.path)) == sorted(
        ["manifest.json", "train.bin", "validation.bin"] + (["tokenizer.json"] if tokenizer != "bytes" else [])
    )
    assert data.split("train").bytes == sum(len(text.encode()) for text in train)


def test_validation_may_be_a_source_of_its_own(source: Path) -> None:
    held_out = source.parent / "held-out.txt"
    held_out.write_text("one\n\ntwo\n")
    options = {"validation": str(held_out), "validation_fraction": None, "documents": "paragraphs"}
    data = prepare(config(source, **options))
    assert decoded(data, "validation") == ["one", "two"]
    assert decoded(data, "train") == texts(400)


def test_copies_of_a_document_fall_into_the_same_split(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(100) * 2))
    data = prepare(config(path, validation_fraction=0.3))
    assert not set(decoded(data, "train")) & set(decoded(data, "validation"))


def test_the_tokenizer_of_other_prepared_data(source: Path) -> None:
    first = prepare(config(source, out="first", tokenizer="bpe:300", end_of_text="<stop>"))
    other = source.parent / "other.jsonl"
    other.write_text("\n".join(json.dumps({"text": f"Another document {i}."}) for i in range(100)))
    data = prepare(config(other, tokenizer=str(first.path)))
    assert data.manifest.tokenizer == first.manifest.tokenizer
    assert decoded(data, "train")[0].startswith("Another document")
    # By content, not by place: the data may move.
    first.path.rename(source.parent / "moved")
    assert prepare(config(other, tokenizer=str(source.parent / "moved"))).digest == data.digest


def test_a_trained_bpe_may_name_its_end_of_text(source: Path) -> None:
    data = prepare(config(source, tokenizer="bpe:300", end_of_text="<stop>"))
    assert '"<stop>"' in (data.path / "tokenizer.json").read_text()
    assert data.tokenizer.end_of_text == data.end_of_text == data.tokens("train")[-1]


def test_large_vocabularies_take_four_bytes(source: Path, tmp_path: Path) -> None:
    prepare(config(source, out="small", tokenizer="bpe:300"))
    tokenizer = json.loads((tmp_path / "small" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["rare"] = 2**16
    (tmp_path / "large.json").write_text(json.dumps(tokenizer))
    data = prepare(config(source, tokenizer=str(tmp_path / "large.json")))
    assert (data.manifest.dtype, data.vocabulary, data.manifest.tokenizer.name) == ("uint32", 2**16 + 1, "large")
    assert data.tokens("train").tolist() == PreparedData.open(tmp_path / "small").tokens("train").tolist()
    assert load_tokenizer(data.path).vocabulary == 2**16 + 1


def test_chunks_and_workers_change_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(config(source, tokenizer="bpe:300"))
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 1500)
    seen: list[PrepareProgress] = []
    pieces = prepare(config(source, out="pieces", tokenizer="bpe:300", workers=2), seen.append)
    assert contents(whole.path) == contents(pieces.path)
    counts = [progress.documents for progress in seen if progress.stage == "tokens"]
    assert len(counts) > 10
    assert counts == sorted(counts)
    assert counts[-1] == 400
    assert seen[-1].position == seen[-1].size == source.stat().st_size


def test_finished_data_is_not_prepared_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config(source))
    before = {file: file.stat().st_mtime_ns for file in first.path.iterdir()}
    monkeypatch.setattr(preparation, "encode_chunks", None)
    assert prepare(config(source, workers=2)).digest == first.digest
    assert {file: file.stat().st_mtime_ns for file in first.path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "difference"),
    [({"tokenizer": "bpe:300"}, "tokenizer"), ({"validation_fraction": 0.2}, "validation"), ({}, "source")],
)
def test_other_settings_are_refused_unless_restarted(source: Path, change: dict[str, Any], difference: str) -> None:
    prepare(config(source))
    before = contents(source.parent / "data")
    if not change:
        source.write_bytes(source.read_bytes() + gzip.compress(b'\n{"text": "more"}'))
    with pytest.raises(UserError, match=rf"\(different: {difference}\): choose another directory.*--restart"):
        prepare(config(source, **change))
    assert contents(source.parent / "data") == before
    data = prepare(config(source, **change, restart=True))
    assert contents(data.path) == contents(prepare(config(source, out="fresh", **change)).path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "bpe:abc"}, "the size must be a whole number"),
        ({"source": "nowhere.txt"}, "no such file"),
        ({"validation_fraction": 1e-9}, "fell into the validation split"),
        ({"text_field": "body"}, "body"),
    ],
)
def test_a_restart_that_fails_leaves_the_finished_data(source: Path, change: dict[str, Any], message: str) -> None:
    data = prepare(config(source, tokenizer="bpe:300"))
    before = contents(data.path)
    with pytest.raises(UserError, match=message):
        prepare(config(source, **{"tokenizer": "bpe:300", "restart": True, **change}))
    assert contents(data.path) == before
    assert PreparedData.open(data.path, verify="full").digest == data.digest


def test_a_restart_that_was_stopped_goes_on_beside_the_finished_data(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepare(config(source))
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 1500)

    def stop(progress: PrepareProgress) -> None:
        if progress.documents > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(source, tokenizer="bpe:300", restart=True), stop)
    assert PreparedData.open(data.path, verify="full").digest == data.digest
    assert prepare(config(source)).digest == data.digest
    with pytest.raises(KeyboardInterrupt):
        prepare(config(source, tokenizer="bpe:300", restart=True), stop)
    seen: list[PrepareProgress] = []
    prepare(config(source, tokenizer="bpe:300"), seen.append)
    assert seen[0].stage == "resumed"
    assert contents(data.path) == contents(prepare(config(source, out="fresh", tokenizer="bpe:300")).path)


def test_a_restart_under_way_is_not_disturbed(source: Path) -> None:
    data = prepare(config(source))

    def second(progress: PrepareProgress) -> None:
        assert prepare(config(source)).digest == data.digest

    prepare(config(source, restart=True), second)
    assert sorted(contents(data.path)) == ["manifest.json", "train.bin", "validation.bin"]


def test_files_of_another_origin_are_never_touched(source: Path) -> None:
    out = source.parent / "data"
    out.mkdir()
    (out / "train.bin").write_bytes(b"precious")
    for restart in (False, True):
        with pytest.raises(UserError, match="holds a train.bin of another origin"):
            prepare(config(source, restart=restart))
    assert contents(out) == {"train.bin": b"precious"}


def test_bad_input_leaves_nothing_behind(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 1500)
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(UserError, match="truncated or damaged gzip"):
        prepare(config(source, out="deep/down"))
    assert os.listdir(source.parent) == [source.name]


def test_bad_settings_leave_nothing_behind(source: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    words = tmp_path_factory.mktemp("elsewhere") / "words.json"
    words.write_bytes(train_bpe(texts(10), 260).content)
    for options, message in [
        ({"source": "nowhere.txt"}, "no such file"),
        ({"tokenizer": "nowhere.json"}, "no such file"),
        ({"tokenizer": "bpe:12"}, "at least 257"),
        ({"tokenizer": str(words), "end_of_text": "<stop>"}, "no token '<stop>'"),
        ({"validation": "nowhere.txt", "validation_fraction": None}, "no such file"),
        ({"validation_fraction": 1e-9}, "none of its 400 documents fell into the validation split: try"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(config(source, **options))
        assert os.listdir(source.parent) == [source.name]


@pytest.mark.parametrize(
    ("documents", "options", "remedies"),
    [
        (["one"] * 9, {}, "9 documents (1 distinct, and copies of a document fall into one split) fell into the "
         "validation split: try --documents paragraphs, or a source of its own with --validation"),
        (["one", "two"] * 3, {"documents": "paragraphs"}, "6 documents (2 distinct, and copies of a document fall into "
         "one split) fell into the validation split: try --validation-fraction 0.5, or a source of its own with "
         "--validation"),
        (texts(100), {"validation_fraction": 1e-9}, "100 documents fell into the validation split: try "
         "--validation-fraction 0.03, or --documents paragraphs, or a source of its own with --validation"),
        (texts(1500), {"validation_fraction": 2e-6}, "1,500 documents fell into the validation split: try "
         "--validation-fraction 0.02, or --documents paragraphs, or a source of its own with --validation"),
        (["one"], {"validation_fraction": 0.1, "documents": "paragraphs"}, "1 documents fell into the validation "
         "split: try a source of its own with --validation"),
        (texts(3), {"validation_fraction": 0.01, "documents": "paragraphs"}, "3 documents fell into the validation "
         "split: try --validation-fraction 0.5, or a source of its own with --validation"),
    ],
)  # fmt: skip
def test_the_remedies_for_an_empty_validation_split_can_work(
    tmp_path: Path, documents: list[str], options: dict[str, Any], remedies: str
) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    with pytest.raises(UserError) as caught:
        prepare(config(path, **{"validation_fraction": 0.01, **options}))
    assert str(caught.value) == f"source {str(path)!r}: none of its {remedies}"


def test_a_larger_fraction_than_given_is_suggested(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "is_validation", lambda text, fraction: False)
    with pytest.raises(UserError, match="try --validation-fraction 0.4, or"):
        prepare(config(source, validation_fraction=0.2))
    with pytest.raises(UserError, match="split: try --documents paragraphs, or"):
        prepare(config(source, validation_fraction=0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 0.0}, "validation fraction 0.0: must lie between 0 and 1"),
        ({"validation_fraction": float("nan")}, "validation fraction nan"),
        ({"validation": "a.txt"}, "give one of the two"),
        ({"workers": 0}, "workers 0: must be at least 1"),
        ({"max_documents": -1}, "max documents -1: must be at least 1"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(tmp_path / "any.txt", **options)


def test_out_must_be_a_directory(source: Path) -> None:
    with pytest.raises(UserError, match="is a file: give a directory"):
        config(source, out=source.name)


def test_at_most_so_many_documents(source: Path) -> None:
    data = prepare(config(source, max_documents=50))
    assert sorted(decoded(data, "train") + decoded(data, "validation")) == sorted(texts(50))


def test_full_disk_is_one_line_and_goes_on(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at each moment at which data is made durable, one after another."""
    expected = contents(prepare(config(source, out="expected")).path)
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 6000)
    failures = 0
    while True:
        left = failures

        def fsync(descriptor: int) -> None:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left -= 1

        out = f"data-{failures}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            try:
                prepare(config(source, out=out))
                break
            except StoppedError as error:
                assert "no room left" in str(error)
                assert "\n" not in str(error)
        if (source.parent / out / "manifest.json").exists():
            PreparedData.open(source.parent / out, verify="full")
        assert contents(prepare(config(source, out=out)).path) == expected
        failures += 1
    assert failures > 15


def test_unwritable_directory_is_one_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"data/.partial: permission denied: choose another path"):
        prepare(config(source))


def test_a_second_process_is_kept_out(source: Path) -> None:
    def second(progress: PrepareProgress) -> None:
        with pytest.raises(StoppedError, match="another process is at work here"):
            prepare(config(source))

    data = prepare(config(source), second)
    assert PreparedData.open(data.path, verify="full").digest == data.digest
