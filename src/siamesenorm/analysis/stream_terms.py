"""What each stream adds to the input of a sublayer and to the final state, and the learned gains on the way.

A read is N(sum_i t_i) and a closing N(sum_i t_i) with one term t_i for each stream: gate X and N^Y(Y) of the boundary
family, weighted streams of Hyper-Connections, weighted sources of Attention Residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.norms import Norm
from siamesenorm.topologies import Closing, Connection, Streams, Topology
from siamesenorm.topologies.attention_residuals import (
    AttentionResidual,
    AttentionResidualClosing,
    SourceMix,
    source_weights,
)
from siamesenorm.topologies.boundary_family import BoundaryClosing, BoundaryConnection, times
from siamesenorm.topologies.hyper_connections import HyperConnection, MixingConnection, MultiStream, SumClosing
from siamesenorm.topologies.manifold_hyper_connections import CollapseClosing
from siamesenorm.topologies.post_norm_family import SpanEnd
from siamesenorm.topologies.pre_norm_family import BlockStart, LambdaClosing, LambdaConnection
from siamesenorm.topologies.topology import Gate

Terms = dict[str, Tensor]


class ClosingTerms(NamedTuple):
    """The terms of a closing by stream, and what it does with their sum: output norm and compute dtype."""

    terms: Terms
    finish: Callable[[Tensor], Tensor]


def stream_count(topology: Topology) -> int:
    """Return the number of streams that a topology opens."""
    return topology.streams if isinstance(topology, MultiStream) else len(topology.stream_names)


def require_several_streams(name: str, topology: Topology) -> None:
    """Raise UserError for a topology with one stream."""
    if stream_count(topology) < 2:
        raise UserError(f"{name}: {topology.title} has one stream: choose a run with several, such as siamese")


def mean_of_copies(values: Mapping[str, float]) -> dict[str, float]:
    """Return values by stream with the mean of numbered ones: `streams[0]`, ... as `streams`, `source_0` as `source`.

    Numbered streams are interchangeable, or too many for a figure.
    """
    groups: dict[str, list[float]] = {}
    for name, value in values.items():
        groups.setdefault(name.partition("[")[0].rstrip("0123456789").rstrip("_"), []).append(value)
    return {name: sum(several) / len(several) for name, several in groups.items()}


def input_terms(topology: Topology, connection: Connection, before: Streams, after: Streams) -> Terms:
    """Return the terms of a read by stream, [..., dim]: N(sum of terms) is the sublayer's input.

    `before` are the streams given to the read, `after` those it returned. Raises UserError for other connections.
    """
    names = topology.stream_names
    if isinstance(connection, SpanEnd):
        return {names[0]: connection.post_norm(before[1])}
    if isinstance(connection, BoundaryConnection):
        terms = {names[0]: connection.gate(after[0])}
        if connection.identity_norm is not None:
            terms[names[1]] = connection.identity_norm(after[1])
        return terms
    if isinstance(connection, MixingConnection):
        wide = _wide(before[0])
        weights = before[1].to(wide) if len(before) > 1 else connection.mixing_weights(wide)[0]
        return _weighted(names[0], weights, wide)
    if isinstance(connection, AttentionResidual):
        return _sources(topology, connection.mix, before)
    if isinstance(connection, BlockStart):
        r, z = connection.residual_scale, connection.embedding_scale
        return {names[0]: r.to(before[0].dtype) * before[0], names[1]: z.to(before[0].dtype) * before[1]}
    if isinstance(connection, LambdaConnection):
        return {names[0]: before[0]}
    raise UserError(f"the terms of a {type(connection).__name__} are not defined: choose a topology of this package")


def closing_terms(topology: Topology, closing: Closing, streams: Streams) -> ClosingTerms:
    """Return the terms of the final state by stream; `finish` of their sum is what the closing returns.

    A single stream's way to the head is `finish` of its own term: the final norms, with the other streams absent. Of
    another closing of one stream it is the closing itself. Raises UserError for others, as `require_closing_terms`.
    """
    names, dtype = topology.stream_names, streams[0].dtype
    if isinstance(closing, BoundaryClosing):
        terms = {names[0]: times(closing.post_norm(streams[0]), closing.bounded_scale)}
        if closing.second_norm is not None:
            terms[names[-1]] = closing.second_norm(streams[1])
        return ClosingTerms(terms, lambda x: closing.to_compute(times(closing.last_norm(x), closing.output_scale)))
    if isinstance(closing, LambdaClosing):
        return ClosingTerms({names[0]: streams[0]}, lambda x: closing.to_compute(closing.norm(x)))
    if isinstance(closing, AttentionResidualClosing):
        terms = _sources(topology, closing.mix, streams)
    elif isinstance(closing, CollapseClosing):
        wide = _wide(streams[0])
        gates = streams[1].to(wide) if closing.logits is None else closing.logits(wide)[0].sigmoid() + closing.eps
        terms = _weighted(names[0], gates, wide)
    elif isinstance(closing, SumClosing):
        terms = {f"{names[0]}[{copy}]": one for copy, one in enumerate(streams[0].unbind(-2))}
    else:
        require_closing_terms(topology, closing)
        # Its own method: `closing.forward` may be replaced by a function of these terms.
        return ClosingTerms({names[0]: streams[0]}, lambda x: type(closing).forward(closing, (x,)))
    norm: nn.Module = closing.norm
    return ClosingTerms(terms, lambda x: closing.to_compute(norm(x).to(dtype)))


def require_closing_terms(topology: Topology, closing: Closing) -> None:
    """Raise UserError for a closing of several streams that is not of this package: its terms are not defined."""
    known = (
        BoundaryClosing, LambdaClosing, AttentionResidualClosing, CollapseClosing, SumClosing,
    )  # fmt: skip
    if not isinstance(closing, known) and len(topology.stream_names) > 1:
        raise UserError(f"the terms of a {type(closing).__name__} are not defined: choose a topology of this package")


def input_gains(topology: Topology, connection: Connection) -> dict[str, float] | None:
    """Return the mean |gain| of each stream's term of a read, None where a term has no learned gain.

    Of the bounded stream it is the product of its norm's gain and its gate, of static Hyper-Connections |A_m|.
    """
    names = topology.stream_names
    if isinstance(connection, BoundaryConnection) and not isinstance(connection, SpanEnd):
        gains = [_product(_gain(connection.post_norm), _gain(connection.gate))]
        gains += [] if connection.identity_norm is None else [_gain(connection.identity_norm)]
    elif isinstance(connection, BlockStart):
        gains = [connection.residual_scale, connection.embedding_scale]
    elif isinstance(connection, HyperConnection):
        return {f"{names[0]}[{copy}]": abs(float(weight)) for copy, weight in enumerate(connection.mix_in)}
    else:
        return None
    found = {name: float(gain.abs().mean()) for name, gain in zip(names, gains, strict=False) if gain is not None}
    return found if len(found) == len(gains) else None


def closing_gains(topology: Topology, closing: Closing) -> dict[str, float] | None:
    """Return the mean gain of each stream's last norm in the closing (section 5.2 of arXiv 2602.08064), else None."""
    if not isinstance(closing, BoundaryClosing):
        return None
    gains = [_gain(closing.post_norm)] + ([] if closing.second_norm is None else [_gain(closing.second_norm)])
    scale = 1.0 if closing.bounded_scale is None else float(closing.bounded_scale)
    means = [None if gain is None else float(gain.mean()) for gain in gains]
    first, *others = means
    scaled = [None if first is None else scale * first, *others]
    found = {name: mean for name, mean in zip(topology.stream_names, scaled, strict=False) if mean is not None}
    return found if len(found) == len(gains) else None


def _gain(part: nn.Module | None) -> Tensor | None:
    """Return the gain of a norm (1 for one without) or of a gate, in fp64; None for another part."""
    if isinstance(part, Gate):
        return part.gain.detach().double()
    if not isinstance(part, Norm):
        return None
    function = part.function()
    return torch.ones(1).double() if function.gain is None else function.gain.detach().double() + function.offset


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first * second


def _sources(topology: Topology, mix: SourceMix | None, streams: Streams) -> Terms:
    names = topology.name_streams(len(streams))
    if mix is None:
        return dict(zip(names, streams, strict=True))
    wide = [_wide(stream.movedim(mix.axis, -1)) for stream in streams]
    weights = source_weights((mix.query * mix.gain).to(wide[0].dtype), mix.eps, *wide) * mix.factor
    terms = (weight.unsqueeze(-1) * v for weight, v in zip(weights.unbind(-1), wide, strict=True))
    return dict(zip(names, terms, strict=True))


def _weighted(name: str, weights: Tensor, stacked: Tensor) -> Terms:
    scaled = weights.unsqueeze(-1) * stacked
    return {f"{name}[{copy}]": one for copy, one in enumerate(scaled.unbind(-2))}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
