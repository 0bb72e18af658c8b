"""Prepared data as training and evaluation read it: memory-mapped tokens, and samples in a stateless order.

Documents follow each other without a gap and samples cut across them; `document_ids` separates them for a masked
attention.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.storage import (
    MANIFEST_FILE,
    PARTIAL_DIRECTORY,
    STORAGE,
    TOKENIZER_FILE,
    Manifest,
    Split,
    read_manifest,
    shard_file,
)
from siamesenorm.data.tokenizer import Tokenizer, load_tokenizer
from siamesenorm.errors import UserError

BLOCK_IDS = 2**20
REMEDY = "prepare the data again with --restart"
ROUNDS = 8
Words = NDArray[np.uint64]


class TokenSequence:
    """The ids of a split: the arrays of its shards, read as one."""

    def __init__(self, shards: Sequence[NDArray[Any]]) -> None:
        self._shards = shards
        self._ends = list(accumulate(map(len, shards)))
        self.dtype = shards[0].dtype

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._ends[-1]

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Return consecutive ids: a view within a shard, a copy across the edge of one."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"step {step}: only consecutive ids can be read")
        number = min(bisect_right(self._ends, start), len(self._shards) - 1)
        pieces = []
        while True:
            shard, end = self._shards[number], self._ends[number]
            first = end - len(shard)
            pieces.append(shard[start - first : max(stop, start) - first])
            if stop <= end:
                return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            start, number = end, number + 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all ids as one array."""
        return np.asarray(self[:], dtype=dtype)


class PreparedData:
    """A directory of prepared data, opened for reading."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.digest = manifest.digest
        self.vocabulary = manifest.tokenizer.vocabulary
        self.end_of_text = manifest.tokenizer.end_of_text
        self.unigram_entropy = manifest.unigram_entropy

    @classmethod
    def open(cls, path: str | Path) -> PreparedData:
        """Open prepared data and check the manifest, the tokenizer, and the sizes of all files; see also `verify`.

        Raises `UserError` for a directory that is missing or unfinished, for a file that is missing or has another
        size, and for a tokenizer or a manifest that was changed.
        """
        path = Path(path)
        if not (path / MANIFEST_FILE).is_file():
            if (path / PARTIAL_DIRECTORY).is_dir():
                raise UserError(f"{path}: its preparation was not finished: repeat the prepare command, it resumes")
            what = "no manifest.json in it" if path.is_dir() else "no such directory"
            raise UserError(f"{path}: no prepared data ({what}): make it with `siamesenorm prepare`")
        data = cls(path, read_manifest(path / MANIFEST_FILE))
        data._check_files()
        return data

    def _check_files(self) -> None:
        itemsize = np.dtype(self.manifest.dtype).itemsize
        for name, split in self.manifest.splits.items():
            if split.tokens == 0:
                raise UserError(f"{self.path}: the {name} split is empty: {REMEDY}")
            for file, ids in zip(self._shard_files(name), split.shards, strict=True):
                size = file.stat().st_size if file.is_file() else 0
                if size != ids * itemsize:
                    raise UserError(f"{file}: {size:,} bytes where the manifest says {ids * itemsize:,}: {REMEDY}")
        checksum = self.manifest.tokenizer.sha256
        if checksum is not None:
            file = self.path / self.manifest.directory / TOKENIZER_FILE
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != checksum:
                raise UserError(f"{file}: missing, or its checksum is not the manifest's: {REMEDY}")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the ids, which also decodes them."""
        return load_tokenizer(self.path)

    def split(self, name: str) -> Split:
        """Return the manifest's entry of a split; raises `UserError` if there is none of that name."""
        splits = self.manifest.splits
        if name not in splits:
            raise UserError(f"{self.path}: no split {name!r}: choose from {', '.join(splits)}")
        return splits[name]

    def _shard_files(self, name: str) -> list[Path]:
        directory = self.path / self.manifest.directory
        return [directory / shard_file(name, number) for number in range(len(self.split(name).shards))]

    def tokens(self, split: str) -> TokenSequence:
        """Return the ids of a split, uint16 or uint32, memory-mapped and read-only."""
        storage = STORAGE[self.manifest.dtype]
        # As plain arrays: slices of a memmap cost more than the copies made of them.
        arrays = (np.memmap(file, dtype=storage, mode="r").view(np.ndarray) for file in self._shard_files(split))
        return TokenSequence(list(arrays))

    def require_vocabulary(self, vocabulary: int) -> None:
        """Raise `UserError` if a model with this vocabulary is too small for the data."""
        if vocabulary < self.vocabulary:
            raise UserError(
                f"{self.path}: its ids need a vocabulary of {self.vocabulary:,}, the model has {vocabulary:,}: "
                "build the model with the vocabulary of the data"
            )

    def describe(self) -> str:
        """Return a line about each split, and one about the tokenizer."""
        lines = [
            f"{name}: {split.tokens:,} tokens, {split.documents:,} documents, {split.bytes / 1e6:,.2f} MB of text, "
            f"{split.bytes / split.tokens:.2f} bytes per token"
            for name, split in self.manifest.splits.items()
        ]
        lines.append(
            f"tokenizer: {self.manifest.tokenizer.name}, vocabulary {self.vocabulary:,}, end of text "
            f"{self.end_of_text}, unigram entropy {self.unigram_entropy:.3f} nats per token"
        )
        return "\n".join(lines)

    def verify(self) -> None:
        """Read all tokens: raise `UserError` where an id or a checksum is not that of the manifest."""
        for name, split in self.manifest.splits.items():
            tokens = self.tokens(name)
            checksum = hashlib.sha256()
            for start in range(0, len(tokens), BLOCK_IDS):
                block = tokens[start : start + BLOCK_IDS]
                highest = int(block.max())
                if highest >= self.vocabulary:
                    raise UserError(
                        f"{self.path}: the {name} split holds the id {highest}, but the manifest's vocabulary has "
                        f"{self.vocabulary}: {REMEDY}"
                    )
                checksum.update(block.tobytes())
            if checksum.hexdigest() != split.sha256:
                raise UserError(f"{self.path}: the checksum of the {name} split is not the manifest's: {REMEDY}")


