"""The first abnormal quantities of a diverged run, by layer: `post-mortem.json` in its directory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.analysis.measured_step import uncompiled
from siamesenorm.analysis.measurements import Key, Measurements
from siamesenorm.analysis.probes import plan_probes
from siamesenorm.analysis.record import quotient, streams_line
from siamesenorm.training.execution import blocks_of
from siamesenorm.training.loop import Instrument, Record, TrainingLoop
from siamesenorm.training.run_record import read_metrics
from siamesenorm.training.verdict import Reason, Verdict
from siamesenorm.world import by_mesh, norms_of, whole

HISTORY, RECENT, SHOWN = 512, 8, 20
"""Steps whose gradient norms by layer are kept; those that are compared with the ones before; those in the file."""
LEAST_GROWTH = 1.5
"""Smallest growth that is reported."""
KINDS = ("weight", "update", "stream", "gradient")
"""What may have grown: causes before consequences."""
Rows = list[list[Tensor]]
"""The norms of all parameters, or of their gradients, at several steps: a tensor for each mesh."""


class PostMortem(Instrument):
    """Writes `post-mortem.json` when a loss or a gradient norm is not finite, or the loss has risen and stays up.

    It has `step`, `cause`, `loss`, `gradient_norm` and `rise_step`, the `last` steps, those `skipped`, and

    * `suspects`: `layer`, `what` ("weight", "output", "stream", "gradient", "update"), its `value`, and where it is
      finite the `usual` value before and their quotient `growth`. First is what is not finite: the first layer with
      such weights, or of the forward pass the first layer, or of gradients the last one, where the backward pass comes
      first. Then what has grown most, by half at least: of weights, updates, streams and gradients;
    * `layers`: by name the norms of weight and gradient, and the usual ones;
    * `sublayers` and `end`: the streams in a second forward pass over the batch, without dropout; see `StreamMonitor`.

    Norms of gradients are those that clipping has computed, and stay on the device; norms of weights are computed at
    each evaluation. All else is measured when the file is written, before the update: this instrument does not change
    the weights. Streams and updates have a usual value where the run is monitored (`MonitorInstrument`). A step that is
    skipped writes no file.
    """

    in_every_process = True

    def on_start(self, loop: TrainingLoop, step: int) -> None:
        """Remove the file of steps that are trained again."""
        names: dict[Tensor, str] = {p: name for name, p in loop.model.named_parameters() if p.requires_grad}
        # The parts that the optimizers update: whole parameters of FSDP come and go.
        self._parameters = by_mesh(names)
        self._names = [[names[each] for each in part] for part in self._parameters]
        self._weights: Rows = [self._weight_norms()]
        self._gradients: deque[list[Tensor]] = deque(maxlen=HISTORY)
        self._before_rise: tuple[Rows, Rows] | None = None
        self._last: Record = {}
        written = loop.world.on_first(loop.run_directory.read_post_mortem)
        self._written = written is not None and written["step"] <= step
        if written is not None and not self._written:
            loop.world.on_first(loop.run_directory.post_mortem_file.unlink)

    def before_update(self, loop: TrainingLoop, record: Record, norms: list[Tensor]) -> None:
        """Keep the norms of the gradients, and examine the step if the run is lost."""
        if not loop.monitor.steps_up:
            self._before_rise = None
        elif self._before_rise is None:
            self._before_rise = list(self._weights), list(self._gradients)
        if list(map(len, norms)) == list(map(len, self._names)):
            self._gradients.append(norms)
        self._last = record
        finite = math.isfinite(record["loss"]) and math.isfinite(record["gradient_norm"])
        if not finite and (not record.get("skipped") or loop.monitor.should_stop):
            self._examine(loop, Reason.NOT_FINITE)
        elif loop.monitor.rise_step is not None:
            self._examine(loop, Reason.ROSE_AND_STAYED)

    def on_validation(self, loop: TrainingLoop, record: Record) -> None:
        """Keep the norms of the weights."""
        self._weights.append(self._weight_norms())

    def on_end(self, loop: TrainingLoop, verdict: Verdict) -> None:
        """Examine a run that rose at its end."""
        if verdict.label == "diverged" and self._last:
            self._examine(loop, verdict.reasons[0])

    @torch.no_grad()
    def _weight_norms(self) -> list[Tensor]:
        return [norms_of(part) for part in self._parameters]

    def _examine(self, loop: TrainingLoop, cause: Reason) -> None:
        """Measure in all processes, and write the file in the first."""
        if self._written:
            return
        self._written = True
        line = streams_line(self._last["step"], _forward_again(loop, self._last["step"]))
        layers = self._layers(loop)
        finding = loop.world.on_first(lambda: self._finding(loop, cause, line, layers))
        loop.world.on_first(lambda: loop.run_directory.write_post_mortem(finding))
        loop.note(f"{loop.run_directory.post_mortem_file}: {'; '.join(sentences(finding).values())}")

    def _finding(self, loop: TrainingLoop, cause: Reason, line: Record, layers: dict[str, Record]) -> Record:
        records = [*read_metrics(loop.run_directory.metrics_file), self._last]
        steps = {record["step"]: record for record in records if record["kind"] == "train"}
        monitored = [record for record in records if record["kind"] == "streams"]
        rise, shown = loop.monitor.rise_step, ("step", "loss", "gradient_norm", "skipped")
        return {
            **{name: self._last[name] for name in shown[:3]},
            "cause": cause,
            "rise_step": rise,
            "suspects": [*_not_finite(line, layers), *_grown(layers, monitored, rise or self._last["step"])],
            "skipped": [number for number, record in steps.items() if record.get("skipped")],
            "last": [{name: each[name] for name in shown if name in each} for each in list(steps.values())[-SHOWN:]],
            "layers": layers,
            "sublayers": line["sublayers"],
            "end": line["end"],
        }

    def _layers(self, loop: TrainingLoop) -> dict[str, Record]:
        """Return by layer the norms of weight and gradient, and the usual ones."""
        gradients = list(self._gradients)
        usual_weights, usual_gradients = self._before_rise or (self._weights, gradients[:-1])
        tables: dict[str, Rows] = {
            "weight_norm": [self._weight_norms()],
            "usual_weight_norm": usual_weights,
            "gradient_norm": gradients[-RECENT if loop.monitor.rise_step else -1 :],
            "usual_gradient_norm": usual_gradients,
        }
        layers: dict[str, Record] = {layer_of(name): {} for name, _ in loop.model.named_parameters()}
        for quantity, rows in tables.items():
            squares: dict[str, Tensor] = {}
            for mesh, names in enumerate(self._names if rows else ()):
                columns = whole(torch.stack([row[mesh] for row in rows])).double().cpu().square().unbind(1)
                for name, column in zip(names, columns, strict=True):
                    squares[layer_of(name)] = squares.get(layer_of(name), 0) + column
            for layer, of_steps in squares.items():
                layers[layer][quantity] = _typical(of_steps.sqrt().tolist())
        return {name: layer for name, layer in layers.items() if layer}


def _typical(values: Sequence[float]) -> float:
    """Return the median of the finite values, or the last value where that is not finite."""
    return median(filter(math.isfinite, values)) if math.isfinite(values[-1]) else values[-1]


def layer_of(parameter: str) -> str:
    """Return the name of the sublayer that a parameter belongs to, or of the part of the model outside blocks."""
    parts = parameter.split(".")
    end = parts.index("blocks") + 3 if "blocks" in parts else 1
    return ".".join(parts[:end]).removesuffix("_connection")


@torch.no_grad()
def _forward_again(loop: TrainingLoop, step: int) -> dict[Key, float]:
    """Return what probes measure in the forward passes of a step: inside all blocks, which run uncompiled."""
    values = Measurements()
    with ExitStack() as opened:
        opened.enter_context(uncompiled())
        opened.enter_context(_without_graphs(list(blocks_of(loop.model))))
        loop.model.eval()  # the probes of a monitor do not count it, and it draws no random numbers
        opened.callback(loop.model.train)
        for probe in plan_probes(loop.model).probes:
            probe.in_evaluation = True
            opened.enter_context(probe.attached(values))
        for part in range(loop.parts):
            loop.forward(loop.seen + (step - 1) * loop.config.batch, part)
        if hasattr(loop.replica, "reshard"):  # FSDPModule: it would keep the weights before the update
            loop.replica.reshard()  # type: ignore[operator]
    return values.fetch(loop.world)


@contextmanager
def _without_graphs(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Call blocks without the graphs that they were compiled to."""
    compiled = [block._compiled_call_impl for block in blocks]
    for block in blocks:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, graph in zip(blocks, compiled, strict=True):
            block._compiled_call_impl = graph


