"""siamesenorm bench: speed and memory as ratios within one run, with the environment in a results file."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from siamesenorm.benchmark import gpu
from siamesenorm.benchmark.measurement import resolve_device
from siamesenorm.benchmark.results import check_writable
from siamesenorm.errors import UserError
from siamesenorm.topologies import build_topology


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure boundaries between sublayers, norms or whole training steps, as ratios within one run."""

    what: Annotated[Literal["boundary", "norms", "step", "gpu"], tyro.conf.Positional]
    """boundary: fused and compiled against the rate of a copy; norms: SeeDNorm against RMSNorm; step: topologies
    against Pre-Norm; gpu: all three on CUDA, unattended."""
    out: Path | None = None
    """File for the results as JSON; of gpu, a directory."""
    device: str = "auto"
    """cpu, cuda, or auto: CUDA if available."""
    rounds: int | None = None
    """Rounds, in each of which every candidate runs once."""
    topologies: tuple[str, ...] = ()
    """Topologies to measure instead of the usual ones; boundary, step and gpu only."""
    minutes: float = gpu.MINUTES
    """Time limit of gpu; parts for which no time is left are noted as not measured."""


def run(arguments: Arguments) -> None:
    """Measure, write the file, print the table last."""
    check(arguments)
    given = {"rounds": arguments.rounds, "topologies": arguments.topologies}
    changes = {name: value for name, value in given.items() if value}
    if arguments.what != "gpu":
        gpu.measure_usual(arguments.what, arguments.device, changes).show(arguments.out)
        return
    with tempfile.TemporaryDirectory() as unused:
        gpu.measure_on_gpu(arguments.out or Path(unused), minutes=arguments.minutes, **changes)


def check(arguments: Arguments) -> None:
    """Raise UserError for what cannot be measured, and for results that could not be written afterwards."""
    resolve_device("cuda" if arguments.what == "gpu" else arguments.device)
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: choose at least 1")
    if arguments.topologies and arguments.what == "norms":
        raise UserError(f"--topologies {' '.join(arguments.topologies)}: norms are measured without a topology")
    for name in arguments.topologies:
        build_topology(name)
    if arguments.out is not None:
        check_writable(arguments.out / "boundary.json" if arguments.what == "gpu" else arguments.out)
