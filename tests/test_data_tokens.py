"""Prepared data as it is read: what is checked on opening, what a sample is, and how documents are separated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from siamesenorm.data import (
    PrepareConfig,
    PreparedData,
    TokenSamples,
    TokenSequence,
    document_ids,
    preparation,
    prepare,
    storage,
)
from siamesenorm.errors import UserError

WORDS = ["alpha beta", "gamma", "delta epsilon zeta", "eta theta", "iota", "kappa lambda"]
HELD_OUT = ["alpha bets", *WORDS[1:]]


def sources(path: Path) -> dict[str, str]:
    return {name: str(path / f"{file}.jsonl") for name, file in (("source", "train"), ("validation", "validation"))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory of prepared bytes: 60 documents of train, 6 of validation."""
    for name, texts in (("train", WORDS * 10), ("validation", HELD_OUT)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare(PrepareConfig(**sources(tmp_path), out=tmp_path / "data"))
    return tmp_path / "data"


def edit_manifest(path: Path, **changes: Any) -> None:
    """Change fields of the manifest, and its digest with them."""
    file = path / "manifest.json"
    record = json.loads(file.read_text())
    for name, value in changes.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(record))


def resign(path: Path) -> None:
    """Give an edited manifest the digest of its fields, found from the complaint of `open`."""
    import hashlib

    file = path / "manifest.json"
    record = json.loads(file.read_text())
    tokenizer = {"sha256": None, **record["tokenizer"]}
    del tokenizer["name"]
    splits = {name: {"file": f"{name}.bin", **split} for name, split in record["splits"].items()}
    for split in splits.values():
        del split["shards"]
    identity = {"schema": 1, "tokenizer": tokenizer, "dtype": record["dtype"], "splits": splits}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    record["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    file.write_text(json.dumps(record))


def test_ids_are_the_documents_joined_by_the_end_of_text(path: Path) -> None:
    data = PreparedData.open(path)
    held_out, expected = ([i for text in texts for i in (*text.encode(), 256)] for texts in (HELD_OUT, WORDS))
    assert data.tokens("validation")[:].tolist() == held_out
    assert data.tokens("validation").dtype == np.uint16
    assert np.asarray(data.tokens("train")).tolist() == expected * 10
    assert (data.vocabulary, data.end_of_text, data.tokenizer.name) == (257, 256, "bytes")
    assert not data.tokens("train")[:].flags.writeable


def test_unigram_entropy_is_that_of_the_train_split(path: Path) -> None:
    _, counts = np.unique([index for text in WORDS for index in (*text.encode(), 256)], return_counts=True)
    shares = counts / counts.sum()
    expected = -(shares * np.log(shares)).sum()
    assert PreparedData.open(path).unigram_entropy == pytest.approx(expected, rel=1e-12)


def test_manifest_is_the_contract(path: Path) -> None:
    record = json.loads((path / "manifest.json").read_text())
    assert (record["schema"], record["directory"]) == (2, "shards")
    assert record["tokenizer"] == {
        "kind": "bytes",
        "name": "bytes",
        "vocabulary": 257,
        "end_of_text": 256,
        "sha256": None,
    }
    train = record["splits"]["train"]
    size = sum(map(len, WORDS)) * 10
    assert (train["documents"], train["bytes"], train["tokens"]) == (60, size, size + 60)
    assert train["shards"] == [size + 60]
    before = record["digest"]
    resign(path)
    assert json.loads((path / "manifest.json").read_text())["digest"] == before
    assert PreparedData.open(path).digest == before


def test_a_flipped_bit_is_seen_on_request(path: Path) -> None:
    data = PreparedData.open(path)
    data.verify()
    file = path / "shards/train-00000.bin"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    # Opening reads no tokens: sizes and the manifest are right.
    data = PreparedData.open(path)
    with pytest.raises(UserError, match="train"):
        data.verify()


def test_ids_outside_the_vocabulary_are_seen_on_request(path: Path) -> None:
    edit_manifest(path, tokenizer={"vocabulary": 256})
    resign(path)
    data = PreparedData.open(path)
    with pytest.raises(UserError, match="id 256, .* 256"):
        data.verify()


def test_a_changed_tokenizer_is_seen(path: Path) -> None:
    data = prepare(PrepareConfig(**sources(path.parent), out=path / "bpe", tokenizer="bpe:300"))
    file = data.path / "shards/tokenizer.json"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(UserError, match="tokenizer.json"):
        PreparedData.open(data.path)
    file.unlink()
    with pytest.raises(UserError, match="tokenizer.json"):
        PreparedData.open(data.path)


@pytest.mark.parametrize("lengths", [[7], [1, 1, 5], [3, 4], [2, 2, 2, 1]])
def test_shards_are_read_as_one_sequence(lengths: list[int]) -> None:
    ids = np.arange(7, dtype=np.uint16)
    shards = np.split(ids, np.cumsum(lengths)[:-1])
    tokens = TokenSequence(shards)
    assert (len(tokens), tokens.dtype) == (7, np.uint16)
    for start in range(-8, 9):
        for stop in range(-8, 9):
            assert tokens[start:stop].tolist() == ids[start:stop].tolist()
            assert tokens[start:stop].dtype == np.uint16
    assert np.array_equal(tokens, ids)
    # Whole shards are views, also at their edges.
    for shard, end in zip(shards, np.cumsum(lengths).tolist(), strict=True):
        assert np.shares_memory(tokens[end - len(shard) : end], shard)
    with pytest.raises(ValueError, match="step 2"):
        tokens[::2]


def test_samples_across_the_edges_of_shards_are_exact(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PreparedData.open(path)
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 30)
    monkeypatch.setattr(storage, "SHARD_BYTES", 50)
    pieces = prepare(PrepareConfig(**sources(path.parent), out=path.parent / "pieces"))
    assert len(pieces.split("train").shards) > 10
    assert pieces.digest == whole.digest
    for context in (5, 100):
        expected = TokenSamples(whole, "train", context, seed=1)
        samples = TokenSamples(pieces, "train", context, seed=1)
        assert np.array_equal(samples.batch(0, samples.samples), expected.batch(0, expected.samples))


def test_a_model_too_small_for_the_data(path: Path) -> None:
    data = PreparedData.open(path)
    data.require_vocabulary(257)
    with pytest.raises(UserError, match="257.* 256"):
        data.require_vocabulary(256)


def test_damaged_directories(path: Path) -> None:
    file = path / "shards/train-00000.bin"
    content = file.read_bytes()
    for damaged in (content[:99], content + b"\0\0", b""):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="train-00000.bin"):
            PreparedData.open(path)
    file.unlink()
    with pytest.raises(UserError, match="train-00000.bin"):
        PreparedData.open(path)


