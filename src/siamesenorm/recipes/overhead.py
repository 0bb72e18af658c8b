"""The cost claim of SiameseNorm (arXiv 2602.08064): what it adds to Pre-Norm in parameters, operations and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from siamesenorm.benchmark.memory import StepLayout, memory_of
from siamesenorm.comparison import formatting
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import Column, Entry, Report, Row, RowGroup, Statements, Table, statements
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.models.language import LanguageModelConfig, build_language_model, language_model_config
from siamesenorm.recipes.published_numbers import PublishedRow, published_rows
from siamesenorm.recipes.scales import GPU_SPEED
from siamesenorm.topologies import build_topology

SIZES = ("390m-l17", "olmo-1.3b", "moe-15b-a2b")
CLAIMED = "moe-15b-a2b"
"""The size of which the paper states the overhead."""
METHODS = ("siamese", "siamese-post-pre")
LAYOUT = StepLayout(precision="bfloat16", processes=64, shards=64)
BYTES = 2
"""Of a number of a stream in bfloat16."""
BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory."""


def overhead_report() -> Report:
    """Return the page of the cost claim, counted on the meta device."""
    stated = published_overhead()
    return Report(
        title="SiameseNorm, cost: what the second stream adds to Pre-Norm",
        subject=(
            f"Published: on a mixture of experts of 15 B parameters a step takes {stated.value('step_overhead'):g} % "
            f"longer and {stated.value('memory_overhead'):g} % more memory.",
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
                        "Kept": "Bytes per token that boundaries keep for the backward pass besides those of Pre-Norm; "
                        "without checkpointing of activations.",
                        "Memory": f"Of one process of {LAYOUT.shards} that share weights and optimizer state, with "
                        f"{LAYOUT.samples} sample in bfloat16, counted in eager PyTorch: with all activations kept, "
                        "and with every block recomputed, which keeps the streams between blocks. The paper does not "
                        "state its layout; fused kernels keep less.",
                        "Measured": "Step times on a CPU are in docs/cost.md. No GPU was available.",
                    }
                )
            ),
            "Published and ours": claim_table(),
            "Overhead": overhead_table(),
        },
    )


def published_overhead() -> PublishedRow:
    """Return the row of the published overheads."""
    return next(row for row in published_rows() if (row.item, row.method) == ("cost", METHODS[0]))


def claim_table() -> Table:
    """Build the table of the published overheads of the mixture of experts beside ours."""
    stated = published_overhead()
    columns = (
        Column("Overhead", "of a training step over Pre-Norm's", numeric=False),
        Column("Published", "for SiameseNorm Hybrid-Pre"),
        *(Column(method, "ours") for method in METHODS),
    )
    overheads = {method: overhead(CLAIMED, method) for method in METHODS}
    kept, recomputed = (
        {method: memory_of(_config(method), layout).total for method in ("pre", *METHODS)}
        for layout in (LAYOUT, replace(LAYOUT, checkpoint_activations=True))
    )
    rows = (
        ("time, estimated", stated.value("step_overhead"), {m: overheads[m].slower for m in METHODS}),
        ("memory, counted", stated.value("memory_overhead"), {m: kept[m] / kept["pre"] - 1 for m in METHODS}),
        ("memory with recomputed blocks, counted", None, {m: recomputed[m] / recomputed["pre"] - 1 for m in METHODS}),
    )
    written = tuple(
        (
            Entry(what),
            Entry(NOTHING if published is None else formatting.percent(published / 100)),
            *(Entry(NOTHING if (own := ours[m]) is None else formatting.percent(own)) for m in METHODS),
        )
        for what, published, ours in rows
    )
    return Table(f"Published and ours, {CLAIMED}", columns, (RowGroup("", written),))


def _config(method: str) -> LanguageModelConfig:
    return language_model_config(CLAIMED, topology=method).resolved(LAYOUT.precision)


def overhead_table() -> Table:
    """Build the table of what each form of SiameseNorm adds to Pre-Norm, by size."""
    columns = (
        Column("Topology", "the form of SiameseNorm", numeric=False),
        Column("Parameters", "more than those of Pre-Norm with the same attention norm"),
        Column("Operations", "more matrix products and attention"),
        Column("Traffic per token", "bytes of the boundaries more than Pre-Norm's"),
        Column("Step, estimated", "time of that traffic over that of the operations"),
        Column("Kept per token", "bytes more than Pre-Norm's"),
    )
    groups = tuple(RowGroup(size, tuple(_row(size, method) for method in METHODS)) for size in SIZES)
    return Table("Overhead", columns, groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What a form of SiameseNorm adds to Pre-Norm: parts of parameters, operations and time, and bytes per token."""

    parameters: float
    operations: float
    traffic: float | None
    slower: float | None
    kept: float | None


@cache
def overhead(size: str, method: str) -> Overhead:
    """Count what a method adds to Pre-Norm at a size; None where a topology declares no traffic."""
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
    return Overhead(
        parameters=parameters / least - 1,
        operations=operations / operations_of_pre - 1,
        traffic=traffic,
        slower=None if traffic is None else (traffic / BANDWIDTH) / (operations_of_pre / GPU_SPEED),
        kept=kept,
    )


def _row(size: str, method: str) -> Row:
    found = overhead(size, method)
    return (
        Entry(method),
        Entry(formatting.percent(found.parameters)),
        Entry(formatting.percent(found.operations)),
        Entry(NOTHING if found.traffic is None else formatting.count(found.traffic)),
        Entry(NOTHING if found.slower is None else formatting.percent(found.slower)),
        Entry(NOTHING if found.kept is None else formatting.count(found.kept)),
    )
