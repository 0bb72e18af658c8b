"""How a candidate is measured: agreement with the formula, interleaved time, and the memory that autograd keeps.

Every round runs every candidate once. Machines slow down and speed up, so the times of a round are divided by its
pace, the median over candidates of time / median time; a ratio is that of the medians of these times, so that the
columns of a table agree with each other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from siamesenorm.errors import UserError
from siamesenorm.training.execution import find_device

Action = Callable[[], object]
Timings = dict[str, list[float]]
"""Seconds of every candidate, one a round."""
Spread = dict[str, float]
"""The "median" with the quartiles "low" and "high"."""
Result = TypeVar("Result")
Values = Mapping[str, Tensor]
"""Results and gradients by name, rows of channels last."""
Passes = dict[str, Action]
"""The "forward" and the "backward" pass."""
COPIED_BYTES = 1 << 28
MINIMUM_ROUNDS = 3
PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 products a second in NVIDIA's data sheets, by a part of the device's name; the first that fits counts."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest distance of a row from the formula's as a share of its length: a few roundings, far below any mistake."""


# --- agreement with the formula


@torch.no_grad()
def perturb(module: nn.Module) -> None:
    """Add the same noise to the parameters of every candidate: gains of one would hide a swapped gain."""
    for seed, parameter in enumerate(module.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed)
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, device=parameter.device))


def random_like(x: Tensor, seed: int) -> Tensor:
    """Return normal random numbers, the same for every dtype up to rounding."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


def check_agreement(found: Values, formula: Values, plain: Values, dtype: torch.dtype) -> None:
    """Raise UserError unless every row of every value is the formula's in fp64, up to rounding to `dtype`.

    Four times the distance of the `plain` formulas is allowed too, for values that nearly cancel.
    """
    for what, value in formula.items():
        error = farthest_row(found[what], value)
        if not error <= max(TOLERANCES[dtype], 4 * farthest_row(plain[what], value)):
            raise UserError(f"its {what} differs from the formula by {error:.2g} of its length")


def farthest_row(found: Tensor, expected: Tensor) -> float:
    """Return the largest distance of a row from the expected one, as a share of that one's length.

    A row shorter than a tenth of the mean length counts as that long: it is mostly rounding.
    """
    found, expected = found.detach().double(), expected.detach()
    lengths = expected.norm(dim=-1)
    if not lengths.any():
        lengths = torch.ones_like(lengths)
    return float(((found - expected).norm(dim=-1) / lengths.clamp_min(0.1 * lengths.mean())).max())


def named_gradients(
    results: Sequence[Tensor], inputs: Mapping[str, Tensor], gradients: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of every input, by name, from those of the results."""
    found = torch.autograd.grad(results, list(inputs.values()), gradients, materialize_grads=True)
    return {f"gradient of {name}": one for name, one in zip(inputs, found, strict=True)}


# --- time


def measure(
    actions: Mapping[str, Action],
    *,
    device: torch.device,
    rounds: int,
    warmup: int = 2,
    prepare: Action | None = None,
    deadline: float = math.inf,
) -> Timings:
    """Return the seconds of every action in every round, at a common pace; the order rotates by one every round.

    `prepare` runs before each action, untimed (it may flush a cache). On CUDA the time is that between two events.
    After the deadline, a time of the monotonic clock, no round starts, except the first three.
    """
    for _ in range(warmup):
        for action in actions.values():
            action()
    timings: Timings = {name: [] for name in actions}
    names = list(actions)
    for number in range(rounds):
        if number >= MINIMUM_ROUNDS and time.monotonic() > deadline:
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if prepare is not None:
                prepare()
            timings[name].append(seconds_of(actions[name], device))
    return at_common_pace(timings)


def at_common_pace(timings: Timings) -> Timings:
    """Divide the times of every round by the median over actions of time / median time."""
    medians = {name: statistics.median(seconds) for name, seconds in timings.items()}
    relative = [[one / medians[name] for one in seconds] for name, seconds in timings.items()]
    paces = [statistics.median(each) for each in zip(*relative, strict=True)]
    return {name: [one / pace for one, pace in zip(each, paces, strict=True)] for name, each in timings.items()}


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


