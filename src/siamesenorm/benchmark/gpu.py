"""bench gpu: boundaries, norms and training steps on CUDA, unattended and in a given time.

Each part runs in a process of its own, as an error in a kernel may leave CUDA unusable, and writes its file again after
every few rows. Failures, and parts for which no time was left, are noted in the files. It needs torch and triton only:

    python -c "from siamesenorm.benchmark.gpu import measure_on_gpu; measure_on_gpu()"
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from siamesenorm.benchmark.boundary import measure_boundaries
from siamesenorm.benchmark.boundary import settings_for as boundary_settings
from siamesenorm.benchmark.measurement import NO_DEADLINE, Deadline
from siamesenorm.benchmark.norms import measure_norms
from siamesenorm.benchmark.norms import settings_for as norm_settings
from siamesenorm.benchmark.results import Progress, Results, measuring
from siamesenorm.benchmark.step import measure_steps
from siamesenorm.benchmark.step import settings_for as step_settings
from siamesenorm.errors import UserError

MINUTES = 9.0
PARTS = {"boundary": (0.4, 0.5), "norms": (0.55, 0.65), "step": (0.9, 1.0)}
"""The shares of the time after which a part starts nothing more, and after which it is killed."""
UNFINISHED = "the rest: this part was ended before it was done"


def measure_on_gpu(
    out: Path = Path("benchmarks/gpu"),
    *,
    minutes: float = MINUTES,
    rounds: int | None = None,
    topologies: tuple[str, ...] = (),
) -> None:
    """Measure each part into a file of its own, and print its table.

    Raises UserError without CUDA, for a time that is not positive, and for a directory that cannot be written.
    """
    if not minutes > 0:
        raise UserError(f"--minutes {minutes:g}: choose more than 0")
    if not torch.cuda.is_available():
        raise UserError("bench gpu: torch finds no CUDA device; measure boundary, norms or step on the CPU instead")
    begin = time.monotonic()
    for part, shares in PARTS.items():
        path = out / f"{part}.json"
        Results(benchmark=part, device="cuda", settings={}, not_measured=[UNFINISHED]).write(path)
        last, end = (begin + 60 * minutes * share - time.monotonic() for share in shares)
        failure = measure_apart(part, path, last, end, rounds, topologies)
        results = Results.read(path)
        if failure is not None:
            results.not_measured.append(f"{part}: {failure}")
        results.show(path)


def measure_apart(
    part: str, path: Path, last: float, end: float, rounds: int | None, topologies: tuple[str, ...]
) -> str | None:
    """Measure a part in a process of its own; returns the reason if it failed, else None.

    It starts nothing more after `last` seconds, and is killed after `end`.
    """
    arguments = (part, path, last, rounds, topologies)
    process = multiprocessing.get_context("spawn").Process(target=measure_part, args=arguments)
    process.start()
    process.join(max(0.0, end))
    if process.is_alive():
        process.kill()
        process.join()
        return "no time was left"
    return f"its process ended with status {process.exitcode}" if process.exitcode else None


def measure_part(
    part: str, path: Path, seconds: float, rounds: int | None = None, topologies: tuple[str, ...] = ()
) -> None:
    """Measure one part on CUDA, with the given rounds and topologies instead of the usual ones, and write its file."""
    device, deadline = torch.device("cuda"), Deadline.after(seconds)
    results = Results(benchmark=part, device="cuda", settings={})

    def progress(found: Results) -> None:
        replace(found, not_measured=[*found.not_measured, UNFINISHED]).write(path)

    with measuring(part, results.not_measured):
        results = measure_usual(part, device, rounds, topologies, deadline, progress)
    results.write(path)


def measure_usual(
    part: str,
    device: torch.device,
    rounds: int | None = None,
    topologies: tuple[str, ...] = (),
    deadline: Deadline = NO_DEADLINE,
    progress: Progress = lambda results: None,
) -> Results:
    """Measure a part at the usual settings of a device, but for the given rounds and topologies (norms have none)."""
    changes: dict[str, Any] = {"rounds": rounds} if rounds else {}
    if part == "norms":
        return measure_norms(replace(norm_settings(device), **changes), str(device), deadline, progress)
    if topologies:
        changes["topologies"] = topologies
    if part == "boundary":
        return measure_boundaries(replace(boundary_settings(device), **changes), str(device), deadline, progress)
    return measure_steps(replace(step_settings(device), **changes), str(device), deadline, progress)
