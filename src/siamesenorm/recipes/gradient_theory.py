"""Gradients of Pre-Norm and Post-Norm: their norm by layer at initialisation, and their spikes without warm-up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.comparison.figure_style import Figure, styles_of
from siamesenorm.comparison.formatting import significant
from siamesenorm.comparison.report_parts import Column, Entry, RowGroup, Table
from siamesenorm.data.builtin import builtin_documents
from siamesenorm.models.initialisation import fill_normal
from siamesenorm.models.language import LanguageModel, build_language_model
from siamesenorm.recipes.theory import Claim, TheoryLine, TheoryResult, draw_lines, slope
from siamesenorm.sublayers.sublayer import Projection

SHAPE: dict[str, Any] = {
    **{"dim": 64, "heads": 4, "hidden": 256, "vocabulary": 257, "context": 64, "activation": "relu"},
    **{"attention_norm": "none", "norm": "layernorm", "tied": False},
}
"""Xiong et al. use post-activation ReLU layers, LayerNorm and no norm in the attention."""
BATCH, DOCUMENTS = 8, 400
GRADIENT_METHODS = ("pre", "post", "deepnorm", "siamese-post-pre")
DEPTHS = (4, 8, 16)
SEEDS = (0, 1, 2)
SPIKE_METHODS = ("pre", "post")
SPIKE_RATE = 8e-3
SPIKE_STEPS = 150
SPIKE_SIZE, SPIKES_AFTER = 2.0, 10
"""A spike is a global gradient norm above so many times the median of the run's later half, after so many steps."""


def gradient_at_init(methods: Sequence[str] = GRADIENT_METHODS, depths: Sequence[int] = DEPTHS) -> TheoryResult:
    """Measure the gradient norm of the MLP's first matrix by block at initialisation (Xiong et al., 2020).

    Means over three seeds of the norm of dL/dW1 for a batch of the built-in corpus as bytes, at Xavier initialisation
    (std sqrt(2 / (fan in + fan out)), times the factors that a topology declares), in fp32.
    """
    norms = {(method, depth): _first_matrix_gradients(method, depth) for method in methods for depth in depths}
    deepest, last = max(depths), {key: values[-1] for key, values in norms.items()}
    falls = {method: slope(depths, [last[method, depth] for depth in depths]) for method in methods}
    ratios = {method: norms[method, deepest][-1] / norms[method, deepest][0] for method in methods}
    rows = [
        (method, norms[method, deepest][0], last[method, deepest], ratios[method], falls[method]) for method in methods
    ]
    table = Table(
        "Gradient norm of the first matrix of the MLP at initialisation",
        (
            Column("Topology", "", numeric=False),
            Column("First block", f"of {deepest}"),
            Column("Last block", f"of {deepest}"),
            Column("Last / first", "how much larger the gradient is near the loss"),
            Column("Exponent in depth", "p in (last block's gradient) = c depth^p"),
        ),
        _rows(rows),
    )
    styles = styles_of(methods)
    lines = [TheoryLine(name=m, x=range(1, deepest + 1), y=norms[m, deepest], style=styles[m]) for m in methods]
    figure = Figure(
        name="gradient-at-init",
        title="Gradient norm by block at initialisation",
        caption=f"Norm of the gradient of the first matrix of the MLP, {deepest} blocks, mean over three seeds.",
        alternative="; ".join(f"{m}: {norms[m, deepest][0]:.3g} to {norms[m, deepest][-1]:.3g}" for m in methods),
        draw=lambda theme: draw_lines(
            lines, theme, title="Gradient norm at initialisation", x_label="block", y_label="gradient norm of W1"
        ),
    )
    pre, post = falls["pre"], falls["post"]
    claims = (
        Claim(
            text="With Post-Norm the gradient of the last block does not depend on the depth; with Pre-Norm it falls "
            "as one over its square root.",
            holds=abs(post) < 0.15 and abs(pre + 0.5) < 0.15,
            measured=f"exponents in depth {post:+.2f} (Post-Norm, 0 expected) and {pre:+.2f} (Pre-Norm, −0.5 expected)",
        ),
        Claim(
            text="With Post-Norm the gradient grows from block to block towards the output; with Pre-Norm it does not.",
            holds=ratios["post"] > 1.5 and ratios["pre"] < 1.0,
            measured=f"last over first block {ratios['post']:.2f} (Post-Norm) and {ratios['pre']:.2f} (Pre-Norm)",
        ),
    )
    by_method = {method: {str(depth): norms[method, depth] for depth in depths} for method in methods}
    return TheoryResult(
        name="gradient-at-init",
        title="Gradient norm by layer at initialisation",
        paper="2002.04745",
        setting=f"Language models of width {SHAPE['dim']} with {', '.join(map(str, depths))} blocks at Xavier "
        "initialisation, a batch of text as bytes, three seeds.",
        record={"shape": SHAPE, "seeds": list(SEEDS), "exponents": falls, "norms": by_method},
        table=table,
        figure=figure,
        claims=claims,
    )


