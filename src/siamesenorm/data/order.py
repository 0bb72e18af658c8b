"""The order of samples as a pure function of seed and position: nothing to store, nothing to resume.

A Feistel network over the smallest even number of bits that covers the samples is a permutation whatever its round
function; walking its cycles until the value is a sample again restricts it to them (Black and Rogaway 2002).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from siamesenorm.errors import UserError

ROUNDS = 8
Words = NDArray[np.uint64]


class SampleOrder:
    """Endless epochs over `samples` samples, each epoch in an order of its own.

    The sample at a position is `permutation(seed, epoch)[position % samples]` with `epoch = position // samples`.
    Raises `UserError` if there are no samples or the seed is negative.
    """

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise UserError(f"samples {samples}: an order needs at least one sample")
        if seed < 0:
            raise UserError(f"seed {seed}: give a whole number of at least 0")
        self.samples = samples
        self.seed = seed
        self._half_bits = np.uint64(max(1, ((samples - 1).bit_length() + 1) // 2))
        self._half_mask = (np.uint64(1) << self._half_bits) - np.uint64(1)

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the samples at the positions `start .. start + count - 1`, [count] int64.

        Raises `UserError` if a number is negative.
        """
        if start < 0 or count < 0:
            raise UserError(f"positions {start} + {count}: give whole numbers of at least 0")
        positions = np.arange(start, start + count, dtype=np.uint64)
        epochs, values = np.divmod(positions, np.uint64(self.samples))
        keys = _mix(epochs ^ _mix(np.array([self.seed], dtype=np.uint64)))
        values = self._permute(values, keys)
        while (outside := values >= self.samples).any():
            values[outside] = self._permute(values[outside], keys[outside])
        return values.astype(np.int64)

    def _permute(self, values: Words, keys: Words) -> Words:
        """Permute `0 .. 2^(2 half_bits) - 1`, by the permutation of each value's key."""
        left, right = values >> self._half_bits, values & self._half_mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(right + _mix(keys + np.uint64(number))) & self._half_mask)
        return (left << self._half_bits) | right


def _mix(words: Words) -> Words:
    """Return the words scrambled by the finaliser of SplitMix64, a bijection of 64-bit words."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
