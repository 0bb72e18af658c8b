"""Plans of two large runs: memory by the calculator, tokens per second by a model of compute and communication.

    python benchmarks/scale_plan.py    # writes scale_plan.json and fills the tables of docs/scale.md from it

Nothing here is measured. The model, for a step of one process:

* compute: operations of its tokens over `RATE` (a third more where blocks are recomputed);
* shards: weights gathered twice in bf16 and gradients scattered once in fp32 for each micro-batch, over NVLink where a
  copy is inside a node, else over the network; replicas add gradients of a shard, read and written, over the network;
* experts: every chosen row sent and returned in bf16, forwards, backwards and where recomputed, over NVLink.

Shards are communicated beside compute, so a step takes the longer of the two; experts are waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pages import fill_tables
from siamesenorm.benchmark.measurement import PEAKS
from siamesenorm.benchmark.memory import StepLayout, memory_of
from siamesenorm.benchmark.results import Results, Row
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.models.language import LanguageModelConfig, build_language_model, language_model_config
from siamesenorm.sublayers.moe import ExpertProjection

HERE = Path(__file__).parent
FILE, PAGE = HERE / "scale_plan.json", HERE.parent / "docs/scale.md"
RATE = 0.45 * PEAKS["H100"]
"""Operations per second that a GPU reaches while it computes: an assumption, to be replaced by `bench step`."""
NVLINK, NETWORK, NODE = 300e9, 40e9, 8
"""Bytes per second of one GPU in one direction, two thirds and four fifths of the data sheets' 450 and 50; its node."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: model, tokens in all, samples of a step, and how its processes share them."""

    size: str
    topology: str
    tokens: float
    batch: int
    layout: StepLayout


def plan(size: str, topology: str, tokens: float, batch: int, processes: int, expert_shards: int = 1) -> Plan:
    """Return a plan in bf16 with rounded parameters and checkpointed blocks; it takes a step without accumulation."""
    step = StepLayout(
        samples=batch // processes, precision="bfloat16", bf16_parameters=True, checkpoint_activations=True,
        processes=processes, shards=NODE, expert_shards=expert_shards,
    )  # fmt: skip
    return Plan(size=size, topology=topology, tokens=tokens, batch=batch, layout=step)


PLANS = [
    *(plan("olmo-1.3b", name, 350e9, 512, 64) for name in ("pre", "siamese")),
    *(plan("moe-15b-a2b", name, 100e9, 256, 64, expert_shards=8) for name in ("pre", "siamese")),
]


def describe(planned: Plan) -> Row:
    """Return the row of a plan."""
    layout = planned.layout
    config = language_model_config(planned.size, topology=planned.topology, residual_dtype="bfloat16")
    memory = memory_of(config.resolved("bfloat16"), layout)
    seconds = step_seconds(config, layout)
    tokens = planned.batch * config.context
    rate = tokens / seconds["step"]
    return {
        "size": planned.size,
        "topology": planned.topology,
        "GPUs": layout.processes,
        "shards": layout.shards,
        "expert_shards": layout.expert_shards,
        "samples": layout.samples,
        "weights_and_moments_GiB": (memory.parameters + memory.gradients + memory.optimizer) / 2**30,
        "gathered_GiB": memory.gathered / 2**30,
        "kept_GiB": (memory.kept + memory.recomputed) / 2**30,
        "total_GiB": memory.total / 2**30,
        **{f"{name}_s": value for name, value in seconds.items()},
        "tokens_per_second": rate,
        "days": planned.tokens / rate / 86400,
    }


def step_seconds(config: LanguageModelConfig, layout: StepLayout) -> dict[str, float]:
    """Return the seconds of a step and of its parts."""
    model = build_language_model(config, device="meta")
    operations = layout.samples * count_flops(model, torch.zeros(1, config.context, dtype=torch.int64, device="meta"))
    passes = 4 if layout.checkpoint_activations else 3
    compute = operations * passes / 3 / RATE
    experts = sum(p.numel() for m in model.modules() if isinstance(m, ExpertProjection) for p in m.parameters())
    dense = count_parameters(model)[0] - experts
    inside = layout.shards <= NODE
    shards = 8 * dense * (layout.shards - 1) / layout.shards / (NVLINK if inside else NETWORK)
    replicas = layout.processes // layout.shards
    shards += 2 * 4 * dense / layout.shards * (replicas - 1) / replicas / NETWORK
    exchanged = 0.0
    if layout.expert_shards > 1:
        across = layout.processes // layout.expert_shards
        shards += 8 * experts / layout.expert_shards * (across - 1) / across / NETWORK
        rows = layout.samples * config.context * config.active_experts * config.depth
        share = (layout.expert_shards - 1) / layout.expert_shards
        exchanged = 2 * 2 * rows * config.dim * share * (passes - 1) / NVLINK
    return {
        "compute": compute,
        "shards": shards,
        "experts": exchanged,
        "step": max(compute, shards) + exchanged,
    }


def main() -> None:
    """Write the file and fill the page."""
    settings = {"operations_per_second": RATE, "nvlink": NVLINK, "network": NETWORK}
    rows = [describe(planned) for planned in PLANS]
    Results(benchmark="scale-plan", device="cpu", settings=settings, rows=rows).show(FILE)
    PAGE.write_text(fill_tables(PAGE.read_text(), PAGE.parent))


if __name__ == "__main__":
    main()
