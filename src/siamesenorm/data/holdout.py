"""Which documents are held out for validation, where validation has no source of its own.

A document is held out by its hash, so that copies fall into the same split. Neither split is ever empty: where no hash
is low enough the document with the lowest one is held out, and of a text of few documents the last part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from siamesenorm.errors import UserError

# Of fewer documents than this, one would be too much to hold out.
FEW_DOCUMENTS = 10
CUT_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Holdout:
    """The part of a source that is held out."""

    threshold: int
    """Documents with a hash below it are held out."""
    cut: int | None = None
    """Number of characters to train on: all that follow are held out, whatever their hash."""
    note: str = ""
    """What to report where the documents could not be split by the fraction."""

    def split(self, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield `(split, document)`; the document at the cut becomes two."""
        if self.cut is None:
            for text in texts:
                yield ("validation" if hash_document(text) < self.threshold else "train"), text
            return
        left = self.cut
        for text in texts:
            if 0 < left < len(text):
                place = _break_before(text, left)
                yield "train", text[:place]
                yield "validation", text[place:]
            else:
                yield ("train" if left > 0 else "validation"), text
            left -= len(text)


def hash_document(text: str) -> int:
    """Return the hash of a document, uniform over 64-bit numbers."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def choose_holdout(name: str, texts: Iterable[str], fraction: float) -> Holdout:
    """Return what to hold out of the documents of a source: `fraction` of them, at least something, never all.

    Reads only until there is a document for both splits.
    Raises `UserError` if there is nothing to divide: copies of one document, or a single character.
    """
    threshold = math.ceil(fraction * 2**64)
    distinct: set[int] = set()
    lowest, highest, documents, characters = 2**64, -1, 0, 0
    for text in texts:
        hashed = hash_document(text)
        lowest, highest = min(lowest, hashed), max(highest, hashed)
        if lowest < threshold <= highest:
            return Holdout(threshold)
        documents += 1
        characters += len(text)
        if len(distinct) < FEW_DOCUMENTS:
            distinct.add(hashed)
    if len(distinct) == FEW_DOCUMENTS or 1 < len(distinct) < documents:
        if lowest >= threshold:
            return Holdout(lowest + 1, note=f"none of {documents:,} documents is in the fraction: one is held out")
        return Holdout(highest, note=f"all of {documents:,} documents are in the fraction: all but one are held out")
    if documents > 1 and len(distinct) == 1:
        raise UserError(f"{name}: all {documents:,} documents are copies of one: add text or --validation")
    if characters < 2:
        raise UserError(f"{name}: too short for a train and a validation split: give more text")
    share = max(fraction, CUT_FRACTION)
    cut = min(max(1, round(characters * (1 - share))), characters - 1)
    return Holdout(threshold, cut, f"the text has few documents: the last {share:.0%} of it is held out")


def _break_before(text: str, place: int) -> int:
    """Return the nearest end of a line before a place, else the nearest blank, else the place itself."""
    for separator in ("\n", " "):
        found = text.rfind(separator, place // 2, place) + 1
        if found > 0:
            return found
    return place
