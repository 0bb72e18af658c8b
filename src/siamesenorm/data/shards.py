"""The shards of a preparation: written atomically, resumed after the last whole one, published in one step.

OUT/.partial/settings.json            what is being prepared; it resumes only with the same settings
OUT/.partial/shards/tokenizer.json    the tokenizer in use (a BPE is trained once)
OUT/.partial/shards/train-00000.bin   ids; a shard of each split is filled at a time
OUT/.partial/00000.json               the counts of these shards, written after them: only now they count
OUT/.partial/manifest.json            written when all is done: then the shards are moved to OUT, and it after them
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data.encoding import EncodedChunk, EncodedSplit
from siamesenorm.data.manifest import (
    DIRECTORIES,
    MANIFEST_FILE,
    STORAGE,
    Manifest,
    Split,
    TokenizerEntry,
    canonical_json,
    read_manifest,
    shard_file,
)
from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import UserError
from siamesenorm.files import StoppedError, exclusive, move_durably, sync_directory, write_atomically

PARTIAL_DIRECTORY = ".partial"
SHARD_DIRECTORY = "shards"
SETTINGS_FILE = "settings.json"
LOCK_FILE = "lock"
SPLITS = ("train", "validation")
# Large enough that a corpus has some thousand files at most, and small enough to lose.
SHARD_BYTES = 2**24


class _SplitCounts:
    """Running counts and checksum of the shards of a split."""

    def __init__(self, vocabulary: int) -> None:
        self.shards: list[int] = []
        self.documents = self.bytes = 0
        self._checksum = hashlib.sha256()
        self._counts = np.zeros(vocabulary, dtype=np.int64)

    def add(self, shard: EncodedSplit) -> None:
        """Count a shard that is on the disk."""
        self.shards.append(len(shard.ids))
        self.documents += shard.documents
        self.bytes += shard.bytes
        self._checksum.update(shard.ids.tobytes())
        self._counts += np.bincount(shard.ids, minlength=len(self._counts))

    def entropy(self) -> float:
        """Return the entropy of the ids, `-sum p ln p`, in nats."""
        shares = self._counts[self._counts > 0] / max(sum(self.shards), 1)
        return math.fsum(-share * math.log(share) for share in shares.tolist())

    def describe(self) -> Split:
        """Return the split's entry in the manifest."""
        return Split(
            tokens=sum(self.shards),
            documents=self.documents,
            bytes=self.bytes,
            sha256=self._checksum.hexdigest(),
            shards=tuple(self.shards),
        )


class ShardWriter:
    """The shards of an unfinished preparation, opened after the last whole one.

    Raises `UserError` for a shard that does not have the size of its record.
    """

    def __init__(self, partial: Path, tokenizer: Tokenizer, dtype: str) -> None:
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.documents = 0
        self._partial = partial
        self._storage = np.dtype(STORAGE[dtype])
        self._splits = {name: _SplitCounts(tokenizer.vocabulary) for name in SPLITS}
        self._pending: list[EncodedChunk] = []
        for self._records in count():
            if not self._record_file.exists():
                break
            self._count_shards(json.loads(self._record_file.read_bytes()))

    @property
    def tokens(self) -> int:
        """Number of ids so far, in shards or in memory."""
        return sum(sum(split.shards) for split in self._splits.values()) + self._pending_tokens

    @property
    def documents_read(self) -> int:
        """Number of documents so far, in shards or in memory."""
        return self.documents + sum(chunk.documents for chunk in self._pending)

    @property
    def _pending_tokens(self) -> int:
        return sum(len(part.ids) for chunk in self._pending for part in chunk.splits.values())

    @property
    def _record_file(self) -> Path:
        return self._partial / f"{self._records:05d}.json"

    def _shard(self, name: str) -> Path:
        """Return the file of the next shard of a split."""
        return self._partial / SHARD_DIRECTORY / shard_file(name, len(self._splits[name].shards))

    def _count_shards(self, record: Mapping[str, Any]) -> None:
        """Read the shards of a record for counts and checksums."""
        for name, entry in record["splits"].items():
            file = self._shard(name)
            if not file.exists() or file.stat().st_size != entry["tokens"] * self._storage.itemsize:
                raise UserError(f"{file}: its size is not that of its record: repeat the command, it starts again")
            ids = np.fromfile(file, dtype=self._storage)
            self._splits[name].add(EncodedSplit(ids, entry["documents"], entry["bytes"]))
        self.documents += record["documents"]

    def append(self, chunk: EncodedChunk) -> None:
        """Add a chunk; it is kept in memory until there is enough for a shard."""
        self._pending.append(chunk)
        if self._pending_tokens * self._storage.itemsize >= SHARD_BYTES:
            self._write_shards()

    def _write_shards(self) -> None:
        """Write the chunks in memory: a shard of each split, then the record that makes them count."""
        shards = {}
        for name in SPLITS:
            if parts := [chunk.splits[name] for chunk in self._pending if name in chunk.splits]:
                ids = np.concatenate([part.ids for part in parts]).astype(self._storage)
                shards[name] = EncodedSplit(
                    ids, sum(part.documents for part in parts), sum(part.bytes for part in parts)
                )
                write_atomically(self._shard(name), ids.tobytes())
        documents = sum(chunk.documents for chunk in self._pending)
        entries = {
            name: {"tokens": len(shard.ids), "documents": shard.documents, "bytes": shard.bytes}
            for name, shard in shards.items()
        }
        write_atomically(self._record_file, canonical_json({"documents": documents, "splits": entries}))
        for name, shard in shards.items():
            self._splits[name].add(shard)
        self.documents += documents
        self._records += 1
        self._pending = []

    def finish(self, source: str, settings: Mapping[str, Any], directory: str) -> Manifest:
        """Write the last shards and return the manifest."""
        if self._pending:
            self._write_shards()
        return Manifest(
            source=source,
            directory=directory,
            tokenizer=TokenizerEntry(**self.tokenizer.to_manifest()),
            dtype=self.dtype,
            splits={name: split.describe() for name, split in self._splits.items()},
            unigram_entropy=self._splits["train"].entropy(),
            settings=settings,
        )


