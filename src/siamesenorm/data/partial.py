"""An unfinished preparation: token files that grow by whole chunks, and how to go on after a kill or finish.

OUT/.partial/settings.json    what is being prepared; an interrupted preparation goes on only with the same
OUT/.partial/tokenizer.json   the tokenizer in use (a BPE is trained once)
OUT/.partial/*.bin            the ids so far; what lies beyond the recorded length is cut off
OUT/.partial/progress.json    the lengths after the last whole chunk, replaced after every chunk
OUT/.partial/manifest.json    written when all is done: from here on files are only moved to OUT
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from siamesenorm.data.encoding import EncodedChunk, EncodedSplit
from siamesenorm.data.manifest import (
    MANIFEST_FILE,
    STORAGE,
    Manifest,
    Split,
    TokenizerEntry,
    canonical_json,
    read_manifest,
)
from siamesenorm.data.tokenizer import TOKENIZER_FILE, Tokenizer
from siamesenorm.errors import UserError
from siamesenorm.files import StoppedError, exclusive, move_durably, sync_directory, write_atomically

PARTIAL_DIRECTORY = ".partial"
SPLITS = ("train", "validation")
TOKEN_FILES = (*(f"{split}.bin" for split in SPLITS), TOKENIZER_FILE)
SETTINGS_FILE = "settings.json"
PROGRESS_FILE = "progress.json"
LOCK_FILE = "lock"
NOTHING = {"tokens": 0, "documents": 0, "bytes": 0}
READ_BYTES = 2**24


class SplitFile:
    """A growing file of ids with its running counts and checksum."""

    def __init__(self, path: Path, dtype: str, vocabulary: int, record: Mapping[str, int]) -> None:
        """Open the file at the length that `record` tells, and read what is there for counts and checksum."""
        self.path = path
        self.tokens, self.documents, self.bytes = (record[key] for key in ("tokens", "documents", "bytes"))
        self._checksum = hashlib.sha256()
        self._counts = np.zeros(vocabulary, dtype=np.int64)
        self._storage = np.dtype(STORAGE[dtype])
        length = self.tokens * self._storage.itemsize
        if length > (path.stat().st_size if path.exists() else 0):
            raise UserError(f"{path}: shorter than its record says: repeat the command, it starts again")
        # Unbuffered, so that no close can try again to write what a full disk refused.
        self._file: BinaryIO = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115
        self._file.truncate(length)
        while piece := self._file.read(READ_BYTES):
            self._account(piece)

    def append(self, part: EncodedSplit) -> None:
        """Add ids at the end, durably."""
        content = memoryview(part.ids.astype(self._storage).tobytes())
        written = 0
        while written < len(content):
            written += self._file.write(content[written:])
        os.fsync(self._file.fileno())
        self._account(content)
        self.tokens += len(part.ids)
        self.documents += part.documents
        self.bytes += part.bytes

    def _account(self, content: bytes | memoryview) -> None:
        self._checksum.update(content)
        ids = np.frombuffer(content, dtype=self._storage)
        self._counts += np.bincount(ids, minlength=len(self._counts))

    def record(self) -> dict[str, int]:
        """Return the counts from which the file can be opened again."""
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}

    def entropy(self) -> float:
        """Return the entropy of the ids, `-sum p ln p`, in nats."""
        shares = self._counts[self._counts > 0] / max(self.tokens, 1)
        return math.fsum(-share * math.log(share) for share in shares.tolist())

    def describe(self) -> Split:
        """Return the file's entry in the manifest."""
        return Split(file=self.path.name, **self.record(), sha256=self._checksum.hexdigest())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PartialData:
    """The token files of an unfinished preparation, opened where it stopped."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, dtype: str) -> None:
        self.tokenizer = tokenizer
        self.dtype = dtype
        self._progress = directory / PROGRESS_FILE
        record: dict[str, Any] = {"documents": 0, "splits": {name: NOTHING for name in SPLITS}}
        if self._progress.exists():
            record = json.loads(self._progress.read_bytes())
        self.documents: int = record["documents"]
        self.splits: dict[str, SplitFile] = {}
        with ExitStack() as opened:
            for name in SPLITS:
                path = directory / f"{name}.bin"
                self.splits[name] = SplitFile(path, dtype, tokenizer.vocabulary, record["splits"][name])
                opened.callback(self.splits[name].close)
            self.close = opened.pop_all().close

    def append(self, chunk: EncodedChunk) -> None:
        """Add a chunk; it counts only when its record is on the disk."""
        for name, part in chunk.splits.items():
            self.splits[name].append(part)
        self.documents += chunk.documents
        splits = {name: split.record() for name, split in self.splits.items()}
        write_atomically(self._progress, canonical_json({"documents": self.documents, "splits": splits}))

    def describe(self, source: str, settings: Mapping[str, Any]) -> Manifest:
        """Return the manifest of what is there."""
        return Manifest(
            source=source,
            tokenizer=TokenizerEntry(**self.tokenizer.to_manifest()),
            dtype=self.dtype,
            splits={name: split.describe() for name, split in self.splits.items()},
            unigram_entropy=self.splits["train"].entropy(),
            settings=settings,
        )


def publish(partial: Path, out: Path) -> None:
    """Move the files of a finished preparation to their place, the manifest last; may be repeated after a kill.

    Earlier data are replaced: their manifest goes first, so that it never stands beside files that are not its own.
    """
    if (out / MANIFEST_FILE).exists():
        (out / MANIFEST_FILE).unlink()
        sync_directory(out)
    if read_manifest(partial / MANIFEST_FILE).tokenizer.sha256 is None:
        (out / TOKENIZER_FILE).unlink(missing_ok=True)
    for name in (*TOKEN_FILES, MANIFEST_FILE):
        if (partial / name).exists():
            move_durably(partial / name, out / name)
    shutil.rmtree(partial)
    sync_directory(out)


def discard(partial: Path) -> None:
    """Remove an unfinished preparation but for its lock; what makes files count as whole goes first."""
    for name in (MANIFEST_FILE, PROGRESS_FILE, *TOKEN_FILES, SETTINGS_FILE):
        (partial / name).unlink(missing_ok=True)


def remove_remains(partial: Path) -> None:
    """Remove what a kill between the last move and the last removal left, unless another process is at work there."""
    if partial.exists():
        with suppress(StoppedError), exclusive(partial / LOCK_FILE):
            shutil.rmtree(partial)


def require_ours(out: Path) -> None:
    """Raise `UserError` if a directory holds files of our names that no preparation left there."""
    manifest = out / MANIFEST_FILE
    if (out / PARTIAL_DIRECTORY).exists() or (manifest.exists() and b'"unigram_entropy"' in manifest.read_bytes()):
        return
    for name in (MANIFEST_FILE, *TOKEN_FILES):
        if (out / name).exists():
            raise UserError(f"{out}: holds a {name} of another origin: remove it or choose another directory")
