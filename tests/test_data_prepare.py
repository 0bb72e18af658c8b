"""Preparing: the same bytes whatever the workers, nothing left behind by bad input, nothing done twice."""

from __future__ import annotations

import errno
import gzip
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from siamesenorm.data import (
    PrepareConfig,
    PreparedData,
    PrepareProgress,
    StoppedError,
    builtin,
    load_tokenizer,
    preparation,
    prepare,
    storage,
)
from siamesenorm.data.holdout import hash_document
from siamesenorm.data.sources import open_source
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


def verified(path: Path) -> PreparedData:
    data = PreparedData.open(path)
    data.verify()
    return data


def decoded(data: PreparedData, split: str) -> list[str]:
    """Return the documents of a split, from its ids."""
    ids, end = data.tokens(split)[:].tolist(), data.end_of_text
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
        ["manifest.json", "shards/train-00000.bin", "shards/validation-00000.bin"]
        + (["shards/tokenizer.json"] if tokenizer != "bytes" else [])
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
    with pytest.raises(UserError, match="end_of_text"):
        prepare(config(source, tokenizer="bpe:300"))
    assert '"<stop>"' in (data.path / "shards/tokenizer.json").read_text()
    assert data.tokenizer.end_of_text == data.end_of_text == data.tokens("train")[-1:]


@pytest.mark.parametrize(("highest", "dtype"), [(2**16 - 1, "uint16"), (2**16, "uint32")])
def test_large_vocabularies_take_four_bytes(source: Path, tmp_path: Path, highest: int, dtype: str) -> None:
    prepare(config(source, out="small", tokenizer="bpe:300"))
    tokenizer = json.loads((tmp_path / "small/shards/tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["rare"] = highest
    (tmp_path / "large.json").write_text(json.dumps(tokenizer))
    data = prepare(config(source, tokenizer=str(tmp_path / "large.json")))
    assert (data.manifest.dtype, data.vocabulary, data.manifest.tokenizer.name) == (dtype, highest + 1, "large")
    assert np.array_equal(data.tokens("train"), PreparedData.open(tmp_path / "small").tokens("train"))
    assert load_tokenizer(data.path).vocabulary == highest + 1


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
    [
        ({"tokenizer": "bpe:300"}, "tokenizer"),
        ({"validation_fraction": 0.2}, "validation"),
        ({"max_documents": 50}, "max_documents"),
        ({}, "source"),
    ],
)
def test_other_settings_are_refused_unless_restarted(source: Path, change: dict[str, Any], difference: str) -> None:
    prepare(config(source))
    before = contents(source.parent / "data")
    if not change:
        source.write_bytes(source.read_bytes() + gzip.compress(b'\n{"text": "more"}'))
    with pytest.raises(UserError, match=f"{difference}.*--restart"):
        prepare(config(source, **change))
    assert contents(source.parent / "data") == before
    data = prepare(config(source, **change, restart=True))
    assert sorted(os.listdir(data.path)) == ["manifest.json", "shards-2"]
    assert verified(data.path).digest == prepare(config(source, out="fresh", **change)).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "bpe:abc"}, "'bpe:abc'"),
        ({"source": "nowhere.txt"}, "nowhere.txt"),
        ({"text_field": "body"}, "body"),
    ],
)
def test_a_restart_that_fails_leaves_the_finished_data(source: Path, change: dict[str, Any], message: str) -> None:
    data = prepare(config(source, tokenizer="bpe:300"))
    before = contents(data.path)
    with pytest.raises(UserError, match=message):
        prepare(config(source, **{"tokenizer": "bpe:300", "restart": True, **change}))
    assert contents(data.path) == before
    assert verified(data.path).digest == data.digest


def test_a_restart_that_was_stopped_goes_on_beside_the_finished_data(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepare(config(source))
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 1500)
    monkeypatch.setattr(storage, "SHARD_BYTES", 2000)

    def stop(progress: PrepareProgress) -> None:
        if progress.documents > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(source, tokenizer="bpe:300", restart=True), stop)
    assert verified(data.path).digest == data.digest
    assert prepare(config(source)).digest == data.digest
    with pytest.raises(KeyboardInterrupt):
        prepare(config(source, tokenizer="bpe:300", restart=True), stop)
    seen: list[PrepareProgress] = []
    prepare(config(source, tokenizer="bpe:300"), seen.append)
    assert seen[0].stage == "resumed"
    assert verified(data.path).digest == prepare(config(source, out="fresh", tokenizer="bpe:300")).digest