class SampleOrder:
    """Endless epochs over `samples` samples, each epoch in an order of its own, as a pure function of the position.

    The sample at a position is `permutation(seed, epoch)[position % samples]` with `epoch = position // samples`.
    A Feistel network over the smallest even number of bits that covers the samples is a permutation whatever its round
    function; walking its cycles until the value is a sample again restricts it to them (Black and Rogaway 2002).
    Raises `UserError` if there are no samples or the seed is negative.
    """

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise UserError(f"samples {samples}: an order needs at least one sample")
        if seed < 0:
            raise UserError(f"seed {seed}: give a whole number of at least 0")
        self.samples, self.seed = samples, seed
        self._half_bits = np.uint64(max(1, ((samples - 1).bit_length() + 1) // 2))
        self._half_mask = (np.uint64(1) << self._half_bits) - np.uint64(1)

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the samples at the positions `start .. start + count - 1`, [count] int64.

        Raises `UserError` if a number is negative.
        """
        if start < 0 or count < 0:
            raise UserError(f"positions {start} + {count}: give whole numbers of at least 0")
        positions = np.arange(start, start + count, dtype=np.uint64)
        epochs, values = np.divmod(positions, np.uint64(self.samples))
        keys = _mix(epochs ^ _mix(np.array([self.seed], dtype=np.uint64)))
        values = self._permute(values, keys)
        while (outside := values >= self.samples).any():
            values[outside] = self._permute(values[outside], keys[outside])
        return values.astype(np.int64)

    def _permute(self, values: Words, keys: Words) -> Words:
        """Permute `0 .. 2^(2 half_bits) - 1`, by the permutation of each value's key."""
        left, right = values >> self._half_bits, values & self._half_mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(right + _mix(keys + np.uint64(number))) & self._half_mask)
        return (left << self._half_bits) | right


def _mix(words: Words) -> Words:
    """Return the words scrambled by the finaliser of SplitMix64, a bijection of 64-bit words."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class TokenSamples:
    """A split as samples of `context` inputs and as many targets, in the stateless order of a seed.

    Sample i is `tokens[i * context : i * context + context + 1]`, so every id but the first is a target once an
    epoch; an incomplete last sample is dropped.
    Raises `UserError` if the split has too few tokens for one sample.
    """

    def __init__(self, data: PreparedData, split: str, context: int, seed: int = 0) -> None:
        if context < 1:
            raise UserError(f"context {context}: a sample needs at least one token")
        self._tokens = data.tokens(split)
        self.context = context
        self.samples = (len(self._tokens) - 1) // context
        if self.samples < 1:
            raise UserError(
                f"{data.path}: the {split} split has {len(self._tokens):,} tokens, one sample of context {context} "
                f"needs {context + 1:,}: prepare more text or choose a shorter context"
            )
        self.order = SampleOrder(self.samples, seed)

    @property
    def targets(self) -> int:
        """Number of targets in an epoch."""
        return self.samples * self.context

    def batch(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the samples at `count` positions of the order, [count, context + 1] int64."""
        return self._read(self.order.indices(position, count))

    def windows(self, count: int, limit: int | None = None) -> Iterator[NDArray[np.int64]]:
        """Yield the samples once, in the order of the text, up to `count` at a time, [<= count, context + 1] int64.

        At most `limit` targets are read, rounded up to a whole sample, all of them without a limit.
        Raises `UserError` if a number is not positive.
        """
        if count < 1 or (limit is not None and limit < 1):
            raise UserError(f"windows of count {count}, limit {limit}: give whole numbers of at least 1")
        samples = self.samples if limit is None else min(self.samples, -(-limit // self.context))
        for start in range(0, samples, count):
            yield self._read(np.arange(start, min(start + count, samples)))

    def _read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        batch = np.empty((len(indices), self.context + 1), dtype=np.int64)
        for row, index in zip(batch, indices.tolist(), strict=True):
            row[:] = self._tokens[index * self.context : index * self.context + self.context + 1]
        return batch


def document_ids(tokens: NDArray[Any], end_of_text: int) -> NDArray[np.int64]:
    """Return the document that each position belongs to, counted from 0 in each row: [..., T] -> [..., T] int64.

    The end of text belongs to the document that it closes; the position after it starts the next one.
    """
    starts = np.zeros(tokens.shape, dtype=np.int64)
    starts[..., 1:] = tokens[..., :-1] == end_of_text
    return np.cumsum(starts, axis=-1)
