"""The manifest of prepared data: what its files hold, and the digest that is the data's identity.

The manifest is written last: a directory that has one is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError

SCHEMA = 2
# The digest is part of a run's identity: it does not depend on how tokens are stored.
DIGEST_SCHEMA = 1
MANIFEST_FILE = "manifest.json"
# Dtype names are little-endian on disk whatever the machine.
STORAGE = {"uint16": "<u2", "uint32": "<u4"}
# Two names, so that new data replace old data in one step: the replacement of the manifest.
DIRECTORIES = ("shards", "shards-2")


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
    """Which tokenizer made the ids."""

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
        """Identity of the data: sha256 of what defines the content; names and places do not."""
        tokenizer = asdict(self.tokenizer)
        del tokenizer["name"]
        splits = {name: _identity(name, split) for name, split in self.splits.items()}
        identity = {"schema": DIGEST_SCHEMA, "tokenizer": tokenizer, "dtype": self.dtype, "splits": splits}
        return hashlib.sha256(canonical_json(identity)).hexdigest()

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        record = {"schema": SCHEMA, **asdict(self), "digest": self.digest}
        return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _identity(name: str, split: Split) -> dict[str, Any]:
    """Return what the digest contains of a split; the name of a file is a frozen part of it."""
    fields = asdict(split)
    del fields["shards"]
    return {"file": f"{name}.bin", **fields}


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
        splits = {
            name: Split(**{**split, "shards": tuple(split["shards"])}) for name, split in record["splits"].items()
        }
        manifest = Manifest(**{**record, "tokenizer": TokenizerEntry(**record["tokenizer"]), "splits": splits})
        whole = all(sum(split.shards) == split.tokens for split in splits.values())
        whole = whole and digest == manifest.digest and manifest.dtype in STORAGE and manifest.directory in DIRECTORIES
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: not a manifest of prepared data ({reason}): prepare the data again") from error
    if not whole:
        raise UserError(f"{path}: its fields contradict each other: it was edited or damaged, prepare again")
    return manifest
