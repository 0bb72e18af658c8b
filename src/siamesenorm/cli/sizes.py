"""siamesenorm sizes: parameters, FLOPs and the memory of a training step, counted without allocating anything."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from typing_extensions import Doc

from siamesenorm.benchmark.memory import StepLayout, memory_of
from siamesenorm.errors import unknown
from siamesenorm.models.cost import count_active_parameters, count_flops, count_parameters
from siamesenorm.models.language import GUESSED_SIZES, SIZES, build_language_model, language_model_config
from siamesenorm.topologies import available_topologies


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Count parameters and FLOPs of every size, and what topologies add to Pre-Norm; or the memory of a step."""

    sizes: Annotated[tuple[str, ...], Doc(f"Sizes to count: {', '.join(SIZES)}.")] = tuple(SIZES)
    vocabulary: int = 50304
    """Token ids of sizes whose vocabulary is that of the data."""
    topologies: Annotated[
        tuple[str, ...],
        Doc(f"Topologies to compare, the first is the reference: {', '.join(available_topologies())}."),
    ] = ("pre", "siamese", "siamese-post-pre", "dhc-2")
    memory: bool = False
    """Count the bytes of a process in a training step instead, by part."""
    step: StepLayout = StepLayout()
    """How the step is taken."""
    json: bool = False
    """Print JSON."""


def run(arguments: Arguments) -> None:
    """Print the table."""
    for size in arguments.sizes:
        if size not in SIZES:
            raise unknown("size", size, SIZES)
    if arguments.memory:
        return show_memory(arguments)
    rows = [row for size in arguments.sizes for row in count(size, arguments.topologies)]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(header_style="bold")
    for column in ("size", "depth x width", "topology", "parameters", "active", "beyond the first", "GFLOPs a token"):
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
            f"{row['flops_per_token'] / 1e9:.3g}",
            end_section=row["topology"] == arguments.topologies[-1],
        )
    table.caption = "* a shape that fits the published number of parameters; the paper does not state it"
    table.caption_justify = "left"
    Console(width=None if Console().is_terminal else 120).print(table)


def show_memory(arguments: Arguments) -> None:
    """Print the memory of a step of every size and topology."""
    rows = []
    for size in arguments.sizes:
        for topology in arguments.topologies:
            shape = SIZES[size].get("vocabulary", arguments.vocabulary)
            config = language_model_config(size, topology=topology, vocabulary=shape).resolved(arguments.step.precision)
            memory = memory_of(config, arguments.step)
            rows.append({"size": size, "topology": topology, **dataclasses.asdict(memory), "total": memory.total})
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(header_style="bold", caption="GiB of one process", caption_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("size", "topology") else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell / 2**30:.3g}" for cell in row.values()))
    Console(width=None if Console().is_terminal else 120).print(table)


def count(size: str, topologies: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a row a topology."""
    rows: list[dict[str, Any]] = []
    reference = 0
    for name in topologies:
        config = language_model_config(size, topology=name)
        model = build_language_model(config, device="meta")
        parameters, embedding = count_parameters(model)
        tokens = torch.zeros(1, config.context, dtype=torch.int64, device="meta")
        reference = reference or parameters
        rows.append(
            {
                "size": size,
                "shape_guessed": size in GUESSED_SIZES,
                "depth": config.depth,
                "dim": config.dim,
                "topology": name,
                "parameters": parameters,
                "active_parameters": count_active_parameters(model),
                "non_embedding_parameters": parameters - embedding,
                "extra_percent": 100 * (parameters - reference) / reference,
                "flops_per_token": round(count_flops(model, tokens) / config.context),
            }
        )
    return rows
