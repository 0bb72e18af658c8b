"""Text to prepared data: documents are read, encoded in parallel, and appended to token files chunk by chunk.

A preparation may be killed at any moment: repeated, it goes on after the last whole chunk and ends with the same
bytes. The corpus is never in memory, only the chunks under way and the sample that a BPE is trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from siamesenorm.data.encoding import Chunk, Encoder, Role, encode_chunks, is_validation
from siamesenorm.data.formats import Cut
from siamesenorm.data.manifest import MANIFEST_FILE, canonical_json, read_manifest
from siamesenorm.data.partial import PARTIAL_DIRECTORY, PartialData, discard, publish
from siamesenorm.data.progress import Progress, Report
from siamesenorm.data.sources import BuiltinSource, Source, open_source
from siamesenorm.data.storage import StoppedError, room_expected, write_atomically
from siamesenorm.data.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    LibraryTokenizer,
    Tokenizer,
    bpe_size,
    load_tokenizer,
    train_bpe,
)
from siamesenorm.data.tokens import PreparedData
from siamesenorm.errors import UserError

# Raised by hand whenever the same settings would give other bytes.
PROCEDURE = 1
# A chunk is large enough that writing it durably costs nothing, and small enough to lose.
CHUNK_CHARACTERS = 4_000_000
BPE_SAMPLE_CHARACTERS = 64_000_000
# Below it, one process has finished before others have started.
SMALL_SOURCE_BYTES = 4_000_000
SETTINGS_FILE = "settings.json"
TOKEN_FILES = ("train.bin", "validation.bin", TOKENIZER_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """What to prepare, and where to."""

    source: str
    """Text: `builtin`, a .txt, .jsonl or .parquet file (.gz too), a directory or a glob of them, or a dataset on the
    Hugging Face Hub as `hf:OWNER/NAME?name=CONFIG&split=train`."""

    out: Path
    """Directory to write."""

    tokenizer: str = "bytes"
    """`bytes`, `bpe:4096` (trained on the text), a tokenizer JSON file, or a name on the Hugging Face Hub."""

    validation: str | None = None
    """Source of the validation split; without it, a fraction of the documents."""

    validation_fraction: float | None = None
    """Fraction of the documents that become the validation split, chosen by their hash: 0.01 if not given (0.04 of the
    small builtin corpus)."""

    text_field: str = "text"
    """Field (or column) that holds the text."""

    documents: Cut = "passages"
    """Documents of a plain text file: passages of about 30,000 characters, or its paragraphs."""

    end_of_text: str | None = None
    """Token that closes a document; found by its usual names if not given."""

    max_documents: int | None = None
    """Read at most so many documents of the source."""

    workers: int | None = None
    """Processes that encode; chosen by the size of the source if not given."""

    restart: bool = False
    """Throw away what an earlier preparation left in the directory."""


def prepare(config: PrepareConfig, report: Report | None = None) -> PreparedData:
    """Prepare a source and return the data; already prepared with the same settings, it is returned at once.

    Raises `UserError` for bad settings and bad input, leaving nothing behind, and `StoppedError` (a full disk, a
    lost worker, a broken connection) after which the same call goes on where it stopped.
    """
    job = _Job(config, report or (lambda progress: None))
    out = config.out
    if config.restart:
        _require_ours(out)
        discard(out)
    if (out / MANIFEST_FILE).exists():
        _require_same(out, read_manifest(out / MANIFEST_FILE).settings, job.settings)
    else:
        _require_ours(out)
        with room_expected(out):
            job.run()
    shutil.rmtree(out / PARTIAL_DIRECTORY, ignore_errors=True)
    return PreparedData.open(out)


class _Job:
    """One preparation: the resolved configuration and the steps from nothing, or from a partial one, to the data."""

    def __init__(self, config: PrepareConfig, report: Report) -> None:
        _check(config)
        self.config = config
        self.report = report
        self.source = _open(config, config.source)
        self.validation = None if config.validation is None else _open(config, config.validation)
        default = 0.04 if config.source == "builtin" else 0.01
        self.fraction = default if config.validation_fraction is None else config.validation_fraction
        self.settings = self._settings()

    def _settings(self) -> dict[str, Any]:
        """Return everything that the bytes of the result depend on."""
        config = self.config
        return {
            "procedure": PROCEDURE,
            "source": self.source.fingerprint(),
            "max_documents": config.max_documents,
            "validation": self.fraction if self.validation is None else self.validation.fingerprint(),
            "tokenizer": _tokenizer_identity(config.tokenizer),
            "end_of_text": config.end_of_text,
        }

    def run(self) -> None:
        """Do what is left to do."""
        partial = self.config.out / PARTIAL_DIRECTORY
        with _directory(partial), _only_one(partial):
            settings = partial / SETTINGS_FILE
            if settings.exists():
                _require_same(self.config.out, json.loads(settings.read_bytes()), self.settings)
            else:
                write_atomically(settings, canonical_json(self.settings))
            if not (partial / MANIFEST_FILE).exists():
                self._encode(partial)
            publish(partial, self.config.out)

    def _encode(self, partial: Path) -> None:
        """Encode all that is not encoded yet, and write the manifest beside it."""
        tokenizer = self._tokenizer(partial)
        dtype = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
        data = PartialData(partial, tokenizer, dtype)
        try:
            chunks = cut_chunks(self._streams(), CHUNK_CHARACTERS, skip=data.documents)
            encoder = Encoder(tokenizer, dtype, self.fraction)
            for chunk in encode_chunks(chunks, encoder, self._workers(tokenizer)):
                data.append(chunk)
                self._report("tokens", data)
            self._require_documents(data)
            manifest = data.describe(self.source.name, self.settings)
        finally:
            data.close()
        write_atomically(partial / MANIFEST_FILE, manifest.to_json())

    def _streams(self) -> Iterator[tuple[Role, str]]:
        """Yield every document with its role: first a validation source, then the source itself."""
        if self.validation is not None:
            yield from (("validation", text) for text in self.validation.documents())
        role: Role = "mixed" if self.validation is None else "train"
        yield from ((role, text) for text in islice(self.source.documents(), self.config.max_documents))

    def _tokenizer(self, partial: Path) -> Tokenizer:
        """Return the tokenizer; its file is kept, so that a BPE is trained, and the Hub asked, only once."""
        config, kept = self.config, partial / TOKENIZER_FILE
        name = config.tokenizer
        if kept.exists():
            name = Path(name).stem if Path(name).is_file() else name
            return LibraryTokenizer(name, kept.read_bytes(), config.end_of_text)
        size = bpe_size(config.tokenizer)
        if size is None:
            tokenizer = load_tokenizer(config.tokenizer, config.end_of_text)
        else:
            self.report(Progress(stage="tokenizer"))
            tokenizer = train_bpe(self._training_sample(), size)
        content = tokenizer.to_json()
        if content is not None:
            write_atomically(kept, content)
        return tokenizer

    def _training_sample(self) -> Iterator[str]:
        """Yield the first documents of the train split, as many as a BPE is trained on."""
        characters = 0
        for role, text in self._streams():
            if role == "train" or (role == "mixed" and not is_validation(text, self.fraction)):
                yield text
                characters += len(text)
                if characters >= BPE_SAMPLE_CHARACTERS:
                    return

    def _workers(self, tokenizer: Tokenizer) -> int:
        """Return the number of processes: one where starting more would cost more than they save."""
        if self.config.workers is not None:
            return self.config.workers
        size = self.source.size
        small = isinstance(self.source, BuiltinSource) or (size is not None and size < SMALL_SOURCE_BYTES)
        if small or isinstance(tokenizer, ByteTokenizer):
            return 1
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def _report(self, stage: str, data: PartialData) -> None:
        sources = [source for source in (self.validation, self.source) if source is not None]
        sizes = [source.size for source in sources]
        self.report(
            Progress(
                stage=stage,
                documents=data.documents,
                tokens=sum(split.tokens for split in data.splits.values()),
                position=sum(source.position for source in sources),
                size=None if None in sizes else sum(size for size in sizes if size is not None),
            )
        )

    def _require_documents(self, data: PartialData) -> None:
        """Raise `UserError` if a split got no document."""
        if data.splits["train"].documents == 0:
            raise UserError(f"source {self.config.source!r}: no document for the train split: give more text")
        if data.splits["validation"].documents == 0:
            enough = min(0.5, max(0.02, 3 / data.documents))
            raise UserError(
                f"source {self.config.source!r}: none of its {data.documents:,} documents fell into the validation "
                f"split: try --validation-fraction {enough:.2g}, --documents paragraphs, or give --validation"
            )


def cut_chunks(stream: Iterable[tuple[Role, str]], characters: int, skip: int) -> Iterator[Chunk]:
    """Yield a stream of documents in chunks of one role and about so many characters, without the first `skip`."""
    texts: list[str] = []
    length, current = 0, None
    for role, text in islice(stream, skip, None):
        if current is not None and (role != current or length >= characters):
            yield Chunk(current, texts)
            texts, length = [], 0
        current = role
        texts.append(text)
        length += len(text)
    if current is not None:
        yield Chunk(current, texts)


def _check(config: PrepareConfig) -> None:
    """Raise `UserError` for numbers that make no sense, before anything is read or written."""
    fraction = config.validation_fraction
    if fraction is not None and not 0 < fraction < 1:
        raise UserError(f"validation fraction {fraction}: must lie between 0 and 1, as in 0.01")
    if fraction is not None and config.validation is not None:
        raise UserError(f"validation fraction {fraction} and validation {config.validation!r}: give one of the two")
    for what, number in (("workers", config.workers), ("max documents", config.max_documents)):
        if number is not None and number < 1:
            raise UserError(f"{what} {number}: must be at least 1")
    if config.out.exists() and not config.out.is_dir():
        raise UserError(f"{config.out}: is a file: give a directory to write to")


def _open(config: PrepareConfig, spec: str) -> Source:
    return open_source(spec, text_field=config.text_field, cut=config.documents)


def _tokenizer_identity(spec: str) -> str:
    """Return a name that stays the same as long as the tokenizer does: for a file, its checksum."""
    path = Path(spec)
    if bpe_size(spec) is None and path.is_file():
        return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return spec


def _require_ours(out: Path) -> None:
    """Raise `UserError` if a directory holds token files that no preparation of ours left there."""
    if (out / MANIFEST_FILE).exists() or (out / PARTIAL_DIRECTORY).exists():
        return
    for name in TOKEN_FILES:
        if (out / name).exists():
            raise UserError(f"{out}: holds a {name} of another origin: choose another directory")


def _require_same(out: Path, before: Any, now: dict[str, Any]) -> None:
    """Raise `UserError` if a directory belongs to a preparation with other settings."""
    if before == now:
        return
    different = [name for name in now if before.get(name) != now[name]] or ["an older version"]
    raise UserError(
        f"{out}: holds data prepared with other settings (different: {', '.join(different)}): choose another "
        "directory, or replace it with --restart"
    )


@contextmanager
def _directory(partial: Path) -> Iterator[None]:
    """Make the directory of a preparation; remove it again if the input was bad, for a cure is another input."""
    out = partial.parent
    missing = [directory for directory in (out, *out.parents) if not directory.exists()]
    partial.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except StoppedError:
        raise
    except UserError:
        shutil.rmtree(partial, ignore_errors=True)
        for directory in missing:
            with suppress(OSError):
                directory.rmdir()
        raise


@contextmanager
def _only_one(partial: Path) -> Iterator[None]:
    """Hold the directory against a second process that would prepare into it; a killed holder lets go."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with open(partial / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoppedError(f"{partial.parent}: another process is preparing it: wait for its end") from error
        yield