def spread_of(values: Sequence[float], median: float | None = None, factor: float = 1.0) -> Spread:
    """Return the median and the quartiles of values, times a factor, to six digits; a given median may be outside."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    middle = middle if median is None else median
    numbers = {"median": middle, "low": min(low, middle), "high": max(high, middle)}
    return {name: float(f"{number * factor:.6g}") for name, number in numbers.items()}


def milliseconds(timings: Timings, name: str) -> Spread:
    """Return the time of an action in milliseconds."""
    return spread_of(timings[name], factor=1e3)


def ratio(timings: Timings, names: str | Sequence[str], references: str | Sequence[str], factor: float = 1.0) -> Spread:
    """Return the ratio of the median times, each summed over several actions, with the quartiles of the rounds."""
    sums = [[timings[name] for name in ((each,) if isinstance(each, str) else each)] for each in (names, references)]
    above, below = (sum(statistics.median(seconds) for seconds in group) for group in sums)
    rounds = [sum(one) / sum(other) for one, other in zip(*(zip(*group, strict=True) for group in sums), strict=True)]
    return spread_of(rounds, above / below, factor)


def allow_many_graphs() -> AbstractContextManager[object]:
    """Let the compiler keep one graph per topology: they share the code of the block, by which it counts graphs."""
    patched = torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024)
    return cast(AbstractContextManager[object], patched)


def allow_kept_graphs() -> AbstractContextManager[object]:
    """Let a compiled backward pass run many times on one graph: it must not overwrite what the graph keeps."""
    return cast(AbstractContextManager[object], functorch_config.patch(donated_buffer=False))


def run_passes(
    forward: Action, results: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Passes:
    """Run and return a forward pass and the backward pass of the graph of its results.

    The forward pass records a graph, as in training: without gradients the compiler keeps less, and so does less work.
    """

    def backward() -> None:
        torch.autograd.grad(results, inputs, gradients, retain_graph=True, allow_unused=True)

    forward()
    backward()
    return {"forward": forward, "backward": backward}


def measure_passes(candidates: Mapping[str, Passes], device: torch.device, rounds: int, deadline: float) -> Timings:
    """Return the times of "NAME forward" and "NAME backward" of every candidate, and of "copy".

    The copy of `COPIED_BYTES`, which moves twice as many bytes, is the reference of memory traffic. On CUDA, other
    memory fills the last cache before each action. That takes milliseconds, in which the host launches what is measured
    next; otherwise the time between two events would be that of Python, not of the kernels.
    """
    source = torch.empty(COPIED_BYTES, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    actions: dict[str, Action] = {"copy": lambda: target.copy_(source)}
    for name, passes in candidates.items():
        actions |= {f"{name} {direction}": run for direction, run in passes.items()}
    on_cuda = device.type == "cuda"
    cached = torch.empty(256 << 20 if on_cuda else 0, dtype=torch.int8, device=device)

    def flush() -> None:
        for _ in range(32):
            cached.zero_()

    return measure(actions, device=device, rounds=rounds, prepare=flush if on_cuda else None, deadline=deadline)


def describe_passes(timings: Timings, name: str, traffic: Mapping[str, float]) -> dict[str, Any]:
    """Return the time of each pass of a candidate, and the share of the rate of "copy" at its bytes of traffic."""
    row: dict[str, Any] = {}
    for direction, size in traffic.items():
        action = f"{name} {direction}"
        row[f"{direction}_ms"] = milliseconds(timings, action)
        row[f"{direction}_share_of_copy_rate"] = ratio(timings, "copy", action, size / (2 * COPIED_BYTES))
    return row


def peak_rate(device: torch.device, precision: str) -> tuple[float, str]:
    """Return the operations per second against which utilisation is stated, and what they are.

    On known GPUs in bf16 they are those of the data sheet; elsewhere those of the product of two square matrices, the
    fastest of ten.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for part, peak in PEAKS.items() if precision == "bfloat16" else ():
        if part in name:
            return peak, f"{peak / 1e12:.0f} TFLOP/s: data sheet of {part}, dense bf16"
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.randn(size, size, device=device, dtype=getattr(torch, precision))
    peak = 2 * size**3 / min(seconds_of(lambda: matrix @ matrix, device) for _ in range(10))
    return peak, f"{peak / 1e12:.3g} TFLOP/s: product of {size} x {size} matrices in {precision}"


def resolve_device(name: str) -> torch.device:
    """Return the device of a name, "auto" being CUDA if available; raises UserError for one that is not available."""
    if name.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise UserError(f"device {name!r}: choose cpu, cuda or auto")
    return find_device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


# --- memory


def kept_for_backward(function: Callable[[], object], *, besides: Iterable[Tensor] = ()) -> list[int]:
    """Run `function` and return the bytes of every piece of memory that its graph keeps, each piece once.

    Memory of `besides` (parameters, an input that a sublayer keeps anyway) is not counted.
    """
    return pieces(_run_and_save(function)[1], besides)


def traffic_of(
    forward: Callable[[], tuple[Tensor, ...]], rows: Sequence[Tensor], *, besides: Iterable[Tensor] = ()
) -> dict[str, int]:
    """Return the bytes that a "forward" pass over `rows` and its "backward" pass must move, each read or written once.

    Forward: the rows, the results, and what is kept for the backward pass. Backward: the gradients of the results, what
    was kept, and the gradients of the rows. Parameters (`besides`) are not counted.
    """
    results, kept = _run_and_save(forward)
    gradients = [torch.randn_like(result) for result in results]
    of_rows = [x for x in torch.autograd.grad(results, rows, gradients, allow_unused=True) if x is not None]
    moved = {"forward": [*rows, *results, *kept], "backward": [*gradients, *kept, *of_rows]}
    known = list(besides)
    return {direction: sum(pieces(tensors, known)) for direction, tensors in moved.items()}


def _run_and_save(function: Callable[[], Result]) -> tuple[Result, list[Tensor]]:
    """Run `function` and return its result and the tensors that autograd saves."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        return function(), kept


def pieces(tensors: Iterable[Tensor], besides: Iterable[Tensor]) -> list[int]:
    """Return the bytes of every piece of memory of some tensors, each once, but for that of `besides`."""
    known = {x.untyped_storage()._cdata for x in besides}
    sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors if x.numel()}
    return [size for address, size in sizes.items() if address not in known]


def allocated_by(function: Callable[[], Result], device: torch.device) -> tuple[int, int]:
    """Return the bytes that are allocated at the end of a function beyond those before it, and at its peak.

    Its result is alive at the end. On a CPU PyTorch's profiler reports allocations; Python's own are not counted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = function()
        torch.cuda.synchronize(device)
        end, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return end - before, peak - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()  # noqa: F841 - alive until the profiler ends
    events = profiler.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    held = [0, *accumulate(size for _, size in changes)]
    return held[-1], max(held)
