"""Prepared data as training and evaluation read it: checked once, then memory-mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.manifest import MANIFEST_FILE, STORAGE, Manifest, Split, read_manifest
from siamesenorm.data.partial import PARTIAL_DIRECTORY
from siamesenorm.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from siamesenorm.errors import UserError

Verify = Literal["quick", "full"]
# A quick check reads whole files up to this size, and of larger ones only some blocks.
QUICK_BYTES = 64 * 2**20
SAMPLED_BLOCKS = 64
BLOCK_IDS = 2**16
REMEDY = "prepare the data again with --restart"


class PreparedData:
    """A directory of prepared data, opened for reading: `manifest.json`, `train.bin`, `validation.bin`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path, verify: Verify = "quick") -> PreparedData:
        """Open prepared data and check it: sizes always; checksums and ids too, of large files only on `full`.

        Raises `UserError` for a directory that is missing or unfinished, and for a file that is missing, empty,
        truncated, or whose checksum or vocabulary does not match the manifest.
        """
        path = Path(path)
        _require_finished(path)
        data = cls(path, read_manifest(path / MANIFEST_FILE))
        data._check_tokenizer_file()
        for split in data.manifest.splits.values():
            data._check_size(split)
        for split in data.manifest.splits.values():
            data._check_content(split, verify)
        return data

    @property
    def digest(self) -> str:
        """Identity of the data (64 hex digits)."""
        return self.manifest.digest

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.manifest.tokenizer.vocabulary

    @property
    def end_of_text(self) -> int:
        """Id that closes every document."""
        return self.manifest.tokenizer.end_of_text

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the ids of the train split, nats per token."""
        return self.manifest.unigram_entropy

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, and that gives their text back."""
        return load_tokenizer(self.path)

    def split(self, name: str) -> Split:
        """Return the entry of a split; raises `UserError` if there is none of that name."""
        splits = self.manifest.splits
        if name not in splits:
            raise UserError(f"{self.path}: no split {name!r}: choose from {', '.join(splits)}")
        return splits[name]

    def tokens(self, split: str) -> NDArray[Any]:
        """Return the ids of a split, [tokens] uint16 or uint32, memory-mapped and read-only."""
        # Seen as a plain array: slices of a memmap cost more than the copies made of them.
        return np.memmap(self.path / self.split(split).file, dtype=self._storage, mode="r").view(np.ndarray)

    def require_vocabulary(self, vocabulary: int) -> None:
        """Raise `UserError` if a model with so many ids cannot read the data."""
        if vocabulary < self.vocabulary:
            raise UserError(
                f"{self.path}: its ids need a vocabulary of {self.vocabulary:,}, the model has {vocabulary:,}: "
                "build the model with the vocabulary of the data"
            )

    def describe(self) -> str:
        """Return a line for people about each split, and one about the tokenizer."""
        lines = [
            f"{name}: {split.tokens:,} tokens, {split.documents:,} documents, {split.bytes / 1e6:,.2f} MB of text, "
            f"{split.bytes / split.tokens:.2f} bytes a token"
            for name, split in self.manifest.splits.items()
        ]
        tokenizer = self.manifest.tokenizer
        lines.append(
            f"tokenizer: {tokenizer.name}, vocabulary {tokenizer.vocabulary:,}, end of text {tokenizer.end_of_text}, "
            f"unigram entropy {self.unigram_entropy:.3f} nats a token"
        )
        return "\n".join(lines)

    @property
    def _storage(self) -> np.dtype[Any]:
        return np.dtype(STORAGE[self.manifest.dtype])

    def _check_tokenizer_file(self) -> None:
        expected = self.manifest.tokenizer.sha256
        file = self.path / TOKENIZER_FILE
        if expected is None:
            return
        if not file.is_file():
            raise UserError(f"{file}: missing: {REMEDY}")
        if hashlib.sha256(file.read_bytes()).hexdigest() != expected:
            raise UserError(f"{file}: its checksum is not the manifest's: {REMEDY}")

    def _check_size(self, split: Split) -> None:
        file = self.path / split.file
        if not file.is_file():
            raise UserError(f"{file}: missing: {REMEDY}")
        size, expected = file.stat().st_size, split.tokens * self._storage.itemsize
        if size == 0 or split.tokens == 0:
            raise UserError(f"{file}: an empty token file: {REMEDY}")
        if size != expected:
            what = "truncated" if size < expected else "too long"
            raise UserError(f"{file}: {what}, {size:,} bytes where the manifest says {expected:,}: {REMEDY}")

    def _check_content(self, split: Split, verify: Verify) -> None:
        """Check the range of the ids and, in files that are read whole, the checksum."""
        file = self.path / split.file
        ids = np.memmap(file, dtype=self._storage, mode="r").view(np.ndarray)
        whole = verify == "full" or ids.nbytes <= QUICK_BYTES
        checksum = hashlib.sha256()
        for start in _block_starts(len(ids), whole):
            block = ids[start : start + BLOCK_IDS]
            highest = int(block.max())
            if highest >= self.vocabulary:
                raise UserError(
                    f"{file}: holds the id {highest}, but the manifest's vocabulary has {self.vocabulary}: {REMEDY}"
                )
            if whole:
                checksum.update(block.tobytes())
        if whole and checksum.hexdigest() != split.sha256:
            raise UserError(f"{file}: its checksum is not the manifest's: {REMEDY}")


def _block_starts(length: int, whole: bool) -> Iterator[int]:
    """Yield where to read blocks: everywhere, or at places spread evenly from the first to the last."""
    if whole:
        yield from range(0, length, BLOCK_IDS)
    else:
        yield from np.linspace(0, length - BLOCK_IDS, SAMPLED_BLOCKS).astype(np.int64).tolist()


def _require_finished(path: Path) -> None:
    """Raise `UserError` unless there is a manifest."""
    if (path / MANIFEST_FILE).is_file():
        return
    if (path / PARTIAL_DIRECTORY).is_dir():
        raise UserError(f"{path}: its preparation was not finished: repeat the prepare command, it goes on")
    what = "no manifest.json in it" if path.is_dir() else "no such directory"
    raise UserError(f"{path}: no prepared data ({what}): make it with `siamesenorm prepare`")
