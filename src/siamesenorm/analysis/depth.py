"""How much of the depth a model uses: its loss without some blocks, and by how much each block changes the streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from siamesenorm.analysis.held_out import (
    Analysis,
    HeldOut,
    PathParts,
    Results,
    observed_reads,
    replaced,
    without_blocks,
    zeroed,
)
from siamesenorm.analysis.measurements import Measurements
from siamesenorm.analysis.probes import name_streams
from siamesenorm.errors import UserError
from siamesenorm.topologies import Streams


@dataclass(frozen=True, kw_only=True)
class Pruning(Analysis):
    """Held-out loss without blocks: each one alone, and the last n.

    "removed" leaves a block out: the streams skip it, and its own norms do not apply; where streams are
    post-normalised, the norm after the block before acts in the next read, or in the closing. "zeroed" writes zero in
    place of its outputs: reads and writes act, so that post-norms do. Both are the same for Pre-Norm, and differ where
    a write normalises, scales or mixes the streams. "last_removed" and "last_zeroed" have L + 1 values, of
    n = 0 to L last blocks (deep-layer pruning, arXiv 2403.17887); "loss" is that of the whole model.
    """

    name: ClassVar[str] = "pruning"

    def measure(self, held_out: HeldOut) -> Results:
        """Return the losses."""
        path = PathParts.of(held_out.model)
        names = list(path.blocks)
        whole = held_out.loss()
        lasts = [names[len(names) - count :] for count in range(1, len(names) + 1)]
        return {
            "blocks": len(names),
            "unit": held_out.unit,
            "loss": whole,
            "removed": [loss_without(held_out, path, [name]) for name in names],
            "zeroed": [loss_with_zeros(held_out, path, [name]) for name in names],
            "last_removed": [whole, *(loss_without(held_out, path, last) for last in lasts)],
            "last_zeroed": [whole, *(loss_with_zeros(held_out, path, last) for last in lasts)],
        }


def loss_without(held_out: HeldOut, path: PathParts, names: Sequence[str]) -> float:
    """Return the loss with blocks removed."""
    with without_blocks(path, names):
        return held_out.loss()


def loss_with_zeros(held_out: HeldOut, path: PathParts, names: Sequence[str]) -> float:
    """Return the loss with zero in place of what the sublayers of blocks return."""
    with zeroed(connection for name in names for connection in path.connections_of(name)):
        return held_out.loss()


@dataclass(frozen=True, kw_only=True)
class EffectiveDepth(Analysis):
    r"""How many blocks matter, by the loss and by the change of the streams.

    With \(h_l\) the rise of the held-out loss when block l is removed, at least 0:

    * "effective_blocks": \((\sum_l h_l)^2 / \sum_l h_l^2\), the participation ratio: L where all blocks matter alike, 1
      where one does; "harm" lists h;
    * "needed_blocks": the fewest first blocks with which the loss is within `tolerance` of the whole model's, in parts
      of what all blocks together gain;
    * "influence" by stream: of each block \(1 - \mathrm{mean}_t \cos(S_l, S_{l+1})\) (block influence, arXiv
      2403.03853), and "angle" \(\arccos(\cos)/\pi\), its mean over tokens (arXiv 2403.17887). \(S_l\) is the stream as
      the block's first read returns it, and at the end after the norm of the last addition, if there is one; None where
      a stream does not exist on both sides.
    """

    name: ClassVar[str] = "effective-depth"

    tolerance: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance < 1:
            raise UserError(f"tolerance is {self.tolerance}: choose a number from 0 to below 1")

    def measure(self, held_out: HeldOut) -> Results:
        """Return the measures."""
        path = PathParts.of(held_out.model)
        names = list(path.blocks)
        whole, changes = held_out.loss(), _changes(held_out, path)
        harm = [max(0.0, loss_without(held_out, path, [name]) - whole) for name in names]
        by_depth = [loss_without(held_out, path, names[count:]) for count in range(len(names))] + [whole]
        return {
            "blocks": len(names),
            "harm": harm,
            "effective_blocks": participation_ratio(harm),
            "needed_blocks": needed_blocks(by_depth, self.tolerance),
            **changes,
        }


def participation_ratio(values: Sequence[float]) -> float:
    """Return (sum v)^2 / sum v^2 of values of at least 0; 0 where all are 0."""
    squares = sum(value**2 for value in values)
    return sum(values) ** 2 / squares if squares else 0.0


def needed_blocks(by_depth: Sequence[float], tolerance: float) -> int:
    """Return the least n from which on the loss with n blocks is within the tolerance; `by_depth` has n = 0 to L."""
    first, last = by_depth[0], by_depth[-1]
    limit = last + tolerance * max(0.0, first - last)
    needed = len(by_depth) - 1
    while needed and by_depth[needed - 1] <= limit:
        needed -= 1
    return needed


def _changes(held_out: HeldOut, path: PathParts) -> dict[str, Any]:
    """Return influence and angle of every block by stream."""
    values, names = Measurements(), list(path.blocks)
    first = {next(n for n in path.connections if n.startswith(f"{name}.")): i for i, name in enumerate(names)}
    earlier: dict[str, Tensor] = {}

    def compare(index: int, streams: dict[str, Tensor], *, at_end: bool = False) -> None:
        for stream, x in streams.items():
            before = earlier.get(stream)
            if index and before is not None and before.shape == x.shape:
                cosine = torch.nn.functional.cosine_similarity(before.float(), x.float(), dim=-1)
                angle = cosine.clamp(-1, 1).arccos() / torch.pi
                values.add((stream, str(index - 1), "influence"), 1 - cosine.mean(), cosine.numel())
                values.add((stream, str(index - 1), "angle"), angle.mean(), cosine.numel())
        earlier.clear()
        if not at_end:
            earlier.update(streams)

    def observe(name: str, before: Streams, h: Tensor, after: Streams) -> None:
        if name in first:
            compare(first[name], name_streams(after, path.topology.name_streams, h))

    with ExitStack() as contexts:
        for stack, closing, count in zip(path.stacks, path.closings, path.ends, strict=True):
            close = _ending(closing, path, path.last_post_norm(stack), compare, count)
            contexts.enter_context(replaced(closing, "forward", close))
        with observed_reads(path.connections, observe):
            held_out.run()
    found = values.fetch()
    streams = dict.fromkeys(key[0] for key in found)
    return {
        what: {stream: [found.get((stream, str(i), what)) for i in range(len(names))] for stream in streams}
        for what in ("influence", "angle")
    }


def _ending(closing: Any, path: PathParts, post_norm: nn.Module, compare: Any, count: int) -> Any:
    """Return a closing that compares the streams after the last block, the first post-normalised, with those before."""
    forward = closing.forward

    def close(streams: Streams) -> Tensor:
        hidden: Tensor = forward(streams)
        if len(streams) >= len(path.topology.stream_names):
            first, *others = streams
            named = name_streams((post_norm(first), *others), path.topology.name_streams, hidden)
            compare(count, named, at_end=True)
        return hidden

    return close
