"""The files of prepared data: shards of ids, written atomically, and the manifest, which is published last.

OUT/manifest.json                     what the data hold; a directory with a manifest is complete
OUT/shards/train-00000.bin            ids; new data are in OUT/shards-2 and replace old data in one step
OUT/shards/tokenizer.json             the tokenizer, unless it is `bytes`
OUT/.partial/settings.json            an unfinished preparation, which resumes only with the same settings
OUT/.partial/shards/...               its shards and its tokenizer (a BPE is trained once)
OUT/.partial/00000.json               counts of the shards of each split, written after them: only then they count
OUT/.partial/manifest.json            written when all is done: then the shards are moved to OUT, and it after them
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siamesenorm.errors import UserError
from siamesenorm.files import StoppedError, exclusive, move_durably, sync_directory, write_atomically

SCHEMA = 2
# The digest is part of a run's identity: it does not depend on how tokens are stored.
DIGEST_SCHEMA = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
# Dtype names are little-endian on disk whatever the machine.
STORAGE = {"uint16": "<u2", "uint32": "<u4"}
DIRECTORIES = ("shards", "shards-2")
SPLITS = ("train", "validation")

PARTIAL_DIRECTORY = ".partial"
SHARD_DIRECTORY = DIRECTORIES[0]
SETTINGS_FILE = "settings.json"
LOCK_FILE = "lock"
# Large enough that a corpus has some thousand files at most, and small enough to lose.
SHARD_BYTES = 2**24


# --- the manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The tokens of a split: counts, checksum, and the shards that hold them."""

    tokens: int
    """Number of ids, ends of text included."""
    documents: int
    bytes: int
    """UTF-8 bytes of the text, without ends of text."""
    sha256: str
    """Checksum of the ids of all shards, one after another."""
    shards: tuple[int, ...]
    """Number of ids in each shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerEntry:
    """The tokenizer that made the ids."""

    kind: str
    name: str
    vocabulary: int
    end_of_text: int
    sha256: str | None = None
    """Checksum of `tokenizer.json`, None for a tokenizer without a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a directory of prepared data holds."""

    source: str
    tokenizer: TokenizerEntry
    dtype: str
    splits: Mapping[str, Split]
    directory: str = DIRECTORIES[0]
    """Directory of the shards and of the tokenizer's file."""
    unigram_entropy: float
    """Entropy of the ids of the train split, in nats per token: the loss of a model of their frequencies alone."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Sources and settings of the preparation: preparing again with the same settings does nothing."""

    @property
    def digest(self) -> str:
        """Identity of the data: sha256 of what defines the content, without names and paths."""
        tokenizer = asdict(self.tokenizer)
        del tokenizer["name"]
        # The name of a file is a frozen part of the digest.
        splits: dict[str, Any] = {name: {"file": f"{name}.bin", **asdict(each)} for name, each in self.splits.items()}
        for split in splits.values():
            del split["shards"]
        identity = {"schema": DIGEST_SCHEMA, "tokenizer": tokenizer, "dtype": self.dtype, "splits": splits}
        return hashlib.sha256(canonical_json(identity)).hexdigest()

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        record = {"schema": SCHEMA, **asdict(self), "digest": self.digest}
        return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def id_dtype(vocabulary: int) -> str:
    """Return the name of the smallest dtype for the ids of a vocabulary."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def shard_file(split: str, number: int) -> str:
    """Return the name of a shard."""
    return f"{split}-{number:05d}.bin"


def canonical_json(value: object) -> bytes:
    """Return the JSON text of a value with sorted keys and no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def read_manifest(path: Path) -> Manifest:
    """Read `manifest.json`.

    Raises `UserError` if it is no manifest of this schema, or if its fields contradict each other.
    """
    try:
        record = json.loads(path.read_bytes())
        schema, digest = record.pop("schema"), record.pop("digest")
        if schema != SCHEMA:
            raise UserError(f"{path}: schema {schema!r}, this version reads {SCHEMA}: prepare again with --restart")
        splits = {name: Split(**{**each, "shards": tuple(each["shards"])}) for name, each in record["splits"].items()}
        manifest = Manifest(**{**record, "tokenizer": TokenizerEntry(**record["tokenizer"]), "splits": splits})
        consistent = all(sum(split.shards) == split.tokens for split in splits.values())
        consistent &= manifest.dtype in STORAGE and manifest.directory in DIRECTORIES and digest == manifest.digest
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: not a manifest of prepared data ({cause}): prepare the data again") from error
    if not consistent:
        raise UserError(f"{path}: its fields contradict each other: it was edited or damaged, prepare again")
    return manifest


