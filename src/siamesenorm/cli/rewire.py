"""siamesenorm rewire: give the model in a local directory another residual topology, and write it to a new one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from typing_extensions import Doc

from siamesenorm.errors import UserError
from siamesenorm.files import encode_json
from siamesenorm.interop.export import check_new, new_directory
from siamesenorm.interop.local_directory import Source
from siamesenorm.interop.local_native import open_model
from siamesenorm.interop.rewire import RewireReport, rewire
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import NormSpec, available_norms
from siamesenorm.topologies import Topology, available_topologies, build_topology, topology_to_json
from siamesenorm.topologies.pre_norm import PreNorm


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
    topology = build_topology(arguments.topology)
    if arguments.norm is not None:
        NormSpec.parse(arguments.norm)
    source = open_model(arguments.model, data=arguments.data)
    refuse_rewired(source)
    check_new(arguments.out)
    model = source.start(arguments.seed) if arguments.scratch else source.load()
    if isinstance(model, LanguageModel):
        refuse_unreachable(model, topology, arguments)
    with in_words_of_the_command(topology):
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


def refuse_unreachable(model: LanguageModel, topology: Topology, arguments: Arguments) -> None:
    """Raise UserError for what a model of this library becomes by training alone."""
    remedy = f"train one that has it, siamesenorm train --model.topology {arguments.topology}"
    if arguments.scratch:
        raise UserError(f"--scratch on a model of this library: {remedy}")
    if isinstance(model.config.topology, PreNorm) and topology.pre_norm_refusal:
        raise UserError(
            f"{topology.title} cannot keep the function of a Pre-Norm model: {topology.pre_norm_refusal}; {remedy}, or "
            "choose a topology that can, such as siamese-post-pre"
        )


@contextmanager
def in_words_of_the_command(topology: Topology) -> Iterator[None]:
    """Tell a refusal of `rewire` with this command's options in place of that function's arguments."""
    try:
        yield
    except UserError as refusal:
        words = str(refusal).replace("siamesenorm.rewire with preserve=", "preserve=")
        if topology.pre_norm_refusal:  # without --scratch it would be refused as well
            words = words.replace(", or preserve=True", "")
        words = words.replace("preserve=False", "--scratch").replace("preserve=True", "no --scratch")
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
