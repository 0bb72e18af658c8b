"""Interleaved timing: every round runs every candidate once, and a ratio is a median over rounds.

Machines are noisy, and absolute times of different minutes do not compare. Within a round they do.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch import config as functorch_config

from siamesenorm.errors import UserError

Action = Callable[[], object]
Timings = dict[str, list[float]]
"""Seconds of every candidate, one a round."""
COPIED_BYTES = 1 << 28
FEWEST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the median and quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)

    def to_json(self) -> dict[str, float]:
        """Return the three numbers, to six digits."""
        return {name: float(f"{getattr(self, name):.6g}") for name in ("median", "low", "high")}

    def __str__(self) -> str:
        """Return "median [low, high]"."""
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock from which on nothing more is begun."""

    moment: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the moment so many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        """Whether it is past."""
        return time.monotonic() > self.moment

    def check(self) -> None:
        """Raise UserError if it is past."""
        if self.passed:
            raise UserError("no time was left")


NO_DEADLINE = Deadline()


def measure(
    actions: Mapping[str, Action],
    *,
    device: torch.device,
    rounds: int,
    warmup: int = 2,
    prepare: Action | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> Timings:
    """Return the seconds of every action in every round; the order turns by one from round to round.

    `prepare` runs before each action, untimed (it may flush a cache). On CUDA the time is that between two events.
    After the deadline no round begins, but three there are.
    """
    for _ in range(warmup):
        for action in actions.values():
            action()
    timings: Timings = {name: [] for name in actions}
    names = list(actions)
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and deadline.passed:
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if prepare is not None:
                prepare()
            timings[name].append(seconds_of(actions[name], device))
    return timings


def seconds_of(action: Action, device: torch.device) -> float:
    """Return the seconds that one call takes on the device."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        action()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def ratio(timings: Timings, name: str, reference: str) -> Spread:
    """Return the ratio of two candidates' times, taken round by round."""
    pairs = zip(timings[name], timings[reference], strict=True)
    return Spread.of([one / other for one, other in pairs])


@contextmanager
def allow_many_graphs() -> Iterator[None]:
    """Let the compiler keep a graph for each topology: they share the code of the block, which it counts by."""
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        yield


@contextmanager
def allow_kept_graphs() -> Iterator[None]:
    """Let a compiled backward pass run many times on one graph: it must not write over what the graph keeps."""
    with functorch_config.patch(donated_buffer=False):
        yield


class CacheFlush:
    """Overwrite more memory than the last cache holds, so that every candidate reads from memory; for milliseconds.

    The device being busy that long, the host has launched what is measured before it begins: else the time between two
    events would be that of Python, not of the kernels.
    """

    def __init__(self, device: torch.device, megabytes: int = 256, times: int = 32) -> None:
        self.memory = torch.empty(megabytes << 20, dtype=torch.int8, device=device)
        self.times = times

    def __call__(self) -> None:
        """Overwrite the memory."""
        for _ in range(self.times):
            self.memory.zero_()


def copy_action(device: torch.device) -> Action:
    """Return a copy of `COPIED_BYTES`, which moves twice as many: the yardstick of memory traffic."""
    source = torch.empty(COPIED_BYTES, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def share_of_copy_rate(traffic: float, seconds: list[float], copies: list[float]) -> Spread:
    """Return the rate at which `traffic` bytes moved, as a share of that of the copies of the same rounds."""
    copied = 2 * COPIED_BYTES
    return Spread.of([traffic / one * copy / copied for one, copy in zip(seconds, copies, strict=True)])


def resolve_device(name: str) -> torch.device:
    """Return the device of a name, "auto" being CUDA where there is one; raises UserError for what is not there."""
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"device {name!r}: choose cpu, cuda or auto")
    if name.startswith("cuda") and not available:
        raise UserError(f"device {name!r}: torch finds no CUDA device here; choose cpu")
    return torch.device(name)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, by which events and memory are counted."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with its spreads as JSON values."""
    return {key: value.to_json() if isinstance(value, Spread) else value for key, value in record.items()}
