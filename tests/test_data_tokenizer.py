"""Tokenizers: round trips, the end of text by content, and files that are no tokenizers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from siamesenorm.data import ByteTokenizer, LibraryTokenizer, TokenizerEntry, load_tokenizer
from siamesenorm.data.tokenizer import bpe_size, entry_of, train_bpe
from siamesenorm.errors import UserError

TEXTS = ["the cat sat on the mat", "  two  blanks\n\nand “quotes”, naïve", "日本語 🙂", "the the the"]


def word_level(path: Path, words: list[str]) -> Path:
    """Write a tokenizer whose ids are the places of the words."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(path))
    return path


def test_bytes_are_utf8() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode_batch(["aé"])[0]
    assert ids.tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode([*ids, 256, 98]) == "aéb"
    assert tokenizer.decode([0xC3]) == "�"
    assert (tokenizer.vocabulary, tokenizer.end_of_text, tokenizer.content) == (257, 256, None)


def test_trained_bpe_gives_every_text_back() -> None:
    tokenizer = train_bpe(TEXTS * 5, 300)
    assert 257 < tokenizer.vocabulary <= 300
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert len(ids) == 0 or ids.max() < tokenizer.vocabulary
    # "the" was the commonest word: it became one token, where bytes need three.
    assert len(tokenizer.encode_batch(["the the the"])[0]) == 3
    assert train_bpe(TEXTS * 5, 300).content == tokenizer.content


def test_text_cannot_forge_the_end_of_text() -> None:
    tokenizer = train_bpe(TEXTS * 5, 300)
    (ids,) = tokenizer.encode_batch(["a<|endoftext|>b"])
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_end_of_text_is_found_by_content(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", ["<unk>", "</s>", "cat"])
    assert load_tokenizer(path).end_of_text == 1
    assert load_tokenizer(path, end_of_text="cat").end_of_text == 2
    # The common name wins over a rarer one, wherever its number lies.
    other = word_level(tmp_path / "other.json", ["</s>", "cat", "<|endoftext|>"])
    assert load_tokenizer(other).end_of_text == 2


def test_vocabulary_covers_the_highest_id(tmp_path: Path) -> None:
    """Numbering with gaps: three words, but an embedding needs ten rows."""
    path = word_level(tmp_path / "tokenizer.json", ["</s>", "a", "b"])
    content = json.loads(path.read_text())
    content["model"]["vocab"]["b"] = 9
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).vocabulary == 10


def test_truncation_and_padding_of_a_file_are_ignored(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", ["</s>", "a", "b"])
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(path))
    assert load_tokenizer(path).encode_batch(["a b a b a"])[0].tolist() == [1, 2, 1, 2, 1]


def test_pickle_keeps_a_chosen_end_of_text(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", ["</s>", "cat"])
    copy = pickle.loads(pickle.dumps(load_tokenizer(path, end_of_text="cat")))
    assert (copy.end_of_text, copy.vocabulary, copy.name) == (1, 2, "tokenizer")
    assert np.array_equal(copy.encode_batch(["cat </s>"])[0], [1, 0])


def test_manifest_entries() -> None:
    expected = TokenizerEntry(kind="bytes", name="bytes", vocabulary=257, end_of_text=256, sha256=None)
    assert entry_of(ByteTokenizer()) == expected


@pytest.mark.parametrize(("spec", "size"), [("bpe:4096", 4096), ("bpe:257", 257), ("bytes", None), ("a/b", None)])
def test_size_of_a_bpe(spec: str, size: int | None) -> None:
    assert bpe_size(spec) == size


@pytest.mark.parametrize("spec", ["bpe", "bpe:", "bpe:many", "bpe:100", "bpe:-5", "bpe:4e3"])
def test_bad_size_of_a_bpe(spec: str) -> None:
    with pytest.raises(UserError, match=repr(spec)):
        bpe_size(spec)


def test_missing_end_of_text_names_the_option(tmp_path: Path) -> None:
    path = word_level(tmp_path / "words.json", ["<unk>", "cat"])
    with pytest.raises(UserError, match="words.*--end-of-text"):
        load_tokenizer(path)
    with pytest.raises(UserError, match="'<stop>'"):
        load_tokenizer(path, end_of_text="<stop>")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b'{"model": {"type": "None"}}', b"[1, 2]"])
def test_files_that_are_no_tokenizers(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="broken") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named() -> None:
    with pytest.raises(UserError, match="nowhere.json"):
        load_tokenizer("nowhere.json")


def test_directory_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
    word_level(tmp_path / "tokenizer.json", ["</s>", "a"])
    assert load_tokenizer(tmp_path).vocabulary == 2


def test_hub_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        @staticmethod
        def from_pretrained(name: str) -> None:
            raise OSError(f"no route to {name}\nand more lines")

    monkeypatch.setattr(tokenizers, "Tokenizer", Unreachable)
    with pytest.raises(UserError, match=r"'bites'.*no route to bites\)$"):
        load_tokenizer("bites")


def test_hub_name_gives_the_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(word_level(tmp_path / "t.json", ["</s>", "a"])))
    monkeypatch.setattr(tokenizers.Tokenizer, "from_pretrained", lambda name: backend, raising=False)
    tokenizer = load_tokenizer("owner/name")
    assert isinstance(tokenizer, LibraryTokenizer)
    assert (tokenizer.name, tokenizer.vocabulary) == ("owner/name", 2)