def test_damaged_manifests(path: Path) -> None:
    file = path / "manifest.json"
    whole = file.read_text()
    contents = [
        *["", "{", "[]", "{}", whole[:-10], whole.replace('"dtype"', '"kind"')],
        whole.replace('"schema": 2', '"schema": 1'),
        whole.replace('"uint16"', '"uint64"'),
        whole.replace('"documents": 60', '"documents": 61'),
        whole.replace('"directory": "shards"', '"directory": "/etc"'),
        re.sub(r'("shards": \[\s+)(\d+)', r"\g<1>5, \2", whole, count=1),
    ]
    for content in contents:
        assert content != whole
        file.write_text(content)
        with pytest.raises(UserError, match=re.escape(str(file))) as caught:
            PreparedData.open(path)
        assert "\n" not in str(caught.value)


def test_directories_that_are_not_prepared(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        PreparedData.open(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="manifest.json"):
        PreparedData.open(tmp_path / "other")
    (path / "manifest.json").unlink()
    (path / ".partial").mkdir()
    with pytest.raises(UserError, match="prepare"):
        PreparedData.open(path)


def test_unknown_split(path: Path) -> None:
    with pytest.raises(UserError, match="'test'.* train, validation"):
        PreparedData.open(path).tokens("test")


def test_an_epoch_holds_every_sample_once(path: Path) -> None:
    samples = TokenSamples(PreparedData.open(path), "train", context=7, seed=1)
    ids = samples._tokens
    assert samples.samples == (len(ids) - 1) // 7
    batch = samples.batch(0, samples.samples)
    assert batch.shape == (samples.samples, 8)
    assert batch.dtype == np.int64
    in_sequence = [tuple(ids[i * 7 : i * 7 + 8].tolist()) for i in range(samples.samples)]
    assert sorted(map(tuple, batch.tolist())) == sorted(in_sequence)
    assert list(map(tuple, batch.tolist())) != in_sequence
    later = samples.batch(3, 5)
    assert np.array_equal(later, batch[3:8])


def test_windows_read_every_target_once_in_order(path: Path) -> None:
    samples = TokenSamples(PreparedData.open(path), "validation", context=12)
    ids = samples._tokens
    windows = list(samples.windows(2))
    assert [len(window) for window in windows] == [2, 2, 1]
    assert np.concatenate(windows)[:, 1:].ravel().tolist() == ids[1 : samples.targets + 1].tolist()
    assert np.concatenate(windows)[:, :-1].ravel().tolist() == ids[: samples.targets].tolist()
    assert sum(len(window) for window in samples.windows(4, limit=25)) == 3
    assert sum(len(window) for window in samples.windows(4, limit=10**6)) == samples.samples
    with pytest.raises(UserError, match="limit 0"):
        next(samples.windows(4, limit=0))


def test_too_few_tokens_for_one_sample(path: Path) -> None:
    data = PreparedData.open(path)
    length = len(data.tokens("validation"))
    assert TokenSamples(data, "validation", context=length - 1).samples == 1
    with pytest.raises(UserError, match=f"{length} .* {length} .* {length + 1}"):
        TokenSamples(data, "validation", context=length)
    with pytest.raises(UserError, match="context 0"):
        TokenSamples(data, "validation", context=0)


def test_documents_start_after_the_end_of_text() -> None:
    end = 9
    batch = np.array([[1, 2, 9, 3, 9, 9, 4], [9, 1, 1, 1, 1, 1, 9]], dtype=np.uint16)
    expected = [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert document_ids(batch, end).tolist() == expected
    assert document_ids(batch[0], end).tolist() == expected[0]
