"""bench registers: what the kernels become on Hopper, compiled here without a GPU."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import torch

from siamesenorm.benchmark.results import Results, Row
from siamesenorm.kernels.inspection import BOUNDARIES, boundary_launches, inspect

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NORMS = ("rmsnorm", "layernorm")
WIDTHS = (
    (1024, "bfloat16"), (2048, "bfloat16"), (4096, "bfloat16"),
    (512, "float32"), (1024, "float32"), (2048, "float32"), (4096, "float32"),
)  # fmt: skip
"""The sizes at which nothing may spill, and in fp32 one below and one beyond them."""


def inspect_kernels(kinds: tuple[str, ...] = tuple(BOUNDARIES)) -> Results:
    """Return registers, spills and access widths of every boundary's kernels, by norm, at the usual widths."""
    rows: list[Row] = []
    missing = [] if find_spec("triton") else ["triton is not installed"]
    for kind, norm, (dim, streams) in itertools.product(kinds, NORMS, WIDTHS) if not missing else ():
        launches = boundary_launches(BOUNDARIES[kind], dim, streams=DTYPES[streams], centred=norm == "layernorm")
        for direction, launch in launches:
            found = inspect(launch)
            rows.append(
                {
                    "boundary": kind, "norm": norm, "dim": dim, "streams": streams, "pass": direction,
                    "registers": found.registers, "spilled_bytes": found.spilled_bytes, "threads": found.threads,
                    "shared_bytes": found.shared_bytes, "loads_128": found.loads.get(128, 0),
                    "stores_128": found.stores.get(128, 0),
                }
            )  # fmt: skip
    return Results(benchmark="registers", device="cpu", settings={"capability": 90}, rows=rows, not_measured=missing)
