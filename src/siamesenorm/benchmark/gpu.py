"""bench gpu: what needs CUDA, unattended and in a given time: boundaries, norms, training steps, the kernels' goals.

`python -m siamesenorm.benchmark.gpu` is the same where there is nothing but torch and triton. What fails, and what time
is not left for, is noted in the files; the rest goes on.
"""

from __future__ import annotations

import argparse
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from siamesenorm.benchmark import boundary, norms, step
from siamesenorm.benchmark.results import Results, Row, markdown, noting
from siamesenorm.benchmark.timing import Deadline
from siamesenorm.errors import UserError

OUT = Path("benchmarks/gpu")
MINUTES = 9.0
PARTS = {"boundary": 0.4, "norms": 0.55, "step": 0.9}
"""The share of the time after which a part begins nothing more: what it is at then still has to end."""
NO_DEVICE = "torch finds no CUDA device here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound on one number of one row."""

    what: str
    part: str
    row: Row
    column: str
    bound: float
    holds: Callable[[float, float], bool]

    def compare(self, results: dict[str, Results]) -> Row:
        """Return what was wanted, what was measured, and whether it is enough."""
        rows = [row for row in results[self.part].rows if self.row.items() <= row.items()]
        found = rows[0].get(self.column) if rows else None
        sign = "at least" if self.holds is operator.ge else "at most"
        row = {"goal": self.what, "wanted": f"{sign} {self.bound:g}", "measured": found}
        return row | {"reached": None if found is None else self.holds(found["median"], self.bound)}


SIAMESE = {"topology": "siamese", "dim": 2048, "streams": "bfloat16", "candidate": "fused"}
SEEDNORM = {"norm": "seednorm", "dim": 2048, "candidate": "fused"}
GOALS = (
    Goal(
        what="boundary forward, of the copy rate", part="boundary", row=SIAMESE,
        column="forward_share_of_copy_rate", bound=0.85, holds=operator.ge,
    ),
    Goal(
        what="boundary backward, of the copy rate", part="boundary", row=SIAMESE,
        column="backward_share_of_copy_rate", bound=0.75, holds=operator.ge,
    ),
    Goal(
        what="boundary, of the compiler's time", part="boundary", row=SIAMESE,
        column="both_to_compiled", bound=0.65, holds=operator.le,
    ),
    Goal(
        what="SeeDNorm forward, of RMSNorm's time", part="norms", row=SEEDNORM,
        column="forward_to_rmsnorm", bound=1.05, holds=operator.le,
    ),
    Goal(
        what="SeeDNorm backward, of RMSNorm's time", part="norms", row=SEEDNORM,
        column="backward_to_rmsnorm", bound=1.05, holds=operator.le,
    ),
    Goal(
        what="training step, of Pre-Norm's time", part="step", row={"topology": "siamese", "candidate": "fused"},
        column="step_to_pre", bound=1.02, holds=operator.le,
    ),
)  # fmt: skip


def measure_on_gpu(
    out: Path = OUT, *, minutes: float = MINUTES, rounds: int | None = None, topologies: tuple[str, ...] = ()
) -> None:
    """Measure each part into a file of its own, print its table, and last how the numbers compare with the goals.

    Without CUDA the files say that nothing was measured. Raises UserError for a time that is no time.
    """
    if not minutes > 0:
        raise UserError(f"--minutes {minutes:g}: choose more than 0")
    begin = time.monotonic()
    results: dict[str, Results] = {}
    for part, share in PARTS.items():
        available = torch.cuda.is_available()
        missing = [] if available else [NO_DEVICE]
        device = "cuda" if available else "cpu"
        results[part] = Results(benchmark=part, device=device, settings={}, rows=[], not_measured=missing)
        if available:
            with noting(missing, part):
                results[part] = measure_part(part, Deadline(begin + 60 * minutes * share), rounds, topologies)
            torch.cuda.empty_cache()
        results[part].show(out / f"{part}.json")
    if any(result.rows for result in results.values()):
        print(markdown([goal.compare(results) for goal in GOALS], ("goal", "wanted", "measured", "reached")))


def measure_part(part: str, deadline: Deadline, rounds: int | None, topologies: tuple[str, ...]) -> Results:
    """Return the results of one part on CUDA, with other rounds and topologies than the usual ones if given."""
    device = torch.device("cuda")
    chosen: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
    if part == "norms":
        return norms.measure_norms(replace(norms.settings_for(device), **chosen), "cuda", deadline)
    if topologies:
        chosen["topologies"] = topologies
    if part == "boundary":
        return boundary.measure_boundaries(replace(boundary.settings_for(device), **chosen), "cuda", deadline)
    return step.measure_steps(replace(step.settings_for(device), **chosen), "cuda", deadline)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description="measure boundaries, norms and training steps on CUDA, unattended")
    parser.add_argument("--out", type=Path, default=OUT, help="directory for the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long it may take")
    given = parser.parse_args()
    try:
        measure_on_gpu(given.out, minutes=given.minutes)
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
