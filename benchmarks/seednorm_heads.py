"""Measure the variance of the gradient of SeeDNorm's dynamic term against its number of heads.

    python benchmarks/seednorm_heads.py benchmarks/seednorm_heads/variance.json runs/seednorm_heads/runs/*

The runs are those of a sweep over seednorm:heads=..., with their checkpoints. Each is measured with its initial weights
and with its last ones, on the same batches of training images.

The dynamic term of head h depends on s_h = x_h . beta_h. Its gradient, dL/ds_h = sigma'(s_h) sum_i alpha_i y_i dL/dn_i
over the channels i of the head (y = x/RMS(x), n the norm's output), is a dot product of D/heads terms: by Theorem 3.2
of arXiv 2510.22777 its variance is proportional to their number, so 1/heads of that of the sum over all channels, which
is the gradient that one head for all of them would have. Both are measured in the same model. At the initial weights
(beta = 0) the function of the model does not depend on the heads, and nothing else differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.norms import SeeDNorm
from siamesenorm.tasks.task import Task
from siamesenorm.training.checkpoint import load_checkpoint
from siamesenorm.training.run_directory import RunDirectory

BATCHES = 8
SAMPLES = 64


@dataclass
class Watched:
    """The dot products of one norm and the gradients of them and of beta, batch by batch."""

    products: list[Tensor] = field(default_factory=list)
    of_beta: list[Tensor] = field(default_factory=list)


def watch(norm: SeeDNorm) -> Watched:
    """Keep the dot products of a norm with their gradients from now on."""
    found, compute = Watched(), norm.dot_products

    def dot_products(x: Tensor) -> Tensor:
        products = compute(x)
        products.retain_grad()
        found.products.append(products)
        return products

    norm.dot_products = dot_products  # type: ignore[method-assign]
    return found


def measure(model: nn.Module, task: Task, batches: int = BATCHES, samples: int = SAMPLES) -> dict[str, float]:
    """Return the means over a model's SeeDNorms of the variances of their dynamic terms.

    `gradient` is that of dL/ds over tokens and heads, for the loss of one image, and `joined` that of its sum over the
    heads; `dot_product` that of s without its factor 1/D; `beta_gradient` that of an element of dL/dbeta over batches.
    """
    norms = [module for module in model.modules() if isinstance(module, SeeDNorm)]
    watched = [watch(norm) for norm in norms]
    model.train()
    for number in range(batches):
        model.zero_grad()
        task.loss(model, number * samples, samples).total.backward()  # type: ignore[no-untyped-call]
        for norm, found in zip(norms, watched, strict=True):
            assert norm.beta is not None and norm.beta.grad is not None
            found.of_beta.append(norm.beta.grad.clone() / samples)
    return {
        "gradient": mean(join(p.grad for p in each.products).var() for each in watched),
        "joined": mean(join(p.grad.sum(-1) for p in each.products if p.grad is not None).var() for each in watched),
        "dot_product": mean(
            (join(each.products) / norm.dot_scale).var() for norm, each in zip(norms, watched, strict=True)
        ),
        "beta_gradient": mean(torch.stack(each.of_beta).var(dim=0).mean() for each in watched),
    }


def join(parts: Iterable[Tensor | None]) -> Tensor:
    """Return the numbers of all tensors in one, in fp64."""
    return torch.cat([part.detach().double().flatten() for part in parts if part is not None])


def mean(values: Iterable[Tensor]) -> float:
    """Return the mean of 0-d tensors."""
    return float(torch.stack(list(values)).mean())


def measured_run(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one run: with its initial weights and with its last; raises UserError without a checkpoint."""
    config = RunDirectory(path).read_config()
    checkpoint = load_checkpoint(RunDirectory(path).checkpoints, groups=("model",))
    if checkpoint is None:
        raise UserError(f"{path} has no checkpoint: train it here, committed runs have their records alone")
    task = config.task.build(config.seed)
    rows = []
    for when, weights in (("initial", None), ("trained", checkpoint.tensors["model"])):
        model = task.build_model(torch.device("cpu"))
        if weights is not None:
            model.load_state_dict(weights)
        heads = {module.heads for module in model.modules() if isinstance(module, SeeDNorm)}
        if len(heads) != 1:
            raise UserError(f"{path} has norms of {sorted(heads) or 'no'} heads: name runs of one number of heads")
        rows.append({"heads": heads.pop(), "seed": config.seed, "weights": when, **measure(model, task)})
    return rows


def averaged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each number of heads, the means over seeds: variances of the gradient beside 1/heads."""

    def value(heads: int, when: str, of: Callable[[dict[str, Any]], float]) -> float:
        found = [of(row) for row in rows if (row["heads"], row["weights"]) == (heads, when)]
        return sum(found) / len(found)

    def share(row: dict[str, Any]) -> float:
        return float(row["gradient"] / row["joined"])

    return [
        {
            "heads": heads,
            "theorem": 1 / heads,
            **{f"gradient_{when}": value(heads, when, share) for when in ("initial", "trained")},
            "beta_gradient_initial": value(heads, "initial", itemgetter("beta_gradient"))
            / value(1, "initial", itemgetter("beta_gradient")),
            "dot_product_trained": value(heads, "trained", itemgetter("dot_product")),
        }
        for heads in sorted({row["heads"] for row in rows})
    ]


def main() -> None:
    """Measure the runs named on the command line."""
    out, *runs = map(Path, sys.argv[1:])
    rows = [row for run in runs for row in measured_run(run)]
    content = {"batches": BATCHES, "samples": SAMPLES, "rows": averaged(rows), "runs": rows}
    out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
