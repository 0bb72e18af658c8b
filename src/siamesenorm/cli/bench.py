"""siamesenorm bench: speed and memory as ratios within one run, written with the environment to a results file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from siamesenorm.benchmark import boundary, norms, peers, registers, step
from siamesenorm.benchmark.results import Results, markdown
from siamesenorm.benchmark.timing import resolve_device
from siamesenorm.errors import UserError
from siamesenorm.topologies import build_topology

COLUMNS = {
    "boundary": (
        "topology", "dim", "streams", "candidate", "forward_ms", "backward_ms", "forward_share_of_copy_rate",
        "backward_share_of_copy_rate", "both_to_compiled", "kept_tensors", "kept_scalars_a_token",
    ),
    "step": (
        "topology", "candidate", "step_ms", "step_to_pre", "tokens_per_second", "kept_to_pre", "parameters_to_pre",
        "peak_bytes",
    ),
    "norms": (
        "norm", "dim", "candidate", "forward_ms", "backward_ms", "forward_share_of_copy_rate",
        "backward_share_of_copy_rate", "forward_to_rmsnorm", "backward_to_rmsnorm",
    ),
    "registers": ("boundary", "dim", "streams", "pass", "registers", "spilled_bytes", "threads", "loads_128"),
    "peers": ("stack", "compiled", "ms", "to_pre", "ours_to_peer", "kept_bytes"),
}  # fmt: skip


GPU_PARTS: tuple[Literal["boundary", "norms", "step"], ...] = ("boundary", "norms", "step")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure boundaries between sublayers, whole training steps, or ours beside other libraries."""

    what: Annotated[Literal["boundary", "norms", "step", "peers", "registers", "gpu"], tyro.conf.Positional]
    """boundary: fused and compiled against the copy rate; norms: SeeDNorm against RMSNorm; step: topologies against
    Pre-Norm; peers: other packages; registers: the kernels compiled for Hopper; gpu: boundary, norms and step on CUDA,
    unattended."""
    out: Path | None = None
    """File for the results as JSON; of gpu, a directory."""
    device: str = "auto"
    """cpu, cuda, or auto: CUDA where there is one."""
    rounds: int | None = None
    """Rounds, in each of which every candidate runs once."""
    topologies: tuple[str, ...] = ()
    """Topologies to measure instead of the usual ones."""


def run(arguments: Arguments) -> None:
    """Measure, write the file, print the table last."""
    if arguments.what == "gpu":
        run_on_gpu(arguments)
        return
    show(arguments.what, measure(arguments), arguments.out)


def show(what: str, results: Results, out: Path | None) -> None:
    """Write the results and print their table."""
    if out is not None:
        results.write(out)
        print(f"results: {out}", file=sys.stderr)
    for line in results.not_measured:
        print(f"not measured: {line}", file=sys.stderr)
    columns = [name for name in COLUMNS[what] if any(name in row for row in results.rows)]
    print(markdown(results.rows, columns))


def run_on_gpu(arguments: Arguments) -> None:
    """Measure what needs CUDA into one directory; without CUDA its files say that nothing was measured."""
    directory = arguments.out or Path("benchmarks/gpu")
    available = torch.cuda.is_available()
    for what in GPU_PARTS:
        if available:
            results = measure(replace(arguments, what=what, device="cuda"))
        else:
            reason = ["torch finds no CUDA device here"]
            results = Results(benchmark=what, device="cpu", settings={}, rows=[], not_measured=reason)
        show(what, results, directory / f"{what}.json")


def measure(arguments: Arguments) -> Results:
    """Return the results for the device: settings follow from what it can do."""
    device = resolve_device(arguments.device)
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: choose at least 1")
    for name in arguments.topologies:
        build_topology(name)
    rounds: dict[str, Any] = {} if arguments.rounds is None else {"rounds": arguments.rounds}
    chosen: dict[str, Any] = {"topologies": arguments.topologies} if arguments.topologies else {}
    match arguments.what:
        case "boundary":
            return boundary.measure_boundaries(replace(boundary.settings_for(device), **rounds, **chosen), str(device))
        case "norms":
            return norms.measure_norms(replace(norms.settings_for(device), **rounds), str(device))
        case "step":
            return step.measure_steps(replace(step.settings_for(device), **rounds, **chosen), str(device))
        case "registers":
            return registers.inspect_kernels()
        case _:
            return peers.measure_peers(replace(peers.PeerSettings(), **rounds), str(device))
