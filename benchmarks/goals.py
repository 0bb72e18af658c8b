"""Compare the results of `siamesenorm bench gpu` with the goals of the kernels.

python benchmarks/goals.py benchmarks/gpu
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from siamesenorm.benchmark.results import Results, Row, markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound on one number of one row."""

    what: str
    part: str
    row: Row
    column: str
    bound: float
    holds: Callable[[float, float], bool]

    def compare(self, results: Mapping[str, Results]) -> Row:
        """Return what was wanted, what was measured, and whether it is reached."""
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
        what="training step, of the fastest Pre-Norm's time", part="step",
        row={"topology": "siamese", "candidate": "fused"}, column="step_to_best_pre", bound=1.02, holds=operator.le,
    ),
)  # fmt: skip


def table(directory: Path) -> str:
    """Return the goals and the measurements of a directory as a Markdown table."""
    results = {part: Results.read(directory / f"{part}.json") for part in ("boundary", "norms", "step")}
    return markdown([goal.compare(results) for goal in GOALS], ("goal", "wanted", "measured", "reached"))


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