# --- shards of an unfinished preparation


@dataclass(frozen=True, slots=True)
class EncodedSplit:
    """Consecutive documents of one split: their ids with the ends of text, and the size of their text."""

    ids: NDArray[Any]
    documents: int
    bytes: int


class ShardWriter:
    """The shards of an unfinished preparation, opened after the last complete one.

    `documents` and `tokens` count what was appended, by earlier processes too.
    """

    def __init__(self, partial: Path, tokenizer: TokenizerEntry) -> None:
        self.documents = self.tokens = 0
        self._partial, self._tokenizer = partial, tokenizer
        self._dtype = id_dtype(tokenizer.vocabulary)
        self._pending: dict[str, list[EncodedSplit]] = {}
        self._pending_tokens = 0
        # For each write, the counts of a shard of each split.
        self._records = [json.loads(file.read_bytes())["splits"] for file in _record_files(partial)]
        for entry in (entry for record in self._records for entry in record.values()):
            self.documents += entry["documents"]
            self.tokens += entry["tokens"]

    def append(self, splits: Mapping[str, EncodedSplit]) -> None:
        """Add documents; they are kept in memory until there is enough for a shard."""
        for name, part in splits.items():
            self._pending.setdefault(name, []).append(part)
            self._pending_tokens += len(part.ids)
            self.documents += part.documents
            self.tokens += len(part.ids)
        if self._pending_tokens * np.dtype(self._dtype).itemsize >= SHARD_BYTES:
            self._write_shards()

    def _write_shards(self) -> None:
        """Write the documents in memory: a shard of each split, then the record that makes them count."""
        record = {}
        for name, parts in self._pending.items():
            ids = np.concatenate([part.ids for part in parts]).astype(STORAGE[self._dtype])
            write_atomically(self._shard(name, len(self._entries(name))), ids.tobytes())
            record[name] = {
                "tokens": len(ids),
                "documents": sum(part.documents for part in parts),
                "bytes": sum(part.bytes for part in parts),
            }
        write_atomically(self._partial / f"{len(self._records):05d}.json", canonical_json({"splits": record}))
        self._records.append(record)
        self._pending, self._pending_tokens = {}, 0

    def _entries(self, name: str) -> list[dict[str, int]]:
        return [record[name] for record in self._records if name in record]

    def _shard(self, name: str, number: int) -> Path:
        return self._partial / SHARD_DIRECTORY / shard_file(name, number)

    def finish(self, source: str, settings: Mapping[str, Any]) -> Manifest:
        """Write the last shards, read all of them for checksums and entropy, and return the manifest.

        Raises `UserError` for a shard that does not have the size in its record.
        """
        if self._pending:
            self._write_shards()
        counts = {name: np.zeros(self._tokenizer.vocabulary, dtype=np.int64) for name in SPLITS}
        splits = {name: self._describe(name, counts[name]) for name in SPLITS}
        shares = counts["train"][counts["train"] > 0] / splits["train"].tokens
        return Manifest(
            source=source,
            directory=_free_directory(self._partial.parent),
            tokenizer=self._tokenizer,
            dtype=self._dtype,
            splits=splits,
            unigram_entropy=math.fsum(-share * math.log(share) for share in shares.tolist()),
            settings=settings,
        )

    def _describe(self, name: str, counts: NDArray[np.int64]) -> Split:
        """Return the split's entry in the manifest, and add how often each id occurs to `counts`."""
        checksum = hashlib.sha256()
        entries = self._entries(name)
        for number, entry in enumerate(entries):
            file = self._shard(name, number)
            ids = np.fromfile(file, STORAGE[self._dtype]) if file.exists() else np.empty(0)
            if len(ids) != entry["tokens"]:
                raise UserError(f"{file}: its size is not that of its record: repeat the command, it starts again")
            checksum.update(ids.tobytes())
            counts += np.bincount(ids, minlength=len(counts))
        return Split(
            tokens=sum(entry["tokens"] for entry in entries),
            documents=sum(entry["documents"] for entry in entries),
            bytes=sum(entry["bytes"] for entry in entries),
            sha256=checksum.hexdigest(),
            shards=tuple(entry["tokens"] for entry in entries),
        )


