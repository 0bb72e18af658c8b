"""bench gpu: boundaries, norms and training steps on CUDA, unattended and in a given time.

Each part runs in a process of its own, as an error in a kernel may leave CUDA unusable, and writes its file again after
every few rows. Failures, and parts for which no time was left, are noted in the files. It needs torch and triton only:

    python -c "from siamesenorm.benchmark.gpu import measure_on_gpu; measure_on_gpu()"
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from siamesenorm.benchmark import boundary, norms, step
from siamesenorm.benchmark.measurement import resolve_device
from siamesenorm.benchmark.results import Results, Session, measuring
from siamesenorm.errors import UserError

MINUTES = 9.0
PARTS = {"boundary": (0.4, 0.5), "norms": (0.55, 0.65), "step": (0.9, 1.0)}
"""The shares of the time after which a part starts nothing more, and after which it is killed."""
BENCHMARKS: dict[str, tuple[Callable[[torch.device], Any], Callable[[Session[Any]], Results]]] = {
    "boundary": (boundary.settings_for, boundary.measure_boundaries),
    "norms": (norms.settings_for, norms.measure_norms),
    "step": (step.settings_for, step.measure_steps),
}
"""The settings of a part on a device, and the function that measures with them."""
UNFINISHED = "the rest: this part was ended before it was done"


def measure_on_gpu(out: Path = Path("benchmarks/gpu"), *, minutes: float = MINUTES, **changes: Any) -> None:
    """Measure each part into a file of its own, and print its table; `changes` replace the usual settings.

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
        failure = measure_apart(part, path, last, end, changes)
        results = Results.read(path)
        if failure is not None:
            results.not_measured.append(f"{part}: {failure}")
        results.show(path)


def measure_apart(part: str, path: Path, last: float, end: float, changes: Mapping[str, Any]) -> str | None:
    """Measure a part in a process of its own; returns the reason if it failed, else None.

    It starts nothing more after `last` seconds, and is killed after `end`.
    """
    process = multiprocessing.get_context("spawn").Process(target=measure_part, args=(part, path, last, changes))
    process.start()
    process.join(max(0.0, end))
    if process.is_alive():
        process.kill()
        process.join()
        return "no time was left"
    return f"its process ended with status {process.exitcode}" if process.exitcode else None


def measure_part(part: str, path: Path, seconds: float, changes: Mapping[str, Any]) -> None:
    """Measure one part on CUDA, nothing being started after so many seconds, and write its file."""
    deadline = time.monotonic() + seconds
    results = Results(benchmark=part, device="cuda", settings={})

    def progress(found: Results) -> None:
        replace(found, not_measured=[*found.not_measured, UNFINISHED]).write(path)

    with measuring(part, results.not_measured):
        results = measure_usual(part, "cuda", changes, deadline, progress)
    results.write(path)


def measure_usual(part: str, device_name: str, changes: Mapping[str, Any], *limits: Any) -> Results:
    """Measure a part at the usual settings of a device; those of `changes` that it has are replaced.

    `limits` are the deadline and the progress of `Session`.
    """
    device = resolve_device(device_name)
    settings_for, measure = BENCHMARKS[part]
    usual = settings_for(device)
    settings = replace(usual, **{name: value for name, value in changes.items() if name in vars(usual)})
    return measure(Session(part, settings, device, *limits))
