"""The published numbers: rows of `published/*.json`, each with its source, its table and its setting.

A row belongs to a method of a grid of an item, and to a position in the learning rates where the grid has several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

FILES = ("siamesenorm.json", "seednorm.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """What a paper states of one method in one setting; `rate` is None where each method has a rate of its own.

    `values` are by name: `ppl`, `loss` (nats/token), `accuracy` and tasks (%), and others. `verdict` is `diverged`,
    `spiked` or empty.
    """

    item: str
    grid: str
    method: str
    rate: int | None
    source: str
    table: str
    setting: str
    verdict: str = ""
    values: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """Return a published number; a loss that is not stated is the logarithm of the perplexity.

        `failed` is 1 for a published divergence, else 0.
        """
        if name == "failed":
            return float(self.verdict == "diverged")
        if name == "loss" and name not in self.values and "ppl" in self.values:
            return math.log(self.values["ppl"])
        return self.values.get(name)


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Return all rows, in the order of the papers."""
    return tuple(_read())


def find_published(item: str, grid: str, method: str, rate: int | None) -> PublishedRow | None:
    """Return the row of a method, None where nothing is published."""
    key = (item, grid, method, rate)
    return next((row for row in published_rows() if (row.item, row.grid, row.method, row.rate) == key), None)


def _read() -> Iterator[PublishedRow]:
    for name in FILES:
        text = (resources.files("siamesenorm.recipes") / "published" / name).read_text()
        yield from (PublishedRow(**row) for row in json.loads(text)["rows"])
