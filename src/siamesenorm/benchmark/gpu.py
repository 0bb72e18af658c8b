"""bench gpu: what needs CUDA, unattended and in a given time: boundaries, norms, training steps, the kernels' goals.

`python -m siamesenorm.benchmark.gpu` is the same where there is nothing but torch and triton. Each part has a process
of its own, as an error of a kernel may leave CUDA unusable, and writes its file again after every few rows. What fails,
and what time is not left for, is noted in the files; the rest goes on.
"""

from __future__ import annotations

import argparse
import operator
import subprocess
import sys
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
PARTS = {"boundary": (0.4, 0.5), "norms": (0.55, 0.65), "step": (0.9, 1.0)}
"""The shares of the time after which a part begins nothing more, and after which it is stopped at whatever it is."""
COMMAND = [sys.executable, "-m", "siamesenorm.benchmark.gpu"]
NO_DEVICE = "torch finds no CUDA device here"
UNFINISHED = "the rest: this part was ended before it was done"


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
        what="training step, of the fastest Pre-Norm's time", part="step",
        row={"topology": "siamese", "candidate": "fused"}, column="step_to_best_pre", bound=1.02, holds=operator.le,
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
    available = torch.cuda.is_available()
    results: dict[str, Results] = {}
    for part, shares in PARTS.items():
        path = out / f"{part}.json"
        nothing = Results(benchmark=part, device="cuda" if available else "cpu", settings={})
        nothing.not_measured.append(UNFINISHED if available else NO_DEVICE)
        nothing.write(path)
        failure = None
        if available:
            last, end = (begin + 60 * minutes * share - time.monotonic() for share in shares)
            failure = measure_apart(part, path, last, end, rounds, topologies)
        results[part] = Results.read(path)
        if failure is not None:
            results[part].not_measured.append(f"{part}: {failure}")
        results[part].show(path)
    if any(result.rows for result in results.values()):
        print(markdown([goal.compare(results) for goal in GOALS], ("goal", "wanted", "measured", "reached")))


def measure_apart(
    part: str, path: Path, last: float, end: float, rounds: int | None, topologies: tuple[str, ...]
) -> str | None:
    """Measure a part in a process of its own, and return how that failed, or None.

    It begins nothing more after `last` seconds, and is killed after `end`.
    """
    options = ["--part", part, "--out", str(path), "--seconds", str(last)]
    options += [] if rounds is None else ["--rounds", str(rounds)]
    try:
        status = subprocess.run([*COMMAND, *options, "--topologies", *topologies], timeout=max(0.0, end)).returncode
    except subprocess.TimeoutExpired:
        return "no time was left"
    return f"its process ended with status {status}" if status else None


def measure_part(
    part: str, path: Path, seconds: float, rounds: int | None = None, topologies: tuple[str, ...] = ()
) -> None:
    """Measure one part on CUDA, with other rounds and topologies than the usual ones if given, and write its file."""
    device = torch.device("cuda")
    chosen: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
    deadline = Deadline.after(seconds)
    results = Results(benchmark=part, device="cuda", settings={})

    def progress(found: Results) -> None:
        replace(found, not_measured=[*found.not_measured, UNFINISHED]).write(path)

    with noting(results.not_measured, part):
        if part == "norms":
            results = norms.measure_norms(replace(norms.settings_for(device), **chosen), "cuda", deadline, progress)
        elif part == "boundary":
            chosen |= {"topologies": topologies} if topologies else {}
            settings = replace(boundary.settings_for(device), **chosen)
            results = boundary.measure_boundaries(settings, "cuda", deadline, progress)
        else:
            chosen |= {"topologies": topologies} if topologies else {}
            results = step.measure_steps(replace(step.settings_for(device), **chosen), "cuda", deadline, progress)
    results.write(path)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description="measure boundaries, norms and training steps on CUDA, unattended")
    parser.add_argument("--out", type=Path, default=OUT, help="directory for the results; of one part, its file")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long it may take")
    parser.add_argument("--rounds", type=int, help="rounds, in each of which every candidate runs once")
    parser.add_argument("--topologies", nargs="*", default=[], help="topologies to measure instead of the usual ones")
    parser.add_argument("--part", choices=PARTS, help="measure this part alone, in this process")
    parser.add_argument("--seconds", type=float, default=60 * MINUTES, help="after which a part begins nothing more")
    given = parser.parse_args()
    topologies = tuple(given.topologies)
    try:
        if given.part:
            measure_part(given.part, given.out, given.seconds, given.rounds, topologies)
        else:
            measure_on_gpu(given.out, minutes=given.minutes, rounds=given.rounds, topologies=topologies)
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
