"""Text to prepared data: documents are read, encoded in parallel, and written in shards.

A preparation may be killed at any moment: repeated, it resumes after the last complete shard and ends with the same
bytes. Only some chunks, a shard, and the sample that a BPE is trained on are in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data import storage
from siamesenorm.data.holdout import choose_holdout
from siamesenorm.data.prepared import PreparedData
from siamesenorm.data.sources import BuiltinSource, Cut, Source, open_source
from siamesenorm.data.storage import EncodedSplit, Manifest
from siamesenorm.data.tokenizer import LibraryTokenizer, Tokenizer, bpe_size, entry_of, load_tokenizer, train_bpe
from siamesenorm.errors import UserError
from siamesenorm.files import StoppedError, disk_errors, write_atomically

# Consecutive documents, each with the name of its split, and the bytes of the sources that were read up to here.
Chunk = tuple[list[tuple[str, str]], int]
# The ids of a chunk by split, and its position in the sources.
EncodedChunk = tuple[dict[str, EncodedSplit], int]

# To be raised whenever the same settings give other bytes.
PROCEDURE = 1
# What a worker encodes at a time.
CHUNK_CHARACTERS = 2_000_000
BPE_SAMPLE_CHARACTERS = 64_000_000
# Below it, one process has finished before others have started.
SMALL_SOURCE_BYTES = 4_000_000


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
    small builtin corpus). At least one document is held out, of few documents the last part of the text."""
    text_field: str = "text"
    """Field (or column) that holds the text."""
    documents: Cut = "passages"
    """Documents of a plain text file: passages of about 30,000 characters, or its paragraphs."""
    end_of_text: str | None = None
    """Token that closes a document; found by its usual names if not given. Bytes have an id of their own for it."""
    max_documents: int | None = None
    """Read at most so many documents of the source."""
    workers: int | None = None
    """Processes that encode; chosen by the size of the source if not given."""
    restart: bool = False
    """Start again: discard an unfinished preparation; finished data are replaced when the new data are whole."""

    def __post_init__(self) -> None:
        fraction = self.validation_fraction
        if fraction is not None and not 0 < fraction < 1:
            raise UserError(f"validation fraction {fraction}: must be between 0 and 1, as in 0.01")
        if fraction is not None and self.validation is not None:
            raise UserError(f"validation fraction {fraction} and validation {self.validation!r}: give one of the two")
        texts = {"source": self.source, "validation": self.validation, "tokenizer": self.tokenizer}
        for what, text in {**texts, "text field": self.text_field, "end of text": self.end_of_text}.items():
            if text is not None and not text.strip():
                raise UserError(f"{what} {text!r}: is empty: name one or leave the option out")
        for what, number in (("workers", self.workers), ("max documents", self.max_documents)):
            if number is not None and number < 1:
                raise UserError(f"{what} {number}: must be at least 1")
        if self.out == Path():
            raise UserError("out is the current directory: name one for the data")
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"{self.out}: is a file: give a directory to write to")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareProgress:
    """The progress of a preparation, reported after each chunk."""

    stage: str
    """What is being done, to display."""
    documents: int = 0
    tokens: int = 0
    position: int = 0
    """Bytes of the source that were read."""
    size: int | None = None
    """Bytes of the source, None where that is unknown."""

    def __str__(self) -> str:
        """Return one line; a stage that counts nothing is only named."""
        if not self.documents:
            return self.stage
        share = f"{self.position / self.size:.0%} of {self.size / 1e6:,.1f} MB, " if self.size else ""
        return f"{self.stage}: {share}{self.documents:,} documents, {self.tokens:,} tokens"


def prepare(config: PrepareConfig, report: Callable[[PrepareProgress], None] = lambda progress: None) -> PreparedData:
    """Prepare a source and return the data; data already prepared with the same settings are returned at once.

    Raises `UserError` for bad settings and bad input, leaving nothing behind, and `StoppedError` (a full disk, a
    lost worker, a broken connection) after which the same call resumes where it stopped.
    """
    with disk_errors(config.out):
        preparation = _Preparation(config, report)
        storage.complete(config.out, preparation.settings, preparation.encode, restart=config.restart)
        return PreparedData.open(config.out)


