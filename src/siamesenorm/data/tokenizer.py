"""Tokenizers: bytes, any JSON file of the `tokenizers` library, and a byte-level BPE trained on the text.

The end of text is found by its name, never by a fixed id: files of the same family number their special tokens
differently. Text that spells a special token is encoded as ordinary text, so that no document can forge a boundary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.storage import MANIFEST_FILE, TOKENIZER_FILE, TokenizerEntry, read_manifest
from siamesenorm.errors import UserError, optional, reason

Ids = NDArray[np.int64]

# Names of the end of text in common tokenizers, the commonest first.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """Text to token ids and back; one id, `end_of_text`, closes every document."""

    name: str
    """Name to display: `bytes`, `bpe:4096`, or the stem of the file."""
    vocabulary: int
    """Number of ids: every id is below it."""
    end_of_text: int
    """Id that closes a document."""
    content: bytes | None
    """Content of the tokenizer file, None for a tokenizer without a file."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without any special token."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, special tokens left out, invalid bytes replaced."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255 and the end of text as 256."""

    name = "bytes"
    vocabulary = 257
    end_of_text = 256
    content: bytes | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the bytes; the end of text is left out, invalid UTF-8 replaced."""
        return bytes(index for index in map(int, ids) if index < 256).decode("utf-8", errors="replace")


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library, given by the content of its JSON file.

    `end_of_text` is the token's text, or its id; without it the usual names are looked up. Without a name it is called
    `bpe:SIZE` by its vocabulary.
    Raises `UserError` if the content is no tokenizer, or holds no end-of-text token.
    """

    def __init__(self, name: str | None, content: bytes, end_of_text: str | int | None = None) -> None:
        self.content: bytes | None = content
        self._backend = _parse(name or "bpe", content)
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        # Not the number of entries: ids may have gaps, and an embedding needs a row for the highest one.
        self.vocabulary = max(ids.values(), default=-1) + 1
        self.name = name or f"bpe:{self.vocabulary}"
        self.end_of_text = (
            end_of_text if isinstance(end_of_text, int) else _find_end_of_text(self.name, ids, end_of_text)
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without special tokens."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        text: str = self._backend.decode([int(index) for index in ids], skip_special_tokens=True)
        return text

    def __reduce__(self) -> tuple[type[LibraryTokenizer], tuple[str, bytes | None, int]]:
        """Pickle the content of the file: the library's object cannot be pickled."""
        return LibraryTokenizer, (self.name, self.content, self.end_of_text)


def _parse(name: str, content: bytes) -> Any:
    """Return the library's tokenizer, set to plain encoding."""
    library = optional("tokenizers", "lab", "a tokenizer other than 'bytes'")
    try:
        backend = library.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{name}: no tokenizer.json ({reason(error)}): give one of the tokenizers library") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _find_end_of_text(name: str, ids: dict[str, int], wanted: str | None) -> int:
    """Return the id of the token `wanted`, or of the first usual name."""
    candidates = END_OF_TEXT_NAMES if wanted is None else (wanted,)
    for candidate in candidates:
        if candidate in ids:
            return ids[candidate]
    missing = f"none of the tokens {', '.join(candidates)}" if wanted is None else f"no token {wanted!r}"
    raise UserError(f"{name}: has {missing}: name the one that ends its documents with --end-of-text")


def load_tokenizer(spec: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """Return the tokenizer named `bytes`, of a JSON file, of a directory (prepared data, a model), or of a Hub name.

    Raises `UserError` if there is none, if it cannot be read, or if it has no end-of-text token.
    """
    path = Path(spec)
    prepared = str(spec) == "bytes" or (path / MANIFEST_FILE).is_file()
    if prepared and end_of_text is not None:
        raise UserError(f"end of text {end_of_text!r}: tokenizer {str(spec)!r} has its own: leave --end-of-text out")
    if str(spec) == "bytes":
        return ByteTokenizer()
    if prepared:
        manifest = read_manifest(path / MANIFEST_FILE)
        entry = manifest.tokenizer
        if entry.kind == "bytes":
            return ByteTokenizer()
        file = path / manifest.directory / TOKENIZER_FILE
        if not file.is_file():
            raise UserError(f"{file}: missing: prepare the data again with --restart")
        return LibraryTokenizer(entry.name, file.read_bytes(), entry.end_of_text)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if path.is_file():
        return LibraryTokenizer(path.stem, path.read_bytes(), end_of_text)
    if path.suffix == ".json" or path.is_absolute():
        raise UserError(f"tokenizer {str(spec)!r}: no such file: give a tokenizer JSON, 'bytes' or 'bpe:4096'")
    return LibraryTokenizer(str(spec), _from_hub(str(spec)), end_of_text)


def _from_hub(name: str) -> bytes:
    """Return the JSON of a tokenizer on the Hugging Face Hub."""
    library = optional("tokenizers", "lab", "a tokenizer other than 'bytes'")
    try:
        text: str = library.Tokenizer.from_pretrained(name).to_str()
    except Exception as error:  # the library raises bare Exception, and the network anything
        raise UserError(
            f"tokenizer {name!r}: neither 'bytes', 'bpe:SIZE', a JSON file, nor a name that the Hugging Face Hub "
            f"could give ({reason(error)})"
        ) from error
    return text.encode("utf-8")


def entry_of(tokenizer: Tokenizer) -> TokenizerEntry:
    """Return the tokenizer's entry in the manifest of prepared data."""
    content = tokenizer.content
    return TokenizerEntry(
        kind="bytes" if content is None else "tokenizers",
        name=tokenizer.name,
        vocabulary=tokenizer.vocabulary,
        end_of_text=tokenizer.end_of_text,
        sha256=None if content is None else hashlib.sha256(content).hexdigest(),
    )


def bpe_size(spec: str) -> int | None:
    """Return the vocabulary in a spec like `bpe:4096`, None for any other spec.

    Raises `UserError` if the size is not a whole number of at least 257: the bytes and the end of text.
    """
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        return None
    if not size.isdecimal() or int(size) < 257:
        raise UserError(f"tokenizer {spec!r}: the size must be a whole number of at least 257, as in 'bpe:4096'")
    return int(size)


def train_bpe(texts: Iterable[str], vocabulary: int, end_of_text: str | None = None) -> LibraryTokenizer:
    """Train a byte-level BPE (arXiv:1508.07909 on bytes) with at most `vocabulary` ids; it restores any text.

    The end of text is a token named `end_of_text`, `<|endoftext|>` if not given. A small text may hold fewer merges
    than that: the tokenizer then has a smaller vocabulary, which is in its name.
    """
    end_of_text = end_of_text or END_OF_TEXT_NAMES[0]
    library = optional("tokenizers", "lab", "a tokenizer other than 'bytes'")
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return LibraryTokenizer(None, backend.to_str().encode("utf-8"), end_of_text)
