"""siamesenorm bench: speed and memory as ratios within one run, written with the environment to a results file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from siamesenorm.benchmark import boundary, gpu, norms, peers, registers, step
from siamesenorm.benchmark.results import Results
from siamesenorm.benchmark.timing import resolve_device
from siamesenorm.errors import UserError
from siamesenorm.topologies import build_topology


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
    minutes: float = gpu.MINUTES
    """How long gpu may take; what no time is left for is noted as not measured."""


def run(arguments: Arguments) -> None:
    """Measure, write the file, print the table last."""
    check(arguments)
    if arguments.what == "gpu":
        gpu.measure_on_gpu(
            arguments.out or gpu.OUT,
            minutes=arguments.minutes,
            rounds=arguments.rounds,
            topologies=arguments.topologies,
        )
    else:
        measure(arguments).show(arguments.out)


def check(arguments: Arguments) -> None:
    """Raise UserError for what cannot be measured."""
    resolve_device(arguments.device)
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: choose at least 1")
    for name in arguments.topologies:
        build_topology(name)


def measure(arguments: Arguments) -> Results:
    """Return the results for the device: settings follow from what it can do."""
    device = resolve_device(arguments.device)
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
