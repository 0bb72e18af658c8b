"""siamesenorm bench: speed and memory as ratios within one run, written with the environment to a results file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from siamesenorm.benchmark import boundary, peers, step
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
    "peers": ("stack", "compiled", "ms", "to_pre", "ours_to_peer", "kept_bytes"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure boundaries between sublayers, whole training steps, or ours beside other libraries."""

    what: Annotated[Literal["boundary", "step", "peers"], tyro.conf.Positional]
    """boundary: fused and compiled against the copy rate; step: topologies against Pre-Norm; peers: other packages."""
    out: Path | None = None
    """File for the results as JSON."""
    device: str = "auto"
    """cpu, cuda, or auto: CUDA where there is one."""
    rounds: int | None = None
    """Rounds, in each of which every candidate runs once."""
    topologies: tuple[str, ...] = ()
    """Topologies to measure instead of the usual ones."""


def run(arguments: Arguments) -> None:
    """Measure, write the file, print the table last."""
    results = measure(arguments)
    if arguments.out is not None:
        results.write(arguments.out)
        print(f"results: {arguments.out}", file=sys.stderr)
    for line in results.not_measured:
        print(f"not measured: {line}", file=sys.stderr)
    columns = [name for name in COLUMNS[arguments.what] if any(name in row for row in results.rows)]
    print(markdown(results.rows, columns))


def measure(arguments: Arguments) -> Results:
    """Return the results for the device: settings follow from what it can do."""
    device = resolve_device(arguments.device)
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}: choose at least 1")
    for name in arguments.topologies:
        build_topology(name)
    changes: dict[str, object] = {} if arguments.rounds is None else {"rounds": arguments.rounds}
    if arguments.topologies and arguments.what != "peers":
        changes["topologies"] = arguments.topologies
    if arguments.what == "boundary":
        return boundary.measure_boundaries(replace(boundary.settings_for(device), **changes), str(device))  # type: ignore[arg-type]
    if arguments.what == "step":
        return step.measure_steps(replace(step.settings_for(device), **changes), str(device))  # type: ignore[arg-type]
    return peers.measure_peers(replace(peers.PeerSettings(), **changes), str(device))  # type: ignore[arg-type]
