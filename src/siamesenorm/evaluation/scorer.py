"""Log-probabilities of continuations by any causal language model, in batches, each request computed once.

Sequences with a common beginning, such as the choices of one question, share a row: the beginning is computed once, and
a mask keeps the spans apart. The head is computed at the places that predict a continuation alone, and the
log-softmax in fp32. A cache in a file holds what is done: a repeated command continues where it stopped, with the same
batches, so that its numbers are those of one never interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.evaluation.causal_models import Batch, CausalModel, sharing_mask
from siamesenorm.files import disk_errors, exclusive
from siamesenorm.progress import Progress
from siamesenorm.training.run_record import MetricsLog, read_metrics

TOKENS_AT_ONCE = 4096
LOCK_FILE = "lock"


class Request(NamedTuple):
    """A continuation whose log-probability after a context is wanted, as token ids; neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]


class Span(NamedTuple):
    """Tokens of which the last `predicted` are to be predicted from those before them."""

    tokens: tuple[int, ...]
    predicted: int

    @property
    def key(self) -> str:
        """A digest of the content."""
        content = np.array([self.predicted, *self.tokens], dtype="<i8").tobytes()
        return hashlib.blake2b(content, digest_size=12).hexdigest()


@dataclass(slots=True, kw_only=True)
class PackedRow:
    """Sequences in one row: their common beginning (branch 0), then the rest of each; the last tokens are not read."""

    tokens: list[int]
    positions: list[int]
    branches: list[int]
    columns: list[int] = field(default_factory=list)
    """The places that predict the targets."""
    targets: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def pack(cls, spans: Sequence[Span]) -> PackedRow:
        """Return a row of spans."""
        inputs = [each.tokens[:-1] for each in spans]
        shared = _common(inputs) if len(inputs) > 1 else 0
        row = cls(tokens=list(inputs[0][:shared]), positions=list(range(shared)), branches=[0] * shared)
        for branch, (span, read) in enumerate(zip(spans, inputs, strict=True), 1):
            moved = len(row.tokens) - shared
            row.tokens += read[shared:]
            row.positions += range(shared, len(read))
            row.branches += [branch] * (len(read) - shared)
            row.targets += span.tokens[-span.predicted :]
            before = range(len(read) - span.predicted, len(read))
            row.columns += (place if place < shared else place + moved for place in before)
            row.spans.append(span)
        return row


