"""Sizes of language models as one table.

`olmo-1.3b` is the SiameseNorm paper's (arXiv 2602.08064, Table 4); the four `390m` depths fit the published parameter
count with an MLP of 4 d and heads of 128, which the paper does not state; `olmo2-1b` is OLMo 2's published shape. The
others are for a CPU; their vocabulary is that of the data.
"""

from __future__ import annotations

from typing import Any

from siamesenorm.errors import unknown

SIZES: dict[str, dict[str, Any]] = {
    "nano": {"depth": 4, "dim": 64, "heads": 4, "hidden": 256, "context": 128},
    "mini": {"depth": 8, "dim": 128, "heads": 4, "hidden": 352, "context": 128},
    "small": {"depth": 12, "dim": 256, "heads": 4, "hidden": 704, "context": 512},
    "390m-l10": {"depth": 10, "dim": 1280, "heads": 10, "hidden": 5120, "vocabulary": 50304, "context": 2048},
    "390m-l17": {"depth": 17, "dim": 1024, "heads": 8, "hidden": 4096, "vocabulary": 50304, "context": 2048},
    "390m-l33": {"depth": 33, "dim": 768, "heads": 6, "hidden": 3072, "vocabulary": 50304, "context": 2048},
    "390m-l80": {"depth": 80, "dim": 512, "heads": 4, "hidden": 2048, "vocabulary": 50304, "context": 2048},
    "olmo-1.3b": {"depth": 16, "dim": 2048, "heads": 16, "hidden": 8192, "vocabulary": 50304, "context": 2048},
    "olmo2-1b": {
        "depth": 16,
        "dim": 2048,
        "heads": 16,
        "hidden": 8192,
        "vocabulary": 100352,
        "context": 4096,
        "rope_theta": 500_000.0,
        "initialisation": "normal",
        "norm": "rmsnorm:eps=1e-6",
    },
}


def size_fields(size: str) -> dict[str, Any]:
    """Return the fields of a size; raises UserError for an unknown one."""
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    return dict(SIZES[size])