def gradient_spikes(
    methods: Sequence[str] = SPIKE_METHODS, steps: int = SPIKE_STEPS, rate: float = SPIKE_RATE
) -> TheoryResult:
    """Measure the global gradient norm of the first steps without warm-up at a high rate, without clipping.

    AdamW (0.9, 0.95), constant rate, one seed, the built-in corpus as bytes (Salazar and Nguyen, arXiv 1910.05895).
    """
    curves = {method: _training_norms(method, steps, rate) for method in methods}
    spikes = {method: count_spikes(norms) for method, (norms, _) in curves.items()}
    peaks = {m: max(norms[SPIKES_AFTER:]) for m, (norms, _) in curves.items()}
    late = {m: statistics.median(norms[len(norms) // 2 :]) for m, (norms, _) in curves.items()}
    losses = {m: statistics.fmean(values[-10:]) for m, (_, values) in curves.items()}
    table = Table(
        f"The first {steps} steps without warm-up at learning rate {rate:g}",
        (
            Column("Topology", "", numeric=False),
            Column("First step", "global gradient norm"),
            Column("Largest later", f"global gradient norm after {SPIKES_AFTER} steps"),
            Column("Median, later half", "global gradient norm"),
            Column("Spikes", f"steps after {SPIKES_AFTER} above {SPIKE_SIZE:g} times that median"),
            Column("Loss at the end", "mean over ten steps (nats/token)"),
        ),
        _rows([(m, curves[m][0][0], peaks[m], late[m], str(spikes[m]), f"{losses[m]:.3f}") for m in methods]),
    )
    styles = styles_of(methods)
    lines = [TheoryLine(name=m, x=range(1, len(curves[m][0]) + 1), y=curves[m][0], style=styles[m]) for m in methods]
    figure = Figure(
        name="gradient-spikes",
        title="Global gradient norm over the first steps",
        caption=f"Without warm-up and clipping, AdamW at {rate:g}.",
        alternative="; ".join(
            f"{m}: largest after {SPIKES_AFTER} steps {peaks[m]:.3g}, median {late[m]:.3g}" for m in methods
        ),
        draw=lambda theme: draw_lines(
            lines, theme, title="Global gradient norm", x_label="step", y_label="gradient norm", markers=False
        ),
    )
    claim = Claim(
        text="Without warm-up at a high rate, Post-Norm's gradient norm has more spikes than Pre-Norm's.",
        holds=spikes["post"] > 2 * max(1, spikes["pre"]),
        measured=f"{spikes['post']} steps above {SPIKE_SIZE:g} times the later median with Post-Norm, {spikes['pre']} "
        f"with Pre-Norm; losses {losses['post']:.3f} and {losses['pre']:.3f}",
    )
    return TheoryResult(
        name="gradient-spikes",
        title="Gradient spikes without warm-up",
        paper="1910.05895",
        setting=f"Language models of width {SHAPE['dim']} with 8 blocks, {steps} steps of 8 sequences of bytes, AdamW "
        f"at {rate:g} from the first step, no clipping.",
        record={"rate": rate, "steps": steps, "norms": {m: curves[m][0] for m in methods}, "spikes": spikes},
        table=table,
        figure=figure,
        claims=(claim,),
    )


def count_spikes(norms: Sequence[float]) -> int:
    """Return how many norms after the first steps are above a multiple of the later median, or not finite."""
    limit = SPIKE_SIZE * statistics.median(norms[len(norms) // 2 :])
    return sum(not norm <= limit for norm in norms[SPIKES_AFTER:])


def xavier_model(topology: str, depth: int, seed: int) -> LanguageModel:
    """Return a language model whose projections have Xavier initialisation, times the factors of the topology."""
    model = build_language_model("nano", topology=topology, depth=depth, seed=seed, **SHAPE)
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            std = math.sqrt(2 / (module.in_features + module.out_features))
            factor = model.config.topology.initial_factor(module.role, depth)
            fill_normal(module.weight, std * factor, seed, f"{name}.weight")
    return model


def _first_matrix_gradients(topology: str, depth: int) -> list[float]:
    """Return the mean over seeds of the gradient norm of the MLP's first matrix, by block."""
    by_seed = []
    for seed in SEEDS:
        model, generator = xavier_model(topology, depth, seed), torch.Generator().manual_seed(seed)
        _loss(model, _batch(generator)).backward()  # type: ignore[no-untyped-call]
        weights = [model.get_parameter(f"blocks.{block}.mlp.up.weight") for block in range(depth)]
        by_seed.append([float(weight.grad.norm()) for weight in weights if weight.grad is not None])
    return [statistics.fmean(values) for values in zip(*by_seed, strict=True)]


def _training_norms(topology: str, steps: int, rate: float) -> tuple[list[float], list[float]]:
    """Return the global gradient norm and the loss of every step of a training without warm-up."""
    generator = torch.Generator().manual_seed(0)
    model = xavier_model(topology, 8, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), fused=True)
    norms, losses = [], []
    for _ in range(steps):
        loss = _loss(model, _batch(generator))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        losses.append(float(loss.detach()))
        optimizer.step()
    return norms, losses


def _rows(rows: Sequence[Sequence[str | float]]) -> tuple[RowGroup]:
    """Return the rows of a table, numbers with three digits."""
    texts = [[each if isinstance(each, str) else significant(each, 3) for each in row] for row in rows]
    return (RowGroup("", tuple(tuple(map(Entry, row)) for row in texts)),)


@cache
def _corpus() -> Tensor:
    """Return the front of the built-in corpus, as bytes."""
    return torch.tensor(list("".join(islice(builtin_documents(), DOCUMENTS)).encode()))


def _batch(generator: torch.Generator) -> Tensor:
    """Return sequences of the corpus, each with the byte behind it: [BATCH, context + 1]."""
    length = SHAPE["context"] + 1
    starts = torch.randint(len(_corpus()) - length, (BATCH,), generator=generator).tolist()
    return torch.stack([_corpus()[start : start + length] for start in starts])


def _loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
