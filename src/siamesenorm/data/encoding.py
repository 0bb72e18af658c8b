"""Documents to token ids in worker processes, in order: the result is the same whatever their number."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from siamesenorm.data.storage import SPLITS, EncodedSplit, id_dtype
from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.files import StoppedError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive documents, each with the name of its split."""

    documents: list[tuple[str, str]]
    position: int
    """Bytes of the sources that were read up to here, for the display."""


# The ids of a chunk by split, and its position.
EncodedChunk = tuple[dict[str, EncodedSplit], int]


def encode_chunk(tokenizer: Tokenizer, chunk: Chunk) -> EncodedChunk:
    """Return the ids of a chunk, every document closed by the end of text."""
    dtype, end = id_dtype(tokenizer.vocabulary), [tokenizer.end_of_text]
    splits = {}
    for name in SPLITS:
        if texts := [text for split, text in chunk.documents if split == name]:
            ids = np.concatenate([part for ids in tokenizer.encode_batch(texts) for part in (ids, end)]).astype(dtype)
            splits[name] = EncodedSplit(ids, len(texts), sum(len(text.encode("utf-8")) for text in texts))
    return splits, chunk.position


def encode_chunks(chunks: Iterable[Chunk], tokenizer: Tokenizer, workers: int) -> Generator[EncodedChunk, None, None]:
    """Yield the encoded chunks in order; with one worker, in this process.

    Raises `StoppedError` if a worker dies, as it does when memory runs out.
    """
    if workers == 1:
        yield from (encode_chunk(tokenizer, chunk) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, _start_context(), _start_worker, (tokenizer,))
    try:
        futures = (pool.submit(_encode, chunk) for chunk in chunks)
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
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(sentinel: int) -> None:
    # A killed parent cannot stop its workers.
    wait([sentinel])
    os._exit(1)


def _encode(chunk: Chunk) -> EncodedChunk:
    return encode_chunk(_tokenizer, chunk)
