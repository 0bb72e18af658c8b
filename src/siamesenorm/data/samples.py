"""Samples of a fixed length from prepared tokens: shuffled without state for training, in sequence for evaluation.

Documents lie end to end and samples cut across them; `document_ids` tells them apart for masked attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.order import SampleOrder
from siamesenorm.data.tokens import PreparedData
from siamesenorm.errors import UserError


class TokenSamples:
    """A split as samples of `context` inputs and as many targets, in the stateless order of a seed.

    Sample i is `tokens[i * context : i * context + context + 1]`, so every id but the first is a target once an
    epoch; an incomplete last sample is dropped.
    Raises `UserError` if the split has too few tokens for one sample.
    """

    def __init__(self, data: PreparedData, split: str, context: int, seed: int = 0) -> None:
        if context < 1:
            raise UserError(f"context {context}: a sample needs at least one token")
        self._tokens = data.tokens(split)
        self.context = context
        self.samples = (len(self._tokens) - 1) // context
        if self.samples < 1:
            raise UserError(
                f"{data.path}: the {split} split has {len(self._tokens):,} tokens, one sample of context {context} "
                f"needs {context + 1:,}: prepare more text or choose a shorter context"
            )
        self.order = SampleOrder(self.samples, seed)

    @property
    def targets(self) -> int:
        """Number of targets in an epoch."""
        return self.samples * self.context

    def batch(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the samples at `count` positions of the order, [count, context + 1] int64."""
        return self._read(self.order.indices(position, count))

    def windows(self, count: int, limit: int | None = None) -> Iterator[NDArray[np.int64]]:
        """Yield the samples once, in the order of the text, up to `count` at a time, [<= count, context + 1] int64.

        At most `limit` targets are read, rounded up to a whole sample, all of them without a limit.
        Raises `UserError` if a number is not positive.
        """
        if count < 1 or (limit is not None and limit < 1):
            raise UserError(f"windows of count {count}, limit {limit}: give whole numbers of at least 1")
        samples = self.samples if limit is None else min(self.samples, -(-limit // self.context))
        for start in range(0, samples, count):
            yield self._read(np.arange(start, min(start + count, samples)))

    def _read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        batch = np.empty((len(indices), self.context + 1), dtype=np.int64)
        for row, index in zip(batch, indices.tolist(), strict=True):
            row[:] = self._tokens[index * self.context : index * self.context + self.context + 1]
        return batch


def document_ids(tokens: NDArray[Any], end_of_text: int) -> NDArray[np.int64]:
    """Return the document that each position belongs to, counted from 0 in each row: [..., T] -> [..., T] int64.

    The end of text belongs to the document that it closes; the position after it starts the next one.
    """
    starts = np.zeros(tokens.shape, dtype=np.int64)
    starts[..., 1:] = tokens[..., :-1] == end_of_text
    return np.cumsum(starts, axis=-1)
