"""siamesenorm rewire: give the model in a local directory another residual topology, and write it to a new one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from typing_extensions import Doc

from siamesenorm.errors import UserError
from siamesenorm.interop.export import new_directory
from siamesenorm.interop.local_directory import Source
from siamesenorm.interop.local_native import open_model
from siamesenorm.interop.rewire import RewireReport, rewire
from siamesenorm.norms import NormSpec, available_norms
from siamesenorm.topologies import available_topologies, build_topology, topology_to_json
from siamesenorm.training.exact_json import encode_json


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Give a model in a local directory another residual topology: of transformers, diffusers or timm, or a run's.

    The function is kept, exactly or up to the eps of a norm of a norm; the report says which, and what became of every
    norm. The weights that are written are safetensors, and no other code takes the model for what it was.
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
    source = open_model(arguments.model, data=arguments.data)
    refuse_rewired(source)
    refuse_occupied(arguments.out)
    model = source.start(arguments.seed) if arguments.scratch else source.load()
    with in_words_of_the_command():
        report = rewire(model, arguments.topology, preserve=not arguments.scratch, norm=arguments.norm)
    with new_directory(arguments.out) as directory:
        source.save(model, directory)
    print(
        encode_json(to_json(report, arguments), indent=1) if arguments.json else f"{report}\nwritten: {arguments.out}"
    )


def refuse_rewired(source: Source) -> None:
    """Raise UserError for a model with a topology of ours already."""
    for step in source.steps:
        if step.get("operation") == "rewire":
            topology = step.get("topology")
            name = topology.get("name") if isinstance(topology, dict) else None
            raise UserError(
                f"{source.directory} was rewired already, to {name or 'an unnamed topology'}: rewire the original"
            )


def refuse_occupied(out: Path) -> None:
    """Raise UserError where nothing new can be written."""
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: choose a new directory")
    first = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not first.is_dir():
        raise UserError(f"--out {out}: {first} is a file, choose another path")
    if not os.access(first, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {first} cannot be written to, choose another path or its permissions")


@contextmanager
def in_words_of_the_command() -> Iterator[None]:
    """Tell a refusal of `rewire` with this command's options in place of that function's arguments."""
    try:
        yield
    except UserError as refusal:
        words = str(refusal).replace("preserve=False", "--scratch").replace("preserve=True", "no --scratch")
        raise UserError(words) from refusal


def to_json(report: RewireReport, arguments: Arguments) -> dict[str, Any]:
    """Return the report for machines."""
    return {
        "model": str(arguments.model),
        "out": str(arguments.out),
        "topology": topology_to_json(report.topology),
        "blocks": report.blocks,
        "function_kept": report.function_kept,
        "exact": report.exact,
        "differences": report.differences,
        "norms": [dataclasses.asdict(norm) for norm in report.norms],
    }
