"""siamesenorm rewire: give the model in a local directory another residual topology, and write it to a new one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from typing_extensions import Doc

from siamesenorm.cli.output import print_notes
from siamesenorm.errors import UserError
from siamesenorm.files import encode_json
from siamesenorm.interop.rewire import RewireReport, rewire
from siamesenorm.interop.stored import detect
from siamesenorm.interop.stored_model import check_new, new_directory
from siamesenorm.norms import NormSpec, available_norms
from siamesenorm.topologies import available_topologies, build_topology, topology_to_json
from siamesenorm.training.config import LARGEST_SEED


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Give a model in a local directory another residual topology: of transformers, diffusers or timm, or a run's.

    The function is kept, exactly or up to the eps of a norm of a norm; the report says which, with a bound, and what
    became of every norm. The weights are written as safetensors, and no other code loads the model as what it was.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Directory of the model, with config.json and safetensors weights; or a run, a checkpoint, an exported model."""
    topology: Annotated[str, Doc(f"Topology, with options if any: {', '.join(available_topologies())}.")]
    out: Path
    """Directory to write, new or empty."""
    norm: Annotated[
        str | None, Doc(f"Operator of the new norms, the model's own by default: {', '.join(available_norms())}.")
    ] = None
    scratch: bool = False
    """Do not keep the function: start at the topology's own initial values, with its attention norm. A directory
    with no file of weights then gives a model with new ones."""
    seed: int = 0
    """Seed of those new weights."""
    data: Path | None = None
    """Prepared data of a run, where they were moved: the tokenizer is there."""
    json: bool = False
    """Print the report as JSON."""


def run(arguments: Arguments) -> None:
    """Check everything that can be checked, load, rewire, write whole or not at all, and print the report."""
    build_topology(arguments.topology)
    if arguments.norm is not None:
        NormSpec.parse(arguments.norm)
    stored = detect(arguments.model, data=arguments.data)
    check_new(arguments.out)
    if not 0 <= arguments.seed <= LARGEST_SEED:
        raise UserError(f"--seed is {arguments.seed}: choose a number from 0 to {LARGEST_SEED}")
    model = stored.initialise(arguments.seed) if arguments.scratch else stored.load()
    print_notes(stored.notes)
    report = rewire(model, arguments.topology, preserve=not arguments.scratch, norm=arguments.norm)
    with new_directory(arguments.out) as directory:
        stored.save(model, directory)
    text = f"{report}\nwritten: {arguments.out}"
    print(encode_json(_to_json(report, arguments), indent=1) if arguments.json else text)


def _to_json(report: RewireReport, arguments: Arguments) -> dict[str, Any]:
    """Return the report for machines."""
    differences = report.differences
    return {
        "model": str(arguments.model),
        "out": str(arguments.out),
        "topology": topology_to_json(report.topology),
        "blocks": report.blocks,
        "function_kept": report.function_kept,
        "bound": report.bound,
        "differences": None
        if differences is None
        else [{"kind": one.kind.name.lower(), "bound": one.bound, "detail": one.detail} for one in differences],
        "norms": [dataclasses.asdict(norm) for norm in report.norms],
    }