class _Preparation:
    """The resolved configuration, and the steps from nothing, or from an unfinished preparation, to the data."""

    def __init__(self, config: PrepareConfig, report: Callable[[PrepareProgress], None]) -> None:
        self.config, self.report = config, report
        options: dict[str, Any] = {"text_field": config.text_field, "cut": config.documents}
        self.source = open_source(config.source, **options)
        self.validation = None if config.validation is None else open_source(config.validation, **options)
        default = 0.04 if config.source == "builtin" else 0.01
        self.fraction = default if config.validation_fraction is None else config.validation_fraction
        self.bpe_size = bpe_size(config.tokenizer)
        # A file is read at once; a tokenizer to be trained or fetched waits until it is needed.
        local = config.tokenizer == "bytes" or Path(config.tokenizer).exists()
        self.tokenizer = load_tokenizer(config.tokenizer, config.end_of_text) if local else None
        self.settings = self._settings()
        if self.validation is not None:
            # One file, or one dataset, is not both. Of a file: its name, size and checksum.
            train, held_out = self.settings["source"], self.settings["validation"]
            files = [{(size, checksum) for _, size, checksum in each.get("files", ())} for each in (train, held_out)]
            if files[0] & files[1] or train == held_out:
                raise self._same_text()

    def _settings(self) -> dict[str, Any]:
        """Return everything that the bytes of the result depend on; local files by content, not by place."""
        config = self.config
        tokenizer: object = config.tokenizer
        if self.tokenizer is not None and config.tokenizer != "bytes":
            entry = asdict(entry_of(self.tokenizer))
            tokenizer = {name: value for name, value in entry.items() if value is not None} | {"name": None}
        return {
            "procedure": PROCEDURE,
            "source": self.source.fingerprint(),
            "max_documents": config.max_documents,
            "validation": self.fraction if self.validation is None else self.validation.fingerprint(),
            "tokenizer": tokenizer,
            "end_of_text": config.end_of_text,
        }

    def encode(self, partial: Path) -> Manifest:
        """Encode the documents that have no shards yet, and return the manifest."""
        if self.validation is None:
            self.holdout = choose_holdout(f"source {self.config.source!r}", self._source_documents(), self.fraction)
            if self.holdout.note:
                self.report(PrepareProgress(stage=self.holdout.note))
        tokenizer = self._tokenizer(partial)
        writer = storage.ShardWriter(partial, entry_of(tokenizer))
        sources = [source for source in (self.validation, self.source) if source is not None]
        size = None if any(source.size is None for source in sources) else sum(source.size or 0 for source in sources)

        def report(stage: str, position: int) -> None:
            counts = {"documents": writer.documents, "tokens": writer.tokens}
            self.report(PrepareProgress(stage=stage, position=position, size=size, **counts))

        if writer.documents:
            report("resumed", 0)
        chunks = self._chunks(sources, skip=writer.documents)
        with closing(encode_chunks(chunks, tokenizer, self._workers(tokenizer))) as encoded:
            for splits, position in encoded:
                writer.append(splits)
                report("tokens", position)
        return writer.finish(self.source.name, self.settings)

    def _chunks(self, sources: list[Source], skip: int) -> Iterator[Chunk]:
        """Yield the documents in chunks of a certain length, without the first `skip` documents."""
        documents: list[tuple[str, str]] = []
        length = 0
        for split, text in islice(self._documents(), skip, None):
            documents.append((split, text))
            length += len(text)
            if length >= CHUNK_CHARACTERS:
                yield documents, sum(source.position for source in sources)
                documents, length = [], 0
        if documents:
            yield documents, sum(source.position for source in sources)

    def _source_documents(self) -> Iterator[str]:
        return islice(self.source.documents(), self.config.max_documents)

    def _documents(self) -> Iterator[tuple[str, str]]:
        """Yield every document with its split: first a validation source, then the source itself.

        Raises `UserError` if the source contains every document of the validation source.
        """
        if self.validation is None:
            yield from self.holdout.split(self._source_documents())
            return
        unseen = set()
        for text in self.validation.documents():
            unseen.add(hash(text))
            yield "validation", text
        for text in self._source_documents():
            if unseen:
                unseen.discard(hash(text))
                if not unseen:
                    raise self._same_text()
            yield "train", text

    def _same_text(self) -> UserError:
        validation, source = self.config.validation, self.config.source
        return UserError(f"validation {validation!r}: its text is in source {source!r}, too: leave --validation out")

    def _tokenizer(self, partial: Path) -> Tokenizer:
        """Return the tokenizer; its file is kept, so that a BPE is trained, or one is downloaded, only once."""
        config, kept = self.config, partial / storage.SHARD_DIRECTORY / storage.TOKENIZER_FILE
        kept.parent.mkdir(exist_ok=True)
        tokenizer = self.tokenizer
        if tokenizer is None and kept.exists():
            name = config.tokenizer if self.bpe_size is None else None
            tokenizer = LibraryTokenizer(name, kept.read_bytes(), config.end_of_text)
        elif self.bpe_size is not None:
            self.report(PrepareProgress(stage="training the tokenizer"))
            tokenizer = train_bpe(self._training_sample(), self.bpe_size, config.end_of_text)
            if tokenizer.vocabulary != self.bpe_size:
                sizes = f"{tokenizer.vocabulary:,}, not of {self.bpe_size:,}"
                self.report(PrepareProgress(stage=f"the text is enough for a vocabulary of {sizes}"))
        elif tokenizer is None:
            tokenizer = load_tokenizer(config.tokenizer, config.end_of_text)
        if tokenizer.content is not None:
            write_atomically(kept, tokenizer.content)
        return tokenizer

    def _training_sample(self) -> Iterator[str]:
        """Yield the first documents of the train split, as many as a BPE is trained on."""
        characters = 0
        for split, text in self._documents():
            if split == "train":
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
        return 1 if small or cores < 4 or tokenizer.content is None else cores


