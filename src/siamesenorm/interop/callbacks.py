"""`StreamMonitor` in Hugging Face's Trainer and in Lightning, each imported at the first use of its callback."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from siamesenorm.analysis.stream_monitor import StreamMonitor


class MonitorEvents:
    """What both callbacks share."""

    def __init__(self, monitor: StreamMonitor, *, stop_when_lost: bool = False) -> None:
        self.monitor, self.stop_when_lost = monitor, stop_when_lost

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore the model."""
        self.monitor.close()


class HuggingFaceEvents(MonitorEvents):
    """A callback of Hugging Face's `Trainer`: `Trainer(..., callbacks=[StreamMonitorCallback(monitor)])`.

    Make the monitor of the trainer's model; optimizer, length of the run and warm-up come from the trainer. The loss
    is what the trainer logs, the mean since its last log: `logging_steps=1` makes the verdict sharpest, and
    `logging_nan_inf_filter=False` includes losses that are not finite (there is a warning without it). With
    `stop_when_lost` a run ends once nothing can change its verdict. Where training resumes from a checkpoint, make the
    monitor with `resume=True` to continue its file.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        """Attach the monitor, after the step of the checkpoint if there is one."""
        if args.logging_nan_inf_filter:
            warnings.warn(
                "the Trainer leaves losses that are not finite out of its log, and so out of the verdict: set "
                "logging_nan_inf_filter=False",
                stacklevel=2,
            )
        self.monitor.expect(steps_total=state.max_steps, warmup_steps=args.get_warmup_steps(state.max_steps))
        self.monitor.attach(*([] if optimizer is None else [optimizer]), after=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add a step."""
        self.monitor.step(step=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Add the loss: only entries of training have this name in the log."""
        if not logs or "loss" not in logs:
            return
        others = {"gradient_norm": logs.get("grad_norm"), "learning_rate": logs.get("learning_rate")}
        self.monitor.observe_loss(logs["loss"], step=state.global_step, **others)
        if self.stop_when_lost and self.monitor.should_stop:
            control.should_training_stop = True


class LightningEvents(MonitorEvents):
    """A callback of Lightning: `Trainer(..., callbacks=[LightningStreamMonitor(monitor)])`.

    Make the monitor of the LightningModule, or of the network in it; optimizers and the length of the run come from
    the trainer. The loss is what `training_step` returns, averaged over micro-batches. With `stop_when_lost` a run ends
    once nothing can change its verdict. Where training resumes from a checkpoint, make the monitor with `resume=True`.
    """

    def __init__(self, monitor: StreamMonitor, *, stop_when_lost: bool = False) -> None:
        super().__init__(monitor, stop_when_lost=stop_when_lost)
        self._losses: list[Tensor] = []
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the monitor, after the step of the checkpoint if there is one."""
        steps = trainer.estimated_stepping_batches
        self.monitor.expect(steps_total=int(steps) if math.isfinite(steps) and steps > 0 else None)
        self.monitor.attach(*trainer.optimizers, after=trainer.global_step)
        self._step, self._losses = trainer.global_step, []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add a micro-batch, and a step after its last one."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Automatic optimization has divided the loss by the number of micro-batches.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach() * parts)
        if trainer.global_step == self._step:
            return
        mean = sum(self._losses) / len(self._losses) if self._losses else None
        self._step, self._losses = trainer.global_step, []
        self.monitor.step(mean, step=self._step)
        if self.stop_when_lost and self.monitor.should_stop:
            trainer.should_stop = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the model, and keep the losses before the exception."""
        self.monitor.close()


@cache
def __getattr__(name: str) -> Any:
    """Make a callback's class; raises ModuleNotFoundError where its library is not installed."""
    if name == "StreamMonitorCallback":
        events: type = HuggingFaceEvents
        base: type = importlib.import_module("transformers").TrainerCallback
    elif name == "LightningStreamMonitor":
        events = LightningEvents
        # Under the name that was imported: `lightning` and `pytorch_lightning` have different classes.
        older = "lightning" not in sys.modules and "pytorch_lightning" in sys.modules
        base = importlib.import_module("pytorch_lightning" if older else "lightning.pytorch").Callback
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (events, base), {"__doc__": events.__doc__, "__module__": __name__})
