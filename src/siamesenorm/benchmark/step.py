"""bench step: a whole training step of every topology as a ratio to Pre-Norm's, in time, memory and kept bytes.

Model FLOPs utilisation is the operations of `count_flops` a second over a peak that each row names.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.benchmark.boundary import kernels_of, missing_kernels
from siamesenorm.benchmark.measurement import allocated_by, kept_for_backward, measure, milliseconds, peak_rate, ratio
from siamesenorm.benchmark.results import Results, Row, Session
from siamesenorm.models.cost import count_flops, count_parameters
from siamesenorm.models.language import LanguageModel, build_language_model
from siamesenorm.topologies import build_topology
from siamesenorm.training.execution import compile_blocks, require_compiler

REFERENCE = "pre"


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The model (width, depth, heads, MLP, vocabulary), the batch, and what is compared with what.

    A candidate is "plain", "compiled" (by block), "fused" or "lean" (by block, around such boundaries). Every candidate
    of a topology is compared with the same candidate of Pre-Norm, and with the fastest Pre-Norm: all others of the
    candidates run beside it. `precision` "bfloat16" is autocast with streams of `residual_dtype`.
    """

    topologies: tuple[str, ...] = ("pre", "post", "residual", "siamese", "siamese-post-pre", "dhc-2", "mhc-4")
    candidates: tuple[str, ...] = ("plain", "compiled")
    dim: int = 512
    depth: int = 4
    heads: int = 8
    hidden: int = 1408
    vocabulary: int = 4096
    batch: int = 2
    context: int = 512
    attention_norm: str = "qk"
    precision: str = "float32"
    residual_dtype: str = "inherit"
    rounds: int = 9


def settings_for(device: torch.device) -> StepSettings:
    """Return a width of 512 in fp32 on a CPU, and on CUDA four blocks of the 1.3B shape with bf16 streams."""
    if device.type != "cuda":
        return StepSettings()
    return StepSettings(
        topologies=("pre", "siamese", "siamese-post-pre", "post", "residual", "dhc-2", "mhc-4"),
        candidates=("fused", "compiled"), dim=2048, depth=4, heads=16,
        hidden=8192, vocabulary=50304, batch=8, context=2048, precision="bfloat16", residual_dtype="bfloat16",
        rounds=20,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A model with its optimizer and one batch: forward, backward, AdamW."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    tokens: Tensor
    precision: str

    @classmethod
    def build(cls, topology: str, candidate: str, settings: StepSettings, device: torch.device) -> TrainingStep:
        """Build the model, its blocks compiled unless they are plain."""
        resolved = build_topology(topology)
        model = build_language_model(
            "mini",
            topology=resolved,
            dim=settings.dim, depth=settings.depth, heads=settings.heads, kv_heads=0, hidden=settings.hidden,
            vocabulary=settings.vocabulary, context=settings.context, residual_dtype=settings.residual_dtype,
            attention_norm="auto" if resolved.attention_norm != "auto" else settings.attention_norm,
            compute_dtype=settings.precision if settings.residual_dtype != "inherit" else "inherit",
            kernels=kernels_of(candidate),
            device=device,
        )  # fmt: skip
        if candidate != "plain":
            require_compiler(str(device))
            compile_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(settings.vocabulary, (settings.batch, settings.context + 1), generator=generator)
        return cls(model=model, optimizer=optimizer, tokens=tokens.to(device), precision=settings.precision)

    def loss(self) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        reduced = self.precision == "bfloat16"
        with torch.autocast(self.tokens.device.type, dtype=torch.bfloat16, enabled=reduced):
            logits = self.model(self.tokens[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), self.tokens[:, 1:].flatten())

    def run(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def flops(self) -> int:
        """Return the floating-point operations of a step."""
        model = build_language_model(self.model.config, device="meta")
        return len(self.tokens) * count_flops(model, self.tokens[:1, :-1].to("meta"))

    def kept_bytes(self) -> int:
        """Return the bytes that the graph keeps besides parameters."""
        return sum(kept_for_backward(self.loss, besides=self.model.parameters()))


def measure_steps(session: Session[StepSettings]) -> Results:
    """Measure every candidate of every topology against the same candidate of Pre-Norm, in one interleaved run."""
    for candidate in session.settings.candidates:
        with session.part(f"steps, {candidate}") as rows:
            rows.extend(measure_candidate(candidate, session))
    return session.results


def measure_candidate(candidate: str, session: Session[StepSettings]) -> list[Row]:
    """Return a row for each topology that can be measured, none without Pre-Norm."""
    settings = session.settings
    torch._dynamo.reset()
    steps: dict[str, TrainingStep] = {}
    topologies = dict.fromkeys((REFERENCE, *settings.topologies))
    others = [(REFERENCE, each) for each in settings.candidates if each != candidate]
    for topology, each in [*others, *((topology, candidate) for topology in topologies)]:
        if absent := missing_kernels(topology, each):
            session.note(f"{each}, {absent}")
            continue
        with session.noting(f"{topology}, {each}"):
            session.check_time()
            step = TrainingStep.build(topology, each, settings, session.device)
            step.run()
            steps[topology if each == candidate else f"{topology}, {each}"] = step
    return compare(candidate, steps, session) if REFERENCE in steps else []


def compare(candidate: str, steps: dict[str, TrainingStep], session: Session[StepSettings]) -> list[Row]:
    """Return a row for each topology: step time, its ratio to Pre-Norm's, tokens per second, utilisation, memory.

    `steps` may have other candidates of Pre-Norm, as "pre, compiled": they have no row, but may be the fastest.
    """
    kept = {name: step.kept_bytes() for name, step in steps.items()}
    actions = {name: step.run for name, step in steps.items()}
    timings = measure(actions, device=session.device, rounds=session.settings.rounds, deadline=session.deadline)
    pre = [name for name in steps if name.split(", ")[0] == REFERENCE]
    best = min(pre, key=lambda name: statistics.median(timings[name]))
    tokens = session.settings.batch * session.settings.context
    peak, source = peak_rate(session.device, session.settings.precision)
    rows = []
    for name, step in steps.items():
        if name in pre and name != REFERENCE:
            continue
        parameters, _ = count_parameters(step.model)
        row: Row = {
            "topology": name,
            "candidate": candidate,
            "step_ms": milliseconds(timings, name),
            "step_to_pre": ratio(timings, name, REFERENCE),
            "tokens_per_second": tokens / statistics.median(timings[name]),
            "flops": (flops := step.flops()),
            "utilisation": flops / statistics.median(timings[name]) / peak,
            "peak": source,
            "kept_bytes": kept[name],
            "kept_to_pre": kept[name] / kept[REFERENCE],
            "parameters": parameters,
            "parameters_to_pre": parameters / count_parameters(steps[REFERENCE].model)[0],
        }
        if len(pre) > 1:
            row["step_to_best_pre"] = ratio(timings, name, best)
        step.optimizer.zero_grad(set_to_none=True)  # gradients are part of the peak
        row["peak_bytes"] = allocated_by(step.run, session.device)[1]
        rows.append(row)
    return rows