def test_a_restart_under_way_is_not_disturbed(source: Path) -> None:
    data = prepare(config(source))

    def second(progress: PrepareProgress) -> None:
        assert prepare(config(source)).digest == data.digest

    prepare(config(source, restart=True), second)
    assert sorted(os.listdir(data.path)) == ["manifest.json", "shards-2"]


def test_files_of_another_origin_are_never_touched(source: Path) -> None:
    out = source.parent / "data"
    out.mkdir()
    (out / "shards").mkdir()
    (out / "shards/mine.txt").write_bytes(b"precious")
    for restart in (False, True):
        with pytest.raises(UserError, match="shards"):
            prepare(config(source, restart=restart))
    assert contents(out) == {"shards/mine.txt": b"precious"}


def test_bad_input_leaves_nothing_behind(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 1500)
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(UserError, match=source.name):
        prepare(config(source, out="deep/down"))
    assert os.listdir(source.parent) == [source.name]


def test_bad_settings_leave_nothing_behind(source: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    words = tmp_path_factory.mktemp("elsewhere") / "words.json"
    words.write_bytes(train_bpe(texts(10), 260).content)
    for options, message in [
        ({"source": "nowhere.txt"}, "nowhere.txt"),
        ({"tokenizer": "nowhere.json"}, "nowhere.json"),
        ({"tokenizer": "bpe:12"}, "'bpe:12'"),
        ({"tokenizer": str(words), "end_of_text": "<stop>"}, "'<stop>'"),
        ({"validation": "nowhere.txt", "validation_fraction": None}, "nowhere.txt"),
        ({"end_of_text": "<stop>"}, "'<stop>'"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(config(source, **options))
        assert os.listdir(source.parent) == [source.name]


def write_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    return path


def test_one_text_of_a_megabyte_works_with_defaults(tmp_path: Path) -> None:
    """Its 37 passages are too few for a hundredth of them: the passage of the lowest hash is held out."""
    text = "\n\n".join(
        f"Paragraph {i} of a novel says {i * i} times that numbers are words.\n" * 8 for i in range(2000)
    )
    path = tmp_path / "novel.txt"
    path.write_text(text[:1_100_000])
    seen: list[PrepareProgress] = []
    data = prepare(PrepareConfig(source=str(path), out=tmp_path / "data"), seen.append)
    passages = list(open_source(str(path)).documents())
    assert [split.documents for split in data.manifest.splits.values()] == [len(passages) - 1, 1]
    assert decoded(data, "validation") == [min(passages, key=lambda passage: sha256(passage.encode()).digest())]
    assert decoded(data, "train") == [passage for passage in passages if passage != decoded(data, "validation")[0]]
    assert f"{len(passages)} documents" in seen[0].stage


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 0.99])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_of_few_documents_the_last_part_is_held_out(tmp_path: Path, count: int, fraction: float) -> None:
    documents = [f"Document {i}:\n" + "".join(f"line {i} {j}\n" for j in range(100)) for i in range(count)]
    path = write_lines(tmp_path / "few.jsonl", documents)
    data = prepare(config(path, validation_fraction=fraction))
    train, validation = decoded(data, "train"), decoded(data, "validation")
    if fraction > 0.1 and validation[-1] in documents and train[-1] in documents:
        return  # the fraction divided them
    text = "".join(documents)
    assert "".join(train + validation) == text
    assert len("".join(validation)) == pytest.approx(max(fraction, 0.1) * len(text), abs=20)
    assert train[-1][-1] in "\n "


def test_of_ten_documents_one_is_held_out_or_kept(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "ten.jsonl", texts(10))
    for fraction, documents in ((1e-9, [9, 1]), (1 - 1e-9, [1, 9])):
        data = prepare(config(path, out=f"{fraction}", validation_fraction=fraction))
        assert [split.documents for split in data.manifest.splits.values()] == documents
        assert sorted(decoded(data, "train") + decoded(data, "validation")) == sorted(texts(10))


def test_copies_stay_in_one_split_when_there_are_few(tmp_path: Path) -> None:
    data = prepare(config(write_lines(tmp_path / "a.jsonl", ["one", "two"] * 3), validation_fraction=1e-9))
    assert sorted(decoded(data, "train") + decoded(data, "validation")) == ["one"] * 3 + ["two"] * 3
    assert len(set(decoded(data, "validation"))) == 1


@pytest.mark.parametrize("documents", [["one"] * 9, ["a"]])
def test_what_cannot_be_divided_is_refused(tmp_path: Path, documents: list[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", documents)
    with pytest.raises(UserError, match="a.jsonl"):
        prepare(config(path, validation_fraction=1e-9))
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_cut_text_resumes_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "few.jsonl", [f"Document {i} " * 500 for i in range(8)])
    options = {"validation_fraction": 1e-9}
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 1500)
    monkeypatch.setattr(storage, "SHARD_BYTES", 2000)
    whole = contents(prepare(config(path, out="whole", **options)).path)

    def stop(progress: PrepareProgress) -> None:
        if progress.documents > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(path, **options), stop)
    assert contents(prepare(config(path, **options)).path) == whole


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_source_is_not_its_own_validation(source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"validation_fraction": None, "tokenizer": tokenizer}
    (source.parent / "copy").mkdir()
    copy = source.parent / "copy/of-it.jsonl.gz"
    copy.write_bytes(source.read_bytes())
    # The same documents in another form, and some of them.
    lines = write_lines(source.parent / "lines.jsonl", texts(400))
    some = write_lines(source.parent / "some.jsonl", texts(40))
    with monkeypatch.context() as patch:
        # The same files are seen before anything is encoded.
        patch.setattr(preparation, "encode_chunks", None)
        for validation in (source, copy):
            with pytest.raises(UserError):
                prepare(config(source, validation=str(validation), **options))
        with pytest.raises(UserError, match="validation 'builtin'"):
            prepare(PrepareConfig(source="builtin", validation="builtin", out=source.parent / "data"))
    for validation in (source, copy, lines, some):
        with pytest.raises(UserError, match=f"validation {str(validation)!r}"):
            prepare(config(source, validation=str(validation), **options))
        assert not (source.parent / "data").exists()
    more = write_lines(source.parent / "more.jsonl", ["another", *texts(40)])
    assert prepare(config(source, validation=str(more), **options)).split("validation").documents == 41