def _record_files(partial: Path) -> list[Path]:
    return sorted(partial.glob("[0-9]*.json"), key=lambda file: int(file.stem))


# --- from an unfinished preparation to data in their place


def complete(out: Path, settings: Mapping[str, Any], encode: Callable[[Path], Manifest], *, restart: bool) -> None:
    """Complete the data with these settings in a directory; nothing is done where they are complete.

    `encode(partial)` writes, or completes, the shards and returns their manifest. A preparation that fails is removed
    unless it can be resumed: after a `StoppedError`, not after bad input, for another input starts again.
    Raises `UserError` if the directory has data with other settings, and no `restart` replaces them.
    """
    partial = out / PARTIAL_DIRECTORY
    under_way = partial / SETTINGS_FILE
    _require_ours(out)
    if (out / MANIFEST_FILE).exists() and not restart:
        finished = read_manifest(out / MANIFEST_FILE)
        resumes = under_way.exists() and json.loads(under_way.read_bytes()) == settings
        if finished.settings == settings or not resumes:
            _require_same(out, finished.settings, settings)
            if partial.exists():  # a kill left it, or another process writes there
                with suppress(StoppedError), exclusive(partial / LOCK_FILE):
                    _remove_all_but(out, finished.directory)
            return
    made = [directory for directory in (out, *out.parents) if not directory.exists()]
    partial.mkdir(parents=True, exist_ok=True)
    with exclusive(partial / LOCK_FILE):
        if restart:
            _discard(partial)
        if under_way.exists():
            _require_same(out, json.loads(under_way.read_bytes()), settings)
        else:
            write_atomically(under_way, canonical_json(settings))
        try:
            if not (partial / MANIFEST_FILE).exists():
                write_atomically(partial / MANIFEST_FILE, encode(partial).to_json())
        except UserError as error:
            if not isinstance(error, StoppedError) or not _record_files(partial):
                shutil.rmtree(partial)
                with suppress(OSError):  # another process may have put something there
                    for directory in made:
                        directory.rmdir()
            raise
        _publish(partial, out)


def _require_ours(out: Path) -> None:
    """Raise `UserError` if a directory holds files of our names that no preparation left there."""
    manifest = out / MANIFEST_FILE
    if (out / PARTIAL_DIRECTORY).exists() or (manifest.exists() and b'"unigram_entropy"' in manifest.read_bytes()):
        return
    for name in (MANIFEST_FILE, *DIRECTORIES):
        if (out / name).exists():
            raise UserError(f"{out}: holds a {name} of another origin: remove it or choose another directory")


def _require_same(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `UserError` if a directory belongs to a preparation with other settings."""
    if before != now:
        different = [name for name in now if before.get(name) != now[name]] or ["an older version"]
        raise UserError(
            f"{out}: holds data prepared with other settings (different: {', '.join(different)}): choose another "
            "directory, or replace it with --restart"
        )


def _free_directory(out: Path) -> str:
    """Return the name of a directory for shards that no data in use have."""
    with suppress(UserError):
        if (out / MANIFEST_FILE).exists() and read_manifest(out / MANIFEST_FILE).directory == DIRECTORIES[0]:
            return DIRECTORIES[1]
    return DIRECTORIES[0]


def _publish(partial: Path, out: Path) -> None:
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


def _discard(partial: Path) -> None:
    """Remove an unfinished preparation but for its lock; what makes shards count is removed first."""
    for file in (partial / MANIFEST_FILE, *reversed(_record_files(partial))):
        file.unlink(missing_ok=True)
    shutil.rmtree(partial / SHARD_DIRECTORY, ignore_errors=True)
    (partial / SETTINGS_FILE).unlink(missing_ok=True)


def _remove_all_but(out: Path, directory: str) -> None:
    # The partial directory last: while it exists, a later call removes the rest.
    for name in (*DIRECTORIES, PARTIAL_DIRECTORY):
        if name != directory and (out / name).exists():
            shutil.rmtree(out / name)
    sync_directory(out)
