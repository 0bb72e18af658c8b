"""Small models, ours and anyone's, and a plain loop that trains them under a `StreamMonitor`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from siamesenorm import LanguageModel, StreamMonitor, build_language_model

VOCABULARY, DIM = 11, 16


def tiny_model(topology: str = "siamese", **fields: Any) -> LanguageModel:
    """Return a model whose every parameter is random, gains and gates included."""
    sizes = {"depth": 2, "dim": DIM, "heads": 2, "hidden": 24, "vocabulary": VOCABULARY}
    model = build_language_model("nano", topology=topology, **{**sizes, **fields})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


class Block(nn.Module):
    """A residual block that returns a tuple, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, *, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden + self.linear(hidden), None


class PlainModel(nn.Module):
    """A model without any part of this package; `checkpointing` is that of `torch.utils.checkpoint`, if any."""

    def __init__(self, depth: int = 3, checkpointing: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, VOCABULARY)
        self.reentrant = checkpointing

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.reentrant is None:
                x, _ = layer(hidden=x)
            else:
                x = checkpoint(lambda x, layer=layer: layer(hidden=x)[0], x, use_reentrant=self.reentrant)
        return SimpleNamespace(logits=self.head(x))


def batches(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (2, 9), generator=generator) for _ in range(count)]


def cross_entropy(model: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())


def train(
    model: nn.Module,
    steps: int,
    *,
    monitored: bool = True,
    micro_batches: int = 1,
    give_optimizer: bool = True,
    **options: Any,
) -> tuple[list[float], list[dict[str, Any]]]:
    """Train as any loop does, and return the losses and the monitor's records."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = [optimizer] if give_optimizer else []
    monitor = StreamMonitor(model, *optimizers, **options) if monitored else None
    data, losses = iter(batches(steps * micro_batches)), []
    for _ in range(steps):
        total = torch.zeros(())
        for _ in range(micro_batches):
            loss = cross_entropy(model, next(data)) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(float(total))
        if give_optimizer:
            optimizer.zero_grad()  # what the optimizer saw is known
        if monitor:
            monitor.step(total)
        optimizer.zero_grad()
    if monitor is None:
        return losses, []
    monitor.close()
    return losses, monitor.records


def of_kind(kind: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def rms(x: Tensor) -> float:
    """The mean over tokens of the root of the mean square, by the book."""
    return float(x.double().pow(2).mean(-1).sqrt().mean())


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-5)
