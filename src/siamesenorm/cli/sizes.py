"""siamesenorm sizes: parameters, FLOPs and the memory of a training step, counted without allocating anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from rich.table import Table
from typing_extensions import Doc

from siamesenorm.benchmark.memory import StepLayout, memory_of
from siamesenorm.cli.output import console
from siamesenorm.errors import unknown
from siamesenorm.models.cost import count_active_parameters, count_flops, count_parameters
from siamesenorm.models.diffusion import SIZES as DIFFUSION_SIZES
from siamesenorm.models.diffusion import diffusion_transformer_config
from siamesenorm.models.language import GUESSED_SIZES, SIZES, language_model_config
from siamesenorm.models.masked_autoencoder import MAE_SIZES, masked_autoencoder_config
from siamesenorm.models.vision import SIZES as VISION_SIZES
from siamesenorm.models.vision import vision_transformer_config
from siamesenorm.topologies import available_topologies, build_topology

Family = Literal["language", "vision", "autoencoder", "diffusion"]
FAMILIES: dict[Family, tuple[Mapping[str, Any], Callable[..., Any]]] = {
    "language": (SIZES, language_model_config),
    "vision": (VISION_SIZES, vision_transformer_config),
    "autoencoder": (MAE_SIZES, masked_autoencoder_config),
    "diffusion": (DIFFUSION_SIZES, diffusion_transformer_config),
}
"""Named sizes of a family of models, and what returns the configuration of one."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Count parameters and FLOPs of every size, and what topologies add to Pre-Norm; or the memory of a step."""

    family: Family = "language"
    """Family of models."""
    topologies: Annotated[
        tuple[str, ...],
        Doc(f"Topologies to compare, the first is the reference: {', '.join(available_topologies())}."),
    ] = ("pre", "siamese", "siamese-post-pre", "dhc-2")
    memory: str = ""
    """Size of a language model: print the memory of one process in a training step, by part."""
    vocabulary: int = 50304
    """Token ids of a size whose vocabulary is that of the data, for its memory."""
    step: StepLayout = StepLayout()
    """How the step is taken, for its memory."""
    json: bool = False
    """Print JSON."""


def run(arguments: Arguments) -> None:
    """Print the table."""
    if arguments.memory:
        return show_memory(arguments)
    rows = [
        row for size in FAMILIES[arguments.family][0] for row in count(arguments.family, size, arguments.topologies)
    ]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(header_style="bold")
    flops = f"GFLOPs {'a token' if arguments.family == 'language' else 'an image'}"
    for column in ("size", "depth x width", "topology", "parameters", "active", "beyond the first", flops):
        table.add_column(column, justify="left" if column in ("size", "topology") else "right")
    for row in rows:
        first = row["topology"] == arguments.topologies[0]
        name = f"{row['size']} *" if row["shape_guessed"] else row["size"]
        table.add_row(
            *((name, f"{row['depth']} x {row['dim']}") if first else ("", "")),
            row["topology"],
            f"{row['parameters']:,}",
            f"{row['active_parameters']:,}" if row["active_parameters"] != row["parameters"] else "",
            "" if first else f"{row['extra_percent']:+.4f} %",
            f"{row['flops_per_item'] / 1e9:.3g}",
            end_section=row["topology"] == arguments.topologies[-1],
        )
    if any(row["shape_guessed"] for row in rows):
        table.caption = "* a shape that fits the published number of parameters; the paper does not state it"
    table.caption_justify = "left"
    console().print(table)


def show_memory(arguments: Arguments) -> None:
    """Print the memory of a step with every topology."""
    size, rows = arguments.memory, []
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    vocabulary = SIZES[size].get("vocabulary", arguments.vocabulary)
    for topology in arguments.topologies:
        config = language_model_config(size, topology=topology, vocabulary=vocabulary)
        memory = memory_of(config.resolved(arguments.step.precision), arguments.step)
        rows.append({"topology": topology, **dataclasses.asdict(memory), "total": memory.total})
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(header_style="bold", caption=f"{size}, GiB of one process", caption_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "topology" else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell / 2**30:.3g}" for cell in row.values()))
    console().print(table)


def count(family: Family, size: str, topologies: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a row a topology; operations are those of training on a token, or on an image."""
    rows: list[dict[str, Any]] = []
    _, config_of = FAMILIES[family]
    reference = 0
    for name in topologies:
        needs = build_topology(name).attention_norm
        config = config_of(size, topology=name, **({} if needs == "auto" else {"attention_norm": needs}))
        model = config.build(seed=0, device=torch.device("meta"))
        parameters, embedding = count_parameters(model)
        reference = reference or parameters
        rows.append(
            {
                "size": size,
                "shape_guessed": family == "language" and size in GUESSED_SIZES,
                "depth": config.depth,
                "dim": config.dim,
                "topology": name,
                "parameters": parameters,
                "active_parameters": count_active_parameters(model),
                "non_embedding_parameters": parameters - embedding,
                "extra_percent": 100 * (parameters - reference) / reference,
                "flops_per_item": round(count_flops(model, *config.inputs()) / getattr(config, "context", 1)),
            }
        )
    return rows