def has_shards(partial: Path) -> bool:
    """Return whether an unfinished preparation has a whole shard."""
    return (partial / f"{0:05d}.json").exists()


def free_directory(out: Path) -> str:
    """Return the name of a directory for shards that no data in use have."""
    with suppress(UserError):
        if (out / MANIFEST_FILE).exists() and read_manifest(out / MANIFEST_FILE).directory == DIRECTORIES[0]:
            return DIRECTORIES[1]
    return DIRECTORIES[0]


def publish(partial: Path, out: Path) -> None:
    """Move the shards of a finished preparation to their place, then the manifest; may be repeated after a kill.

    Earlier data are valid until the new manifest replaces theirs, and are removed after it.
    """
    target = out / read_manifest(partial / MANIFEST_FILE).directory
    if (partial / SHARD_DIRECTORY).exists():
        if target.exists():
            shutil.rmtree(target)
        move_durably(partial / SHARD_DIRECTORY, target)
    move_durably(partial / MANIFEST_FILE, out / MANIFEST_FILE)
    _remove_all_but(out, target.name)


def discard(partial: Path) -> None:
    """Remove an unfinished preparation but for its lock; what makes shards count is removed first."""
    records = sorted(partial.glob("[0-9]*.json"), reverse=True)
    for file in (partial / MANIFEST_FILE, *records):
        file.unlink(missing_ok=True)
    shutil.rmtree(partial / SHARD_DIRECTORY, ignore_errors=True)
    (partial / SETTINGS_FILE).unlink(missing_ok=True)


def remove_remains(out: Path, directory: str) -> None:
    """Remove what a kill left beside finished data, unless another process is writing there."""
    if (out / PARTIAL_DIRECTORY).exists():
        with suppress(StoppedError), exclusive(out / PARTIAL_DIRECTORY / LOCK_FILE):
            _remove_all_but(out, directory)


def _remove_all_but(out: Path, directory: str) -> None:
    # The partial directory last: while it exists, a later call removes the rest.
    for name in (*DIRECTORIES, PARTIAL_DIRECTORY):
        if name != directory and (out / name).exists():
            shutil.rmtree(out / name)
    sync_directory(out)


def require_ours(out: Path) -> None:
    """Raise `UserError` if a directory holds files of our names that no preparation left there."""
    manifest = out / MANIFEST_FILE
    if (out / PARTIAL_DIRECTORY).exists() or (manifest.exists() and b'"unigram_entropy"' in manifest.read_bytes()):
        return
    for name in (MANIFEST_FILE, *DIRECTORIES):
        if (out / name).exists():
            raise UserError(f"{out}: holds a {name} of another origin: remove it or choose another directory")