# --- encoding in worker processes


def _encode(tokenizer: Tokenizer, chunk: Chunk) -> EncodedChunk:
    """Return the ids of a chunk, every document closed by the end of text."""
    documents, position = chunk
    dtype, end = storage.id_dtype(tokenizer.vocabulary), [tokenizer.end_of_text]
    splits = {}
    for name in storage.SPLITS:
        if texts := [text for split, text in documents if split == name]:
            ids = np.concatenate([part for ids in tokenizer.encode_batch(texts) for part in (ids, end)]).astype(dtype)
            splits[name] = EncodedSplit(ids, len(texts), sum(len(text.encode("utf-8")) for text in texts))
    return splits, position


def encode_chunks(chunks: Iterable[Chunk], tokenizer: Tokenizer, workers: int) -> Generator[EncodedChunk, None, None]:
    """Yield the encoded chunks in order, the same whatever the number of workers; with one, in this process.

    Raises `StoppedError` if a worker dies, as it does when memory runs out.
    """
    if workers == 1:
        yield from (_encode(tokenizer, chunk) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, _start_context(), _start_worker, (tokenizer,))
    try:
        futures = (pool.submit(_encode_in_worker, chunk) for chunk in chunks)
        pending = deque(islice(futures, 2 * workers))  # at most two chunks a worker are in memory
        while pending:
            yield pending.popleft().result()
            pending.extend(islice(futures, 1))
    except BrokenProcessPool as error:
        raise StoppedError(
            f"one of {workers} worker processes died: memory ran out, or a script lacks `if __name__ == '__main__'`: "
            "repeat with fewer --workers, it resumes where it stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_context() -> Any:
    """Return a way to start processes that does not fork this one: a fork loses its threads and keeps its locks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once by the server instead of once by every worker.
    context.set_forkserver_preload([__name__])
    return context


_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    """Set up a worker: one thread, no reaction to Ctrl-C (the parent decides), an exit when the parent ends."""
    global _tokenizer
    _tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:  # killed, it cannot stop its workers
        threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    return _encode(_tokenizer, chunk)