def _not_finite(line: Record, layers: Mapping[str, Record]) -> list[Record]:
    """Return what is not finite and comes before everything else that is not."""
    for name, layer in layers.items():
        if not math.isfinite(layer["weight_norm"]):
            return [_suspect(name, "weight", layer["weight_norm"])]
    for name, sublayer in line["sublayers"].items():
        for stream, entry in sublayer["streams"].items():
            if not math.isfinite(entry["max"]):
                return [_suspect(name, "stream", entry["max"], stream=stream)]
        if not math.isfinite(sublayer.get("output", 0.0)):
            return [_suspect(name, "output", sublayer["output"])]
    for name, layer in reversed(list(layers.items())):
        if not math.isfinite(layer.get("gradient_norm", 0.0)):
            return [_suspect(name, "gradient", layer["gradient_norm"])]
    return []


def _grown(layers: Mapping[str, Record], monitored: Sequence[Record], rise: int) -> list[Record]:
    """Return what has grown most in relation to its own usual value, one of each kind."""
    grown = [
        _suspect(name, what, layer[f"{what}_norm"], usual=layer[f"usual_{what}_norm"])
        for name, layer in layers.items()
        for what in ("weight", "gradient")
        if f"usual_{what}_norm" in layer
    ]
    if monitored:
        last = _quantities(monitored[-1])
        histories = [_quantities(record) for record in monitored[:-1] if record["step"] < rise]
        for (name, what, stream), value in last.items():
            if usual := [each[name, what, stream] for each in histories if (name, what, stream) in each]:
                extra = {"stream": stream} if stream else {}
                grown.append(_suspect(name, what, value, usual=median(usual), **extra))
    grown = [each for each in grown if LEAST_GROWTH <= each["growth"] < math.inf]
    most = {each["what"]: each for each in sorted(grown, key=lambda each: each["growth"])}
    return [most[what] for what in KINDS if what in most]


