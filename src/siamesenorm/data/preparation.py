"""Text to prepared data: documents are read, encoded in parallel, and appended to token files chunk by chunk.

A preparation may be killed at any moment: repeated, it goes on after the last whole chunk and ends with the same
bytes. The corpus is never in memory, only the chunks under way and the sample that a BPE is trained on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from siamesenorm.data.config import PrepareConfig
from siamesenorm.data.encoding import Chunk, Encoder, Role, encode_chunks, is_validation
from siamesenorm.data.manifest import MANIFEST_FILE, canonical_json, read_manifest
from siamesenorm.data.partial import (
    LOCK_FILE,
    PARTIAL_DIRECTORY,
    PROGRESS_FILE,
    SETTINGS_FILE,
    PartialData,
    discard,
    publish,
    remove_remains,
    require_ours,
)
from siamesenorm.data.progress import PrepareProgress, Report
from siamesenorm.data.sources import BuiltinSource, Source, open_source
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
from siamesenorm.files import StoppedError, disk_errors, exclusive, write_atomically

# Raised by hand whenever the same settings would give other bytes.
PROCEDURE = 1
# A chunk is large enough that writing it durably costs nothing, and small enough to lose.
CHUNK_CHARACTERS = 2_000_000
BPE_SAMPLE_CHARACTERS = 64_000_000
# Enough to tell a text of a few documents, or of copies, from one whose fraction is too small.
DISTINCT_SAMPLE = 1000
LARGEST_FRACTION = 0.5
# Below it, one process has finished before others have started.
SMALL_SOURCE_BYTES = 4_000_000


def prepare(config: PrepareConfig, report: Report | None = None) -> PreparedData:
    """Prepare a source and return the data; already prepared with the same settings, it is returned at once.

    Raises `UserError` for bad settings and bad input, leaving nothing behind, and `StoppedError` (a full disk, a
    lost worker, a broken connection) after which the same call goes on where it stopped.
    """
    out = config.out
    with disk_errors(out):
        job = _Job(config, report or (lambda progress: None))
        require_ours(out)
        finished = None if config.restart or not (out / MANIFEST_FILE).exists() else read_manifest(out / MANIFEST_FILE)
        if finished is None or (finished.settings != job.settings and job.is_under_way()):
            job.run()
        else:
            _require_same(out, finished.settings, job.settings)
            remove_remains(out / PARTIAL_DIRECTORY)
        return PreparedData.open(out)


class _Job:
    """One preparation: the resolved configuration and the steps from nothing, or from a partial one, to the data."""

    def __init__(self, config: PrepareConfig, report: Report) -> None:
        self.config = config
        self.report = report
        self.source = _open(config, config.source)
        self.validation = None if config.validation is None else _open(config, config.validation)
        default = 0.04 if config.source == "builtin" else 0.01
        self.fraction = default if config.validation_fraction is None else config.validation_fraction
        self.bpe_size = bpe_size(config.tokenizer)
        # One that lies here is read at once; one to be trained or fetched waits until it is sure to be needed.
        here = config.tokenizer == "bytes" or Path(config.tokenizer).exists()
        self.tokenizer = load_tokenizer(config.tokenizer, config.end_of_text) if here else None
        self.settings = self._settings()

    def _settings(self) -> dict[str, Any]:
        """Return everything that the bytes of the result depend on; what lies here by content, not by place."""
        config = self.config
        tokenizer: object = config.tokenizer
        if self.tokenizer is not None and config.tokenizer != "bytes":
            tokenizer = {**self.tokenizer.to_manifest(), "name": None}
        return {
            "procedure": PROCEDURE,
            "source": self.source.fingerprint(),
            "max_documents": config.max_documents,
            "validation": self.fraction if self.validation is None else self.validation.fingerprint(),
            "tokenizer": tokenizer,
            "end_of_text": config.end_of_text,
        }

    def is_under_way(self) -> bool:
        """Whether an earlier process began this very preparation and was kept from its end."""
        settings = self.config.out / PARTIAL_DIRECTORY / SETTINGS_FILE
        return settings.exists() and bool(json.loads(settings.read_bytes()) == self.settings)

    def run(self) -> None:
        """Do what is left to do."""
        out, partial = self.config.out, self.config.out / PARTIAL_DIRECTORY
        made = [directory for directory in (out, *out.parents) if not directory.exists()]
        partial.mkdir(parents=True, exist_ok=True)
        with exclusive(partial / LOCK_FILE):
            if self.config.restart:
                discard(partial)
            settings = partial / SETTINGS_FILE
            if settings.exists():
                _require_same(out, json.loads(settings.read_bytes()), self.settings)
            else:
                write_atomically(settings, canonical_json(self.settings))
            if not (partial / MANIFEST_FILE).exists():
                with _removed_unless_useful(partial, made):
                    self._encode(partial)
            publish(partial, out)

    def _encode(self, partial: Path) -> None:
        """Encode all that is not encoded yet, and write the manifest beside it."""
        tokenizer = self._tokenizer(partial)
        dtype = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
        data = PartialData(partial, tokenizer, dtype)
        try:
            if data.documents:
                self._report("resumed", data, 0)
            chunks = self._chunks(skip=data.documents)
            encoder = Encoder(tokenizer, dtype, self.fraction)
            with closing(encode_chunks(chunks, encoder, self._workers(tokenizer))) as encoded:
                for chunk in encoded:
                    data.append(chunk)
                    self._report("tokens", data, chunk.position)
            self._require_documents(data)
            manifest = data.describe(self.source.name, self.settings)
        finally:
            data.close()
        write_atomically(partial / MANIFEST_FILE, manifest.to_json())

    def _chunks(self, skip: int) -> Iterator[Chunk]:
        """Yield the documents in chunks of one role and a certain length, without the first `skip` documents."""
        texts: list[str] = []
        length, position = 0, 0
        current: Role = "mixed"
        for role, text in islice(self._streams(), skip, None):
            if texts and (role != current or length >= CHUNK_CHARACTERS):
                yield Chunk(current, texts, position)
                texts, length = [], 0
            texts.append(text)
            length += len(text)
            current, position = role, sum(source.position for source in self._sources())
        if texts:
            yield Chunk(current, texts, position)

    def _streams(self) -> Iterator[tuple[Role, str]]:
        """Yield every document with its role: first a validation source, then the source itself."""
        if self.validation is not None:
            yield from (("validation", text) for text in self.validation.documents())
        role: Role = "mixed" if self.validation is None else "train"
        yield from ((role, text) for text in islice(self.source.documents(), self.config.max_documents))

    def _tokenizer(self, partial: Path) -> Tokenizer:
        """Return the tokenizer; its file is kept, so that a BPE is trained, and the Hub asked, only once."""
        config, kept = self.config, partial / TOKENIZER_FILE
        tokenizer = self.tokenizer
        if tokenizer is None and kept.exists():
            tokenizer = LibraryTokenizer(config.tokenizer, kept.read_bytes(), config.end_of_text)
        elif self.bpe_size is not None:
            self.report(PrepareProgress(stage="training the tokenizer"))
            tokenizer = train_bpe(self._training_sample(), self.bpe_size, config.end_of_text)
        elif tokenizer is None:
            tokenizer = load_tokenizer(config.tokenizer, config.end_of_text)
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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # On few cores the threads of the tokenizers library keep them all busy; its encodings of many cores wait
        # for the one process that turns them into arrays.
        return 1 if small or cores < 4 or isinstance(tokenizer, ByteTokenizer) else cores

    def _sources(self) -> list[Source]:
        return [source for source in (self.validation, self.source) if source is not None]

    def _report(self, stage: str, data: PartialData, position: int) -> None:
        sizes = [source.size for source in self._sources() if source.size is not None]
        self.report(
            PrepareProgress(
                stage=stage,
                documents=data.documents,
                tokens=sum(split.tokens for split in data.splits.values()),
                position=position,
                size=sum(sizes) if len(sizes) == len(self._sources()) else None,
            )
        )

    def _require_documents(self, data: PartialData) -> None:
        """Raise `UserError` if a split got no document."""
        if data.splits["train"].documents == 0:
            raise UserError(f"source {self.config.source!r}: no document for the train split: give more text")
        if data.splits["validation"].documents == 0:
            if self.validation is not None:
                raise UserError(f"validation {self.config.validation!r}: holds no document: give more text")
            raise self._no_validation_document(data.documents)

    def _no_validation_document(self, documents: int) -> UserError:
        """Return the error for a validation split that got nothing, with the remedies that can work here."""
        distinct = len(dict.fromkeys(text for _, text in islice(self._streams(), DISTINCT_SAMPLE)))
        copies = distinct < min(documents, DISTINCT_SAMPLE)
        remedies = []
        fraction = min(LARGEST_FRACTION, max(0.02, 3 / distinct, 2 * self.fraction))
        if distinct > 1 and fraction > self.fraction:
            remedies.append(f"--validation-fraction {fraction:.2g}")
        if self.config.documents != "paragraphs":
            remedies.append("--documents paragraphs")
        remedies.append("a source of its own with --validation")
        told = f" ({distinct:,} distinct, and copies of a document fall into one split)" if copies else ""
        return UserError(
            f"source {self.config.source!r}: none of its {documents:,} documents{told} fell into the validation "
            f"split: try {', or '.join(remedies)}"
        )


def _open(config: PrepareConfig, spec: str) -> Source:
    return open_source(spec, text_field=config.text_field, cut=config.documents)


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
def _removed_unless_useful(partial: Path, made: list[Path]) -> Iterator[None]:
    """Remove a partial preparation that failed, and the directories made for it, if nobody can go on with it.

    It is of use only after a `StoppedError`: bad input is cured by another input, whose preparation starts anew.
    """
    try:
        yield
    except UserError as error:
        if not isinstance(error, StoppedError) or not (partial / PROGRESS_FILE).exists():
            shutil.rmtree(partial)
            with suppress(OSError):  # another process may have put something there
                for directory in made:
                    directory.rmdir()
        raise
