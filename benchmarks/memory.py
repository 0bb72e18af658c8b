"""The memory that `siamesenorm sizes --memory` counts, beside what autograd's hooks and the allocator measure.

python benchmarks/memory.py    # writes memory.json and fills the table of docs/scale.md from it
"""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pages import fill_tables
from siamesenorm.benchmark.measurement import allocated_by, kept_for_backward
from siamesenorm.benchmark.memory import StepLayout, loss_of, memory_of
from siamesenorm.benchmark.results import Results, Row
from siamesenorm.models.language import build_language_model, language_model_config
from siamesenorm.training.execution import checkpoint_blocks

HERE = Path(__file__).parent
FILE, PAGE = HERE / "memory.json", HERE.parent / "docs/scale.md"
CPU = torch.device("cpu")
SHAPE = {"depth": 6, "dim": 256, "heads": 4, "hidden": 704, "vocabulary": 8192, "context": 256}
HUNDRED_MILLION = {"depth": 12, "dim": 768, "heads": 12, "hidden": 2048, "vocabulary": 10240, "context": 128}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how its step is taken."""

    topology: str
    layout: StepLayout = StepLayout(samples=4)
    fields: dict[str, Any] = field(default_factory=lambda: SHAPE)


CASES = {
    "pre": Case(topology="pre"),
    "siamese": Case(topology="siamese"),
    "dhc-2": Case(topology="dhc-2"),
    "attnres": Case(topology="attnres"),
    "siamese, bf16": Case(topology="siamese", layout=StepLayout(samples=4, precision="bfloat16")),
    "pre, 8 experts": Case(topology="pre", fields={**SHAPE, "experts": 8}),
    "siamese, checkpointed": Case(topology="siamese", layout=StepLayout(samples=4, checkpoint_activations=True)),
    "siamese, selective": Case(
        topology="siamese", layout=StepLayout(samples=4, checkpoint_activations=True, recomputation="selective")
    ),
    "pre, 102M": Case(topology="pre", layout=StepLayout(samples=2), fields=HUNDRED_MILLION),
    "siamese, 102M": Case(topology="siamese", layout=StepLayout(samples=2), fields=HUNDRED_MILLION),
}


def measure(name: str, case: Case) -> Row:
    """Return the parts as they are counted and as they are measured, in MB."""
    layout = case.layout
    config = language_model_config("nano", topology=case.topology, **case.fields).resolved(layout.precision)
    counted = memory_of(config, layout)
    model = build_language_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocabulary, (layout.samples, config.context + 1))
    if layout.checkpoint_activations:
        checkpoint_blocks(model, layout.recomputation)

    def step() -> None:
        loss_of(model, tokens, layout.precision).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.zero_grad()
    parameters = sum(p.nbytes for p in model.parameters())
    moments = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    allocated, _ = allocated_by(lambda: loss_of(model, tokens, layout.precision), CPU)
    kept = allocated
    if not layout.checkpoint_activations:  # what a checkpoint keeps is in no hook of others
        kept = sum(
            kept_for_backward(lambda: loss_of(model, tokens, layout.precision), besides=list(model.parameters()))
        )
    peak = parameters + moments + allocated_by(step, CPU)[1]
    total = counted.parameters + counted.gradients + counted.optimizer + counted.kept
    measured = parameters + gradients + moments + kept
    return {
        "configuration": name,
        "weights_MB": parameters / 1e6,
        "counted_kept_MB": counted.kept / 1e6,
        "kept_MB": kept / 1e6,
        "allocated_MB": allocated / 1e6,
        "counted_total_MB": total / 1e6,
        "total_MB": measured / 1e6,
        "counted_to_measured": total / measured,
        "peak_MB": peak / 1e6,
    }


def main() -> None:
    """Measure every case, write the file and fill the page."""
    torch.manual_seed(0)
    rows = []
    for name, case in CASES.items():
        rows.append(measure(name, case))
        gc.collect()
    settings = {name: dataclasses.asdict(case) for name, case in CASES.items()}
    Results(benchmark="memory", device="cpu", settings=settings, rows=rows).show(FILE)
    PAGE.write_text(fill_tables(PAGE.read_text(), PAGE.parent))


if __name__ == "__main__":
    main()
