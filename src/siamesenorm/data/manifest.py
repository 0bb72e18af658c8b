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

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
# Dtype names are little-endian on disk whatever the machine.
STORAGE = {"uint16": "<u2", "uint32": "<u4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One file of tokens: its name, its counts, its checksum."""

    file: str
    tokens: int
    """Ids in the file, ends of text included."""
    documents: int
    bytes: int
    """UTF-8 bytes of the text, without ends of text."""
    sha256: str


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
    unigram_entropy: float
    """Entropy of the ids of the train split, in nats per token: the loss of a model that knows only frequencies."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the data was prepared from and how: preparing again with the same settings does nothing."""

    @property
    def digest(self) -> str:
        """Identity of the data: sha256 of what defines the content; names and places do not."""
        tokenizer = asdict(self.tokenizer)
        del tokenizer["name"]
        splits = {name: asdict(split) for name, split in self.splits.items()}
        identity = {"schema": SCHEMA, "tokenizer": tokenizer, "dtype": self.dtype, "splits": splits}
        return hashlib.sha256(canonical_json(identity)).hexdigest()

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        tokenizer = asdict(self.tokenizer)
        if self.tokenizer.sha256 is None:
            del tokenizer["sha256"]
        record = {
            "schema": SCHEMA,
            "source": self.source,
            "tokenizer": tokenizer,
            "dtype": self.dtype,
            "splits": {name: asdict(split) for name, split in self.splits.items()},
            "unigram_entropy": self.unigram_entropy,
            "settings": self.settings,
            "digest": self.digest,
        }
        return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def canonical_json(value: object) -> bytes:
    """Return the one JSON text of a value: sorted keys, no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def read_manifest(path: Path) -> Manifest:
    """Read `manifest.json`.

    Raises `UserError` if it is no manifest of this schema, or if its fields do not give its digest.
    """
    try:
        record = json.loads(path.read_bytes())
        if record["schema"] != SCHEMA:
            raise UserError(f"{path}: schema {record['schema']!r}, this version reads {SCHEMA}: prepare the data again")
        manifest = Manifest(
            source=record["source"],
            tokenizer=TokenizerEntry(**record["tokenizer"]),
            dtype=record["dtype"],
            splits={name: Split(**split) for name, split in record["splits"].items()},
            unigram_entropy=float(record["unigram_entropy"]),
            settings=record.get("settings", {}),
        )
        if manifest.dtype not in STORAGE:
            raise UserError(f"{path}: dtype {manifest.dtype!r} is not one of {', '.join(STORAGE)}: prepare again")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: not a manifest of prepared data ({reason}): prepare the data again") from error
    if record.get("digest") != manifest.digest:
        raise UserError(f"{path}: its fields do not give its digest: it was edited or damaged, prepare again")
    return manifest