def test_bytes_have_no_other_end_of_text(source: Path) -> None:
    first = prepare(config(source, out="first"))
    for tokenizer in ("bytes", str(first.path)):
        with pytest.raises(UserError, match="'<stop>'"):
            prepare(config(source, tokenizer=tokenizer, end_of_text="<stop>"))


@pytest.mark.parametrize("own", [False, True])
def test_a_bpe_is_trained_on_the_train_split_alone(tmp_path: Path, own: bool) -> None:
    """A word that only held-out documents repeat is not in its vocabulary."""
    documents = [f"{i} is a number" for i in range(300)]
    held_out = [text for text in documents if hash_document(text) < 0.1 * 2**64]
    assert 10 < len(held_out) < 60
    if own:
        held_out = [f"held out {i}: " + "zyxwvu " * 50 for i in range(20)]
        validation = write_lines(tmp_path / "validation.jsonl", held_out)
        options = {"validation": str(validation), "validation_fraction": None}
    else:
        # Held out by their hash, whatever they repeat: numbers are tried until the hash is low.
        marked = (f"{i} zyxwvu zyxwvu zyxwvu zyxwvu" for i in range(10_000))
        documents += [text for text in marked if hash_document(text) < 0.1 * 2**64][:100]
        options = {}
    path = write_lines(tmp_path / "source.jsonl", documents)
    data = prepare(config(path, tokenizer="bpe:400", **options))
    assert sum("zyxwvu" in text for text in decoded(data, "validation")) >= 20
    held_out_word, train_word = data.tokenizer.encode_batch(["zyxwvu", " number"])
    assert (len(held_out_word), len(train_word)) == (6, 1)


