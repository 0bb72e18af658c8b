"""Logit lens: what the model predicts from the first blocks alone, and from each stream alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from siamesenorm.analysis.held_out import Analysis, HeldOut, PathParts, Results, replaced, without_blocks
from siamesenorm.analysis.stream_terms import closing_terms, require_closing_terms
from siamesenorm.errors import UserError
from siamesenorm.tasks.task import Task
from siamesenorm.topologies import Closing, Streams, Topology


@dataclass(frozen=True, kw_only=True)
class LogitLens(Analysis):
    """Loss and predictions of the streams after each block, and of each stream alone (section 5.2 of arXiv 2602.08064).

    At depth l the streams after the first l blocks go through the model's own closing and head, as in the logit lens;
    the later blocks are removed as in `Pruning`. "loss" and "agreement", the share of the model's most likely classes
    (tokens) that are the same, have L + 1 values.
    A single stream ("streams" by name) goes through its own term of the closing, then through the output norm and the
    head, with the terms of the other streams absent: in SiameseNorm Hybrid-Pre N_out(N^X_f(X)) and N_out(N^Y_f(Y)), in
    Post-Pre N^X(X) and N_f(Y), in Hyper-Connections N_f(H_i). Where the number of streams grows with the depth, only
    the last depth has single streams. "divergent": the share of predictions in which the single streams differ, and how
    often the model then agrees with each.
    """

    name: ClassVar[str] = "logit-lens"

    def require(self, task: Task) -> None:
        """Raise UserError for a task without classes to predict."""
        if not task.unit.startswith("nats"):
            raise UserError(
                f"{self.name} compares predicted classes, and the loss of this run is a {task.unit}: choose a run of a "
                "language model or a classifier; pruning gives the loss by depth of any run"
            )
        super().require(task)

    def require_model(self, model: nn.Module) -> None:
        """Raise UserError for a model whose streams have no terms in its closing."""
        super().require_model(model)
        path = PathParts.of(model)
        require_closing_terms(path.topology, path.closings[-1])

    def measure(self, held_out: HeldOut) -> Results:
        """Return losses and agreements."""
        path = PathParts.of(held_out.model)
        blocks, closing = list(path.blocks), path.closings[-1]
        with _predictions(held_out.model) as final:
            held_out.run()
        names = _streams_at_end(held_out, path)
        fixed = len(path.topology.name_streams(len(blocks) + 2)) == len(path.topology.stream_names)

        def lens(depth: int, stream: str | None) -> tuple[float, Tensor]:
            way = nullcontext() if stream is None else through(path.topology, closing, stream)
            with without_blocks(path, blocks[depth:]), way, _predictions(held_out.model) as found:
                return held_out.loss(), torch.cat(found)

        wanted, depths = torch.cat(final), range(len(blocks) + 1)
        views = {None: [lens(depth, None) for depth in depths]}
        singles = {name: [lens(depth, name) for depth in (depths if fixed else depths[-1:])] for name in names}
        last = {name: several[-1][1] for name, several in singles.items()}
        return {
            "blocks": len(blocks),
            "unit": held_out.unit,
            **_summarised(views[None], wanted),
            "streams": {name: _summarised(several, wanted) for name, several in singles.items()},
            "divergent": _divergent(last, wanted),
        }


@contextmanager
def through(topology: Topology, closing: Closing, stream: str) -> Iterator[None]:
    """Close one stream alone: its own term and the output norm, with the terms of the others absent."""

    def close(streams: Streams) -> Tensor:
        terms, finish = closing_terms(topology, closing, streams)
        return finish(terms[stream])

    with replaced(closing, "forward", close):
        yield


def _streams_at_end(held_out: HeldOut, path: PathParts) -> list[str]:
    """Return the names of the streams that the closing adds; none where it reads one alone."""
    names: dict[str, None] = {}
    closing = path.closings[-1]
    forward = closing.forward

    def close(streams: Streams) -> Tensor:
        names.update(dict.fromkeys(closing_terms(path.topology, closing, streams).terms))
        return forward(streams)

    with replaced(closing, "forward", close):
        held_out.run()
    return list(names) if len(names) > 1 else []


@contextmanager
def _predictions(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the most likely class of every item, one tensor for each batch."""
    found: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        found.append(output.logits.argmax(-1).flatten())

    handle = model.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def _summarised(views: list[tuple[float, Tensor]], wanted: Tensor) -> dict[str, list[float]]:
    agreements = [float((found == wanted).double().mean()) for _, found in views]
    return {"loss": [loss for loss, _ in views], "agreement": agreements}


def _divergent(last: dict[str, Tensor], wanted: Tensor) -> dict[str, Any] | None:
    if len(last) < 2:
        return None
    first, *others = last.values()
    differs = torch.stack([first != other for other in others]).any(0)
    if not bool(differs.any()):
        return {"share": 0.0, "agreement": {}}
    agreement = {name: float((found == wanted)[differs].double().mean()) for name, found in last.items()}
    return {"share": float(differs.double().mean()), "agreement": agreement}
