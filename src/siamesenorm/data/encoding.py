"""Documents to token ids in worker processes, in order: the result is the same whatever their number."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.holdout import Holdout, Role
from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.files import StoppedError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive documents of one role; of mixed ones the hash of each decides the split."""

    role: Role
    texts: list[str]
    position: int
    """Bytes of the sources that were read up to here, for the display."""


@dataclass(frozen=True, slots=True)
class EncodedSplit:
    """The part of a chunk that belongs to one split: its ids with the ends of text, and the size of its text."""

    ids: NDArray[Any]
    documents: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk, encoded; `documents` counts those of all splits."""

    documents: int
    splits: dict[str, EncodedSplit]
    position: int


@dataclass(frozen=True, slots=True)
class Encoder:
    """What a worker needs to encode a chunk."""

    tokenizer: Tokenizer
    dtype: str
    holdout: Holdout

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Return the ids of a chunk, every document closed by the end of text."""
        groups: dict[str, list[str]] = {}
        for text in chunk.texts:
            groups.setdefault(self._split(chunk.role, text), []).append(text)
        splits = {name: self._encode_split(texts) for name, texts in groups.items()}
        return EncodedChunk(len(chunk.texts), splits, chunk.position)

    def _split(self, role: Role, text: str) -> str:
        if role == "mixed":
            return "validation" if self.holdout.includes(text) else "train"
        return role

    def _encode_split(self, texts: list[str]) -> EncodedSplit:
        end = np.array([self.tokenizer.end_of_text])
        parts = [part for ids in self.tokenizer.encode_batch(texts) for part in (ids, end)]
        size = sum(len(text.encode("utf-8")) for text in texts)
        return EncodedSplit(np.concatenate(parts).astype(self.dtype), len(texts), size)


def encode_chunks(chunks: Iterable[Chunk], encoder: Encoder, workers: int) -> Generator[EncodedChunk, None, None]:
    """Yield the encoded chunks in order; with one worker, in this process.

    Raises `StoppedError` if a worker dies, as it does when memory runs out.
    """
    if workers == 1:
        yield from map(encoder.encode, chunks)
        return
    pool = ProcessPoolExecutor(workers, _start_context(), _start_worker, (encoder,))
    try:
        yield from _encode_in_pool(pool, iter(chunks), ahead=2 * workers)
    except BrokenProcessPool as error:
        raise StoppedError(
            f"one of {workers} worker processes died: memory ran out, or a script lacks `if __name__ == '__main__'`: "
            "repeat with fewer --workers, it resumes where it stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_in_pool(pool: ProcessPoolExecutor, chunks: Iterator[Chunk], ahead: int) -> Iterator[EncodedChunk]:
    """Yield results in order while at most `ahead` chunks are in memory."""
    pending: deque[Future[EncodedChunk]] = deque(pool.submit(_encode, chunk) for chunk in islice(chunks, ahead))
    while pending:
        yield pending.popleft().result()
        pending.extend(pool.submit(_encode, chunk) for chunk in islice(chunks, 1))


def _start_context() -> Any:
    """Return a way to start processes that does not fork this one: a fork loses its threads and keeps its locks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once by the server instead of once by every worker.
    context.set_forkserver_preload([__name__])
    return context


_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    """Set up a worker: one thread, no reaction to Ctrl-C (the parent decides), an exit when the parent ends."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()
    _encoder = encoder


def _exit_with(sentinel: int) -> None:
    """Exit when the parent process ends: a killed parent cannot stop its workers."""
    wait([sentinel])
    os._exit(1)


def _encode(chunk: Chunk) -> EncodedChunk:
    if _encoder is None:
        raise RuntimeError("a worker was used before it was started")
    return _encoder.encode(chunk)
