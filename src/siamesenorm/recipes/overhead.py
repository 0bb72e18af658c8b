"""The cost claim of SiameseNorm (arXiv 2602.08064): what it adds to Pre-Norm in parameters, operations and memory."""

from __future__ import annotations

import torch

from siamesenorm.comparison import formatting
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import Column, Entry, Report, Row, RowGroup, Statements, Table, statements
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.models.language import build_language_model, language_model_config
from siamesenorm.recipes.published_numbers import find_published
from siamesenorm.recipes.scales import GPU_SPEED
from siamesenorm.topologies import build_topology

SIZES = ("390m-l17", "olmo-1.3b", "moe-15b-a2b")
METHODS = ("siamese", "siamese-post-pre")
BYTES = 2
"""Of a number of a stream in bfloat16."""
BANDWIDTH = 3.35e12
"""Bytes a second of an H100's memory."""


def overhead_report() -> Report:
    """Return the page of the cost claim, counted on the meta device."""
    row = find_published("cost", "", "siamese", None)
    stated = row.values if row else {}
    return Report(
        title="SiameseNorm, cost: what the second stream adds to Pre-Norm",
        subject=(
            f"Published: on a mixture of experts of 15 B parameters a step takes {stated['step_overhead']:g} % "
            f"longer and activations need {stated['memory_overhead']:g} % more memory.",
            "Nothing is trained here: models are built on the meta device and counted.",
        ),
        sections={
            "How to read this": Statements(
                statements(
                    {
                        "Traffic": "Bytes that the boundaries between sublayers move besides those of Pre-Norm, "
                        "forward and backward, as the topologies declare them and tests count them.",
                        "Step, estimated": f"That traffic at {BANDWIDTH / 1e12:g} TB/s over the model's operations at "
                        f"{GPU_SPEED / 1e12:g} TFLOP/s: an estimate for fused kernels on an H100, no measurement. "
                        "`siamesenorm bench step` measures.",
                        "Kept": "Bytes a token that boundaries keep for the backward pass besides those of Pre-Norm; "
                        "without checkpointing of activations.",
                        "Not shown here": "The published overhead of memory is of a whole training step with its "
                        "optimizer and experts; it was not measured here.",
                    }
                )
            ),
            "Overhead": overhead_table(),
        },
    )


def overhead_table() -> Table:
    """Build the table of what each form of SiameseNorm adds to Pre-Norm, by size."""
    columns = (
        Column("Topology", "the form of SiameseNorm", numeric=False),
        Column("Parameters", "more than those of Pre-Norm with the same attention norm"),
        Column("Operations", "more matrix products and attention"),
        Column("Traffic a token", "bytes of the boundaries more than Pre-Norm's"),
        Column("Step, estimated", "time of that traffic over that of the operations"),
        Column("Kept a token", "bytes more than Pre-Norm's"),
    )
    groups = tuple(RowGroup(size, tuple(_row(size, method) for method in METHODS)) for size in SIZES)
    return Table("Overhead", columns, groups)


def _row(size: str, method: str) -> Row:
    ours, base = (language_model_config(size, topology=name) for name in (method, "pre"))
    counts = []
    for config in (ours, base):
        model = build_language_model(config, device="meta")
        tokens = torch.zeros(1, config.context, dtype=torch.int64, device="meta")
        counts.append((count_parameters(model)[0], count_flops(model, tokens) / config.context))
    (parameters, operations), (least, operations_of_pre) = counts
    costs = [build_topology(name).cost for name in (method, "pre")]
    traffic = kept = None
    if costs[0] and costs[1]:
        unit = 2 * ours.depth * ours.dim * BYTES
        traffic = unit * (costs[0].forward + costs[0].backward - costs[1].forward - costs[1].backward)
        kept = unit * (costs[0].saved - costs[1].saved)
    slower = None if traffic is None else (traffic / BANDWIDTH) / (operations_of_pre / GPU_SPEED)
    return (
        Entry(method),
        Entry(formatting.percent(parameters / least - 1)),
        Entry(formatting.percent(operations / operations_of_pre - 1)),
        Entry(NOTHING if traffic is None else formatting.count(traffic)),
        Entry(NOTHING if slower is None else formatting.percent(slower)),
        Entry(NOTHING if kept is None else formatting.count(kept)),
    )
