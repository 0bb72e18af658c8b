"""Magnitudes of the streams by depth, and the share of each stream in what sublayers and the head read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from siamesenorm.analysis.held_out import Analysis, HeldOut, PathParts, Results, observed_reads, replaced
from siamesenorm.analysis.measurements import Key, Measurements
from siamesenorm.analysis.probes import ClosingProbe, name_streams, plan_probes
from siamesenorm.analysis.stream_terms import (
    closing_gains,
    closing_terms,
    input_gains,
    input_terms,
    require_several_streams,
)
from siamesenorm.topologies import Streams


@dataclass(frozen=True, kw_only=True)
class HiddenMagnitude(Analysis):
    r"""Magnitude of every stream by depth (Fig. 2a of arXiv 2602.08064), for any model with blocks.

    "streams" by name: "rms", the mean over tokens of \(\sqrt{\mathrm{mean}_d\, x^2}\), before each of "sublayers", as
    the read returns it (post-normalised), and last at the end (of an autoencoder, its decoder's), after the norm of the
    last addition, if there is one, and before final norms; None where a stream does not exist. "max" is the largest
    |x|. The paper's magnitude \(\|x\|_2\) is rms \(\sqrt d\). "output" is the RMS of each sublayer's output, "change",
    by stream, that of its change by the write, relative to the stream.
    """

    name: ClassVar[str] = "hidden-magnitude"

    def require_model(self, model: nn.Module) -> None:
        """Raise UserError for a model without blocks."""
        plan_probes(model)

    def measure(self, held_out: HeldOut) -> Results:
        """Return the magnitudes."""
        plan, values = plan_probes(held_out.model), Measurements()
        ends = [probe for probe in plan.probes if isinstance(probe, ClosingProbe)]
        with ExitStack() as contexts:
            for probe in plan.probes:
                if probe not in ends:
                    probe.in_evaluation = True
                    contexts.enter_context(probe.attached(values))
            if ends:
                contexts.callback(ends[-1].module.register_forward_hook(_measured_end(held_out.model, values)).remove)
            held_out.run()
        return by_depth(values.fetch(), len(plan.blocks))


def _measured_end(model: nn.Module, values: Measurements) -> Callable[..., None]:
    """Return a hook of the last closing that measures the streams it receives, the first one after its post-norm."""
    path = PathParts.of(model)
    post_norm = path.last_post_norm(list(path.stacks)[-1])

    def measure(closing: nn.Module, arguments: tuple[Streams], hidden: torch.Tensor) -> None:
        first, *others = arguments[0]
        for stream, x in name_streams((post_norm(first), *others), path.topology.name_streams, hidden).items():
            values.add_stream(("end", stream), x)

    return measure


def by_depth(measured: dict[Key, float], blocks: int) -> Results:
    """Return measurements of probes as lists over the depth."""
    sublayers = list(dict.fromkeys(key[1] for key in measured if key[0] == "sublayers"))
    streams = dict.fromkeys(key[-2] for key in measured if key[-1] == "rms")

    def over_depth(stream: str, quantity: str) -> list[float | None]:
        inside = [measured.get(("sublayers", name, "streams", stream, quantity)) for name in sublayers]
        return [*inside, measured.get(("end", stream, quantity))]

    relative = {}
    for name in streams:
        pairs = list(zip(over_depth(name, "change"), over_depth(name, "rms"), strict=True))[:-1]
        relative[name] = [change / x if change is not None and x else None for change, x in pairs]
    return {
        "blocks": blocks,
        "sublayers": sublayers,
        "streams": {name: {quantity: over_depth(name, quantity) for quantity in ("rms", "max")} for name in streams},
        "output": [measured.get(("sublayers", name, "output")) for name in sublayers],
        "change": relative,
    }


@dataclass(frozen=True, kw_only=True)
class StreamShare(Analysis):
    r"""Share of every stream in the input of each sublayer, \(s_i = m_i / \sum_j m_j\).

    "gains" (Fig. 6 of arXiv 2602.08064): m is the mean |gain| with which the stream enters the sum: of the norm on the
    stream, times that of a gate; None where it enters without one. "activations": m is the RMS of the stream's term in
    the sum that the sublayer's norm reads, averaged over tokens; this is defined for every topology.
    """

    name: ClassVar[str] = "stream-share"

    def require_model(self, model: nn.Module) -> None:
        """Raise UserError for a model with one stream."""
        super().require_model(model)
        require_several_streams(self.name, PathParts.of(model).topology)

    def measure(self, held_out: HeldOut) -> Results:
        """Return the shares."""
        path, values = PathParts.of(held_out.model), Measurements()

        def observe(name: str, before: Streams, h: torch.Tensor, after: Streams) -> None:
            for stream, term in input_terms(path.topology, path.connections[name], before, after).items():
                values.add_rms((name, stream), term)

        with observed_reads(path.connections, observe):
            held_out.run()
        terms = values.fetch()
        streams = dict.fromkeys(stream for _, stream in terms)
        gains = {name: input_gains(path.topology, each) for name, each in path.connections.items()}
        measured = {name: {s: terms[name, s] for s in streams if (name, s) in terms} for name in path.connections}
        return {
            "blocks": len(path.blocks),
            "sublayers": list(path.connections),
            "gains": _over_depth(list(streams), [shares(gains[name]) for name in path.connections]),
            "activations": _over_depth(list(streams), [shares(measured[name]) for name in path.connections]),
        }


def shares(magnitudes: dict[str, float] | None) -> dict[str, float]:
    """Return each value as a part of the sum; nothing where there are none, or all are 0."""
    total = sum((magnitudes or {}).values())
    return {name: value / total for name, value in (magnitudes or {}).items()} if total else {}


def _over_depth(streams: list[str], by_sublayer: list[dict[str, float]]) -> dict[str, list[float | None]]:
    return {name: [found.get(name) for found in by_sublayer] for name in streams}


@dataclass(frozen=True, kw_only=True)
class Fusion(Analysis):
    """The weight of every stream in the final state (section 5.2 of arXiv 2602.08064).

    "gains": the mean gain of the last norm that acts on the stream alone in the closing (0.42 for the identity stream
    of the paper's model, 1.05 for the bounded one), None for topologies whose closing weighs streams otherwise.
    "activations": the RMS of the stream's term in the final sum, averaged over tokens, and "shares" its part of the
    sum over streams. An autoencoder's are those of its decoder.
    """

    name: ClassVar[str] = "fusion"

    def require_model(self, model: nn.Module) -> None:
        """Raise UserError for a model with one stream in its final state."""
        super().require_model(model)
        require_several_streams(self.name, PathParts.of(model).topology)

    def measure(self, held_out: HeldOut) -> Results:
        """Return the weights."""
        path, values = PathParts.of(held_out.model), Measurements()
        closing = path.closings[-1]

        def close(streams: Streams) -> torch.Tensor:
            terms, finish = closing_terms(path.topology, closing, streams)
            for stream, term in terms.items():
                values.add_rms((stream,), term)
            return finish(torch.stack(tuple(terms.values())).sum(0))

        with replaced(closing, "forward", close):
            held_out.run()
        activations = {stream: value for (stream,), value in values.fetch().items()}
        return {
            "gains": closing_gains(path.topology, closing),
            "activations": activations,
            "shares": shares(activations),
        }