def _quantities(record: Record) -> dict[tuple[str, str, str], float]:
    """Return the updates of the blocks and the magnitudes of the streams in a line of kind "streams"."""
    found = {(name, "update", ""): block.get("update_ratio", math.nan) for name, block in record["blocks"].items()}
    found |= {
        (name, "stream", stream): entry["rms"]
        for name, sublayer in record["sublayers"].items()
        for stream, entry in sublayer["streams"].items()
    }
    return {key: value for key, value in found.items() if math.isfinite(value)}


def _suspect(layer: str, what: str, value: float, *, usual: float | None = None, **extra: str) -> Record:
    compared = {} if usual is None else {"usual": usual, "growth": quotient(value, usual)}
    return {"layer": layer, "what": what, **extra, "value": value, **compared}


def sentences(finding: Mapping[str, Any]) -> dict[str, str]:
    """Return what a file says, a sentence for each topic."""
    rose = "" if finding["cause"] == Reason.NOT_FINITE else f"from step {finding['rise_step']} the loss stayed up; "
    numbers = f"loss {finding['loss']:.4g} and gradient norm {finding['gradient_norm']:.4g} at step {finding['step']}"
    seen = []
    for each in finding["suspects"]:
        what = f"stream {each['stream']}" if "stream" in each else each["what"]
        usual = f", {each['growth']:.3g} times its usual {each['usual']:.3g}" if "growth" in each else ""
        seen.append(f"{what} of {each['layer']} {each['value']:.3g}{usual}")
    return {
        "Divergence": rose + numbers,
        "First abnormal": "; then ".join(seen) or "all is finite, and nothing has grown by half",
    }
