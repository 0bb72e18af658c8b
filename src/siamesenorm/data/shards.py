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
from numpy.typing import NDArray

from siamesenorm.data.encoding import EncodedChunk
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
    """Running counts and checksum of a split, and the ids that are in no shard yet."""

    def __init__(self, dtype: str, vocabulary: int) -> None:
        self.storage = np.dtype(STORAGE[dtype])
        self.shards: list[int] = []
        self.documents = self.bytes = 0
        self.pending: list[NDArray[Any]] = []
        self.pending_documents = self.pending_bytes = 0
        self._checksum = hashlib.sha256()
        self._counts = np.zeros(vocabulary, dtype=np.int64)

    @property
    def pending_tokens(self) -> int:
        return sum(map(len, self.pending))

    def add_shard(self, ids: NDArray[Any], documents: int, size: int) -> None:
        """Count a shard that is on the disk, and forget the pending ids."""
        self.shards.append(len(ids))
        self.documents += documents
        self.bytes += size
        self._checksum.update(ids.tobytes())
        self._counts += np.bincount(ids, minlength=len(self._counts))
        self.pending, self.pending_documents, self.pending_bytes = [], 0, 0

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
        self._pending_documents = 0
        self._partial = partial
        self._splits = {name: _SplitCounts(dtype, tokenizer.vocabulary) for name in SPLITS}
        for self._records in count():
            if not self._record_file.exists():
                break
            self._count_shards(json.loads(self._record_file.read_bytes()))

    @property
    def tokens(self) -> int:
        """Number of ids so far, in shards or pending."""
        return sum(sum(split.shards) + split.pending_tokens for split in self._splits.values())

    @property
    def documents_read(self) -> int:
        """Number of documents so far, in shards or pending."""
        return self.documents + self._pending_documents

    @property
    def _record_file(self) -> Path:
        return self._partial / f"{self._records:05d}.json"

    def _shard(self, name: str) -> Path:
        """Return the file of the next shard of a split."""
        return self._partial / SHARD_DIRECTORY / shard_file(name, len(self._splits[name].shards))

    def _count_shards(self, record: Mapping[str, Any]) -> None:
        """Read the shards of a record for counts and checksums."""
        for name, shard in record["splits"].items():
            file, split = self._shard(name), self._splits[name]
            if not file.exists() or file.stat().st_size != shard["tokens"] * split.storage.itemsize:
                raise UserError(f"{file}: its size is not that of its record: repeat the command, it starts again")
            split.add_shard(np.fromfile(file, dtype=split.storage), shard["documents"], shard["bytes"])
        self.documents += record["documents"]

    def append(self, chunk: EncodedChunk) -> None:
        """Add a chunk; it is kept in memory until there is enough for a shard."""
        for name, part in chunk.splits.items():
            split = self._splits[name]
            split.pending.append(part.ids.astype(split.storage))
            split.pending_documents += part.documents
            split.pending_bytes += part.bytes
        self._pending_documents += chunk.documents
        if sum(split.pending_tokens * split.storage.itemsize for split in self._splits.values()) >= SHARD_BYTES:
            self._write_shards()

    def _write_shards(self) -> None:
        """Write what is pending: a shard of each split that has something, then the record that makes them count."""
        record: dict[str, Any] = {"documents": self._pending_documents, "splits": {}}
        written = {}
        for name, split in self._splits.items():
            if split.pending:
                ids = np.concatenate(split.pending)
                write_atomically(self._shard(name), ids.tobytes())
                written[name] = ids
                counts = {"tokens": len(ids), "documents": split.pending_documents, "bytes": split.pending_bytes}
                record["splits"][name] = counts
        write_atomically(self._record_file, canonical_json(record))
        for name, ids in written.items():
            split = self._splits[name]
            split.add_shard(ids, split.pending_documents, split.pending_bytes)
        self.documents += self._pending_documents
        self._pending_documents = 0
        self._records += 1

    def finish(self, source: str, settings: Mapping[str, Any], directory: str) -> Manifest:
        """Write the last shards and return the manifest."""
        if self._pending_documents:
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
