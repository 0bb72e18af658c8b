"""The stream monitor as an instrument of the training loop: `siamesenorm train ... --monitor.every 50`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from siamesenorm.analysis.stream_monitor import StreamMonitor
from siamesenorm.errors import UserError
from siamesenorm.training.loop import Instrument, TrainingLoop


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """What to measure beside the loss; it is no part of the identity, for the run is the same without it."""

    every: int = 0
    """Measure streams, gradients and updates at step 1 and every so many steps; 0 for never."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError(f"monitor.every is {self.every}: give 0 for never, or a number of steps")

    def instruments(self) -> tuple[Instrument, ...]:
        """Return the instruments that measure this."""
        return (MonitorInstrument(self.every),) if self.every else ()


class MonitorInstrument(Instrument):
    """Writes lines of kind "streams" into the record of a run; see `StreamMonitor` for their fields.

    They are cut back with the record, so that a resumed run has the lines of one never interrupted. Of several
    processes, streams are averaged over all, and norms are those of the whole model.
    """

    in_every_process = True

    def __init__(self, every: int) -> None:
        self.every = every
        self.monitor: StreamMonitor | None = None

    def on_start(self, loop: TrainingLoop, step: int) -> None:
        """Attach the monitor to model and optimizer."""

        def write(line: dict[str, Any]) -> None:
            if line["kind"] == "streams":
                loop.record(line)

        self.monitor = StreamMonitor(loop.model, *loop.optimizers, every=self.every, write=write, world=loop.world)
        self.monitor.attach(*loop.optimizers, after=step)

    def before_update(self, loop: TrainingLoop, record: dict[str, Any], norms: list[Tensor]) -> None:
        """Measure the gradients of a step whose update is skipped: of others the optimizers announce it."""
        if self.monitor is not None and record.get("skipped"):
            for optimizer in loop.optimizers:
                self.monitor.before_update(optimizer)

    def on_step(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        """Record what was measured in this step, if anything was."""
        if self.monitor is not None:
            self.monitor.step(step=record["step"])

    def close(self) -> None:
        """Remove the probes."""
        if self.monitor is not None:
            self.monitor.close()