def test_a_bpe_is_trained_on_the_first_part_of_a_large_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "source.jsonl", [*texts(100), *["zyxwvu " * 50] * 20])
    lengths = []
    for characters in (1000, 100_000):
        monkeypatch.setattr(preparation, "BPE_SAMPLE_CHARACTERS", characters)
        data = prepare(config(path, out=f"{characters}", tokenizer="bpe:400"))
        lengths += [len(ids) for ids in data.tokenizer.encode_batch(["zyxwvu"])]
    assert lengths == [6, 1]


def test_a_smaller_vocabulary_than_asked_for_is_reported(source: Path) -> None:
    seen: list[PrepareProgress] = []
    data = prepare(config(source, tokenizer="bpe:99999999"), seen.append)
    assert data.manifest.tokenizer.name == f"bpe:{data.vocabulary}"
    assert data.vocabulary < 5000
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert [f"{data.vocabulary:,}" in stage and "99,999,999" in stage for stage in stages] == [False, True, False]
    seen.clear()
    prepare(config(source, out="enough", tokenizer="bpe:300"), seen.append)
    assert list(dict.fromkeys(progress.stage for progress in seen)) == ["training the tokenizer", "tokens"]


DIGESTS = [
    ({"validation_fraction": 0.1}, "119d769385f69b0a09b2765e861f89961586d358ee0568347d7d734cbe2552fd"),
    ({"tokenizer": "bpe:300", "validation_fraction": None},
     "438be45c8eb72ae071b249a4796b46cedb011cc7342243b87eb7d4a786c0a737"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "digest"), DIGESTS)
@pytest.mark.parametrize("shard_bytes", [1000, 2**24])
def test_digests_are_those_of_committed_runs(
    source: Path, options: dict[str, Any], digest: str, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is part of a run's identity: it depends on the tokens alone, not on how they are stored."""
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 1500)
    monkeypatch.setattr(storage, "SHARD_BYTES", shard_bytes)
    data = prepare(config(source, **options))
    assert (len(data.split("train").shards) > 5) == (shard_bytes == 1000)
    assert verified(data.path).digest == digest


def test_the_digest_of_text_like_the_builtin_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "builtin_documents", builtin._arithmetic_documents)
    data = prepare(PrepareConfig(source="builtin", out=tmp_path / "data"))
    assert data.digest == "0cf20407b02e7c7f45d7206744e411ec76479537555641ed451554b847079abf"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 0.0}, "validation fraction 0.0"),
        ({"validation_fraction": float("nan")}, "validation fraction nan"),
        ({"validation": "a.txt"}, "a.txt"),
        ({"source": ""}, "source ''"),
        ({"source": " "}, "source ' '"),
        ({"validation": "", "validation_fraction": None}, "validation ''"),
        ({"tokenizer": ""}, "tokenizer ''"),
        ({"end_of_text": ""}, "end of text ''"),
        ({"workers": 0}, "workers 0"),
        ({"max_documents": -1}, "max documents -1"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(tmp_path / "any.txt", **options)
    assert os.listdir(tmp_path) == []


def test_out_must_be_a_directory(source: Path) -> None:
    with pytest.raises(UserError, match=source.name):
        config(source, out=source.name)


def test_at_most_so_many_documents(source: Path) -> None:
    data = prepare(config(source, max_documents=50))
    assert sorted(decoded(data, "train") + decoded(data, "validation")) == sorted(texts(50))


def test_full_disk_is_one_line_and_goes_on(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at each moment at which data is made durable, one after another."""
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 6000)
    monkeypatch.setattr(storage, "SHARD_BYTES", 20_000)
    expected = contents(prepare(config(source, out="expected")).path)
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
                assert str(error).startswith(str(source.parent / out))
                assert "\n" not in str(error)
        if (source.parent / out / "manifest.json").exists():
            verified(source.parent / out)
        assert contents(prepare(config(source, out=out)).path) == expected
        failures += 1
    assert failures > 15


def test_unwritable_directory_is_one_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match="data/.partial"):
        prepare(config(source))


def test_a_second_process_is_kept_out(source: Path) -> None:
    def second(progress: PrepareProgress) -> None:
        with pytest.raises(StoppedError):
            prepare(config(source))

    data = prepare(config(source), second)
    assert verified(data.path).digest == data.digest