@dataclass(frozen=True, kw_only=True)
class LanguageScorer:
    """Scores texts by a model with its tokenizer.

    `encode` returns the token ids of texts, without special tokens; `start` is the token that precedes a text,
    where there is one. `identity` is the digest of everything that the numbers depend on besides the tokens.
    """

    model: CausalModel
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    identity: str
    device: torch.device
    start: int | None = None
    tokens_at_once: int = TOKENS_AT_ONCE
    cache: Path | None = None
    """Directory of the cache; without one nothing is kept."""

    def requests(self, pairs: Sequence[tuple[str, str]]) -> list[Request]:
        """Return the requests of contexts and continuations, which are encoded apart.

        Raises UserError for a text without tokens.
        """
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        ids = dict(zip(texts, (list(map(int, each)) for each in self.encode(texts)), strict=True))
        for text, found in ids.items():
            if not found:
                raise UserError(f"the tokenizer has no token for {text!r}: remove its item")
        return [Request(ids[context], ids[continuation]) for context, continuation in pairs]

    def score(
        self, groups: Sequence[Sequence[Request]], on_progress: Progress = lambda part, text: None
    ) -> list[list[float]]:
        """Return the log-probability of each request, in nats, in groups as given.

        The model reads the last `context` tokens before each prediction at most: a longer request is cut at its left,
        and a continuation that is longer is predicted in parts, each after the tokens before it. Requests of a group
        may share a row. Equal requests are computed once.
        """
        parts = [[self._parts(request) for request in group] for group in groups]
        rows = self._rows([[one for request in group for one in request] for group in parts])
        values: dict[Span, float] = {}
        total, done = sum(len(row.tokens) for row in rows), 0
        with open_cache(self.cache, self.identity) as cache:
            for batch in self._batches(rows):
                if (found := cache.get(batch)) is None:
                    found = self._log_probabilities(batch)
                    cache.add(found)
                values.update(found)
                done += sum(len(row.tokens) for row in batch)
                on_progress(done / total, "")
        return [[sum(values[one] for one in request) for request in group] for group in parts]

    def _parts(self, request: Request) -> list[Span]:
        context, tokens, most = len(request.context), (*request.context, *request.continuation), self.model.context
        parts = []
        for end in range(len(tokens), context, -most):
            count = min(most, end - context)
            parts.append(Span(tokens[max(0, end - most - 1) : end], count))
        return parts[::-1]

    def _rows(self, groups: Sequence[Sequence[Span]]) -> list[PackedRow]:
        """Return rows of spans, none of them twice, the longest first: an error by memory comes at once."""
        seen: set[Span] = set()
        rows = []
        for group in groups:
            new = [one for one in dict.fromkeys(group) if one not in seen]
            seen.update(new)
            if new:
                rows += [PackedRow.pack(new)] if self.model.packs else [PackedRow.pack([one]) for one in new]
        return sorted(rows, key=lambda row: -len(row.tokens))

    def _batches(self, rows: Sequence[PackedRow]) -> Iterator[Sequence[PackedRow]]:
        start = 0
        while start < len(rows):
            count = max(1, self.tokens_at_once // len(rows[start].tokens))
            yield rows[start : start + count]
            start += count

    @torch.no_grad()
    def _log_probabilities(self, rows: Sequence[PackedRow]) -> dict[Span, float]:
        def padded(values: Sequence[Sequence[int]], padding: int) -> Tensor:
            longest = len(rows[0].tokens)
            whole = [[*each, *[padding] * (longest - len(each))] for each in values]
            return torch.tensor(whole, device=self.device)

        batch = Batch(padded([row.tokens for row in rows], 0))
        if any(len(row.spans) > 1 for row in rows):
            mask = sharing_mask(padded([row.branches for row in rows], -1))
            batch = batch._replace(positions=padded([row.positions for row in rows], 0), mask=mask)
        numbers = [number for number, row in enumerate(rows) for _ in row.columns]
        places, columns, targets = (
            torch.tensor(each, device=self.device)
            for each in (numbers, [c for row in rows for c in row.columns], [t for row in rows for t in row.targets])
        )
        found, done = [], 0
        for logits in self.model.logits(batch, places, columns):
            wanted = targets[done : done + len(logits), None]
            done += len(logits)
            found.append((logits.gather(1, wanted)[:, 0] - logits.logsumexp(1)).double().cpu())
        values = torch.cat(found).tolist()
        sums = {}
        for span in (span for row in rows for span in row.spans):
            sums[span], values = sum(values[: span.predicted]), values[span.predicted :]
        return sums


class Cache:
    """The log-probabilities of one model: a line of its file for each batch."""

    def __init__(self, log: MetricsLog | None = None, values: Mapping[str, float] | None = None) -> None:
        self.log, self.values = log, values or {}

    def get(self, rows: Sequence[PackedRow]) -> dict[Span, float] | None:
        """Return the values of a batch; None unless all are there."""
        keys = {span: span.key for row in rows for span in row.spans} if self.values else {}
        if not keys or not self.values.keys() >= set(keys.values()):
            return None
        return {span: self.values[key] for span, key in keys.items()}

    def add(self, values: Mapping[Span, float]) -> None:
        """Append the values of a batch."""
        if self.log is not None:
            self.log.append({span.key: value for span, value in values.items()})


@contextmanager
def open_cache(directory: Path | None, identity: str) -> Iterator[Cache]:
    """Open the cache of a model in a directory, for this process alone; an empty one without a directory.

    Raises `StoppedError` where another process has it open.
    """
    if directory is None:
        yield Cache()
        return
    file = directory / f"{identity[:32]}.jsonl"
    with disk_errors(file):
        directory.mkdir(parents=True, exist_ok=True)
        lock = exclusive(directory / LOCK_FILE)
        with lock, MetricsLog(file) as log:
            yield Cache(log, {key: value for line in read_metrics(file) for key, value in line.items()})


def _common(sequences: Sequence[tuple[int, ...]]) -> int:
    """Return the length of the common beginning."""
    first, last = min(sequences), max(sequences)  # in the order of words, all others are between them
    shortest = min(len(first), len(last))
    return next((place for place in range(shortest) if first[place] != last[place]), shortest)
