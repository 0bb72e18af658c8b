"""Measure the residual streams of any model while any loop trains it, and judge the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from siamesenorm.analysis.measured_step import MeasuredStep, listen, unwrapped
from siamesenorm.analysis.measurements import Key, Measurements
from siamesenorm.analysis.probes import Blocks, plan_probes
from siamesenorm.analysis.record import Line, LossHistory, Record, gradient_norm, streams_line, summary
from siamesenorm.errors import UserError
from siamesenorm.training.verdict import DEFAULT_THRESHOLDS, Thresholds, Verdict
from siamesenorm.world import ALONE, World

Number = Tensor | float


class StreamMonitor(AbstractContextManager["StreamMonitor"]):
    """Record stream magnitudes, update ratios and the loss of a training run, and judge it.

        with StreamMonitor(model, optimizer, path="runs/mine/metrics.jsonl") as monitor:
            for batch in batches:
                loss = ...
                loss.backward()
                optimizer.step()
                monitor.step(loss)
                optimizer.zero_grad()
        print(monitor.verdict().sentence())

    Probes are attached for a measured step only, and only read: an eager model is trained bit for bit as without them.
    So is a model of this package whose blocks are compiled one by one (`Module.compile`): it is measured at the edges
    of its blocks, outside their graphs. Any other compiled model runs uncompiled in a measured step, forward and
    backward: its loss and gradients, and so the weights after it, may differ by rounding from those without a monitor.

    Streams are measured in a model's connections (a model of this package, or a rewired one), or else at the edges of
    its blocks: `blocks` is the path of their list or the blocks, None finds the longest list of modules of one class.

    Measured are step 1 and every `every`-th one. Their lines, of kind "streams", have
    * `sublayers`, by name: `output` |O|, and for each of its `streams` before the output is added, `rms` |x| and `max`;
      `ratio` |O| / |x|; and `change`, by how much the write changed the stream, relative to |x|: unlike the ratio it
      includes output norms, gates and scales (absent where a fused connection leaves the write to the next one).
      |x| is the RMS over the width, averaged over tokens and micro-batches. For plain blocks O is what the block adds;
      compiled blocks have no O, and `change` is that of the whole block;
    * `end`: the streams after the last block, `rms` and `max`;
    * `blocks`, by name, and `other` for the rest: `gradient_norm`, `weight_norm` before the step, `update_norm`, and
      `update_ratio` ||delta w|| / ||w||; with `updates=False` neither is measured;
    * `gradient_norm` of the whole, and `learning_rate`.
    Lines of kind "train" have the loss of every step, and the gradient norm and the learning rate where known.

    With an `optimizer` (or several) the gradients are those at its step, and the copy of the weights that a measured
    step needs exists from its step to `monitor.step`. Without, the copy exists for the whole step, and the gradients
    are those present at `monitor.step`; so too where an optimizer computes its gradients in a closure.

    Args:
        path: File of the lines, readable by `siamesenorm verdict`; in memory without one. A file that is there is
            renamed to `<name>.old`, unless `resume`.
        resume: Continue the file at `path`, if it is there; a `step` or `attach(after=)` before its last step cuts the
            file back to that step.
        write: Function that takes every line, which is then not kept.
        steps_total, warmup_steps, floor, scale: What is known about the run, for the verdict; see `StabilityMonitor`.
        world: Processes over which streams are averaged, with a monitor in each; `write` is then called in all.

    In a distributed run every process needs a monitor; the first one writes, without `world` the measurements of its
    own streams. Norms of sharded gradients and weights are those of the whole.
    Raises UserError where no blocks can be found.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        every: int = 10,
        path: str | Path | None = None,
        resume: bool = False,
        write: Callable[[Line], None] | None = None,
        blocks: Blocks = None,
        updates: bool = True,
        steps_total: int | None = None,
        warmup_steps: int | None = None,
        floor: float | None = None,
        scale: float | None = None,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        world: World | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"model is {model!r}: give a torch.nn.Module")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UserError(f"every is {every!r}: give 1 to measure every step, or a larger whole number")
        self.model, self.every = model, every
        self._plan, self._updates = plan_probes(model, blocks), updates
        self._history = LossHistory(thresholds)
        self.expect(steps_total=steps_total, warmup_steps=warmup_steps, floor=floor, scale=scale)
        parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
        first = not parallel or torch.distributed.get_rank() == 0
        file = Path(path) if path is not None and first else None
        self._world = world or ALONE
        self._record = Record(file, resume=resume, write=write if first or world else None)
        lines = self._record.lines
        self._step = max((line["step"] for line in lines if "step" in line), default=0)
        self._history.restore(lines)
        self._losses: dict[int, dict[str, Number]] = {}
        self._learning_rate: Number | None = None
        self._measured: MeasuredStep | None = None
        self._hooks = ExitStack()
        self._optimizers: tuple[Optimizer, ...] = ()
        self._attached = self._fresh = self._has_measured = False
        self.attach(*optimizers)

    # --- the loop

    def step(
        self,
        loss: Number | None = None,
        *,
        step: int | None = None,
        gradient_norm: Number | None = None,
        learning_rate: Number | None = None,
    ) -> None:
        """Add a step of training, after the step of the optimizer.

        `loss` is the mean over the batch; a tensor is not waited for until a measured step. `step` is the number of the
        step, else steps are counted. `gradient_norm` is the norm before clipping, as clipping returns it.
        """
        if not self._attached:
            raise UserError("the monitor is closed: attach it again before its next step")
        number = self._number(step)
        if loss is not None:
            rate = self._learning_rate if learning_rate is None else learning_rate
            self.observe_loss(loss, step=number, gradient_norm=gradient_norm, learning_rate=rate)
        if self._measured is not None:
            self._record_measured(number, self._measured)
        stride = 1 if self._fresh else number - self._step
        self._step, self._fresh = number, False
        if self._is_due(number + stride):
            self._measure_next()

    def observe_loss(
        self,
        loss: Number,
        *,
        step: int,
        gradient_norm: Number | None = None,
        learning_rate: Number | None = None,
    ) -> None:
        """Add the loss of a step alone, for loops in which loss and step are separate events."""
        last = max(self._losses, default=self._history.last_step)
        if last is not None and step <= last:
            raise UserError(f"there is a loss of step {last} already: step {step} must be a later one")
        given = {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": learning_rate}
        for name, value in given.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UserError(f"{name} has the shape {tuple(value.shape)}: give one number, such as the batch's mean")
        # Copies: a replayed graph or an in-place change would alter the number before it is fetched.
        self._losses[step] = {
            name: value.detach().clone() if isinstance(value, Tensor) else float(value)
            for name, value in given.items()
            if value is not None
        }

    # --- results

    def verdict(self) -> Verdict:
        """Return the verdict on the losses so far; raises UserError without any."""
        self._flush(Measurements())
        return self._history.verdict()

    @property
    def should_stop(self) -> bool:
        """Whether the run has been lost for longer than the patience: ending it then cannot change its verdict.

        Losses still on a device count from the next measured step on. Raises UserError without `steps_total`.
        """
        if not any(isinstance(value, Tensor) for numbers in self._losses.values() for value in numbers.values()):
            self._flush(Measurements())
        return self._history.should_stop()

    @property
    def records(self) -> list[Line]:
        """The lines so far; those of the file where there is one."""
        self._flush(Measurements())
        return self._record.lines

    def summary(self) -> str:
        """Return a text table of the streams in the last measured step, with the first one beside it."""
        return summary(self.records)

    # --- attaching and closing

    def attach(self, *optimizers: Optimizer, after: int | None = None) -> None:
        """Monitor the model, and these optimizers, from the next step on; also again after `close`.

        `after` is the step after which the run continues: the records of later ones are dropped. Raises UserError where
        the file would keep no step: it is the record of another run.
        """
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer) and not hasattr(optimizer, "optimizer"):
                raise UserError(f"optimizer is {optimizer!r}: give a torch.optim.Optimizer")
        self._detach()
        if after is not None:
            self._cut_back(after)
        self._attached = self._fresh = True
        self._optimizers = tuple(map(unwrapped, optimizers))
        for optimizer in self._optimizers:
            self._hooks.callback(listen(optimizer, self.before_update).remove)
        if self._is_due(self._step + 1):
            self._measure_next()

    def expect(self, **facts: float | None) -> None:
        """Add facts about the run that are not known yet: steps_total, warmup_steps, floor, scale."""
        self._history.expect(facts)

    def close(self) -> None:
        """Restore model and optimizers, and complete the file."""
        self._detach()
        self._flush(Measurements())
        self._record.close()

    def __exit__(self, *error: object) -> None:
        """Close the monitor."""
        self.close()

    def _detach(self) -> None:
        self._stop_measuring()
        self._hooks.close()
        self._attached = False

    # --- measured steps

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def _measure_next(self) -> None:
        self._stop_measuring()
        self._measured = MeasuredStep(self.model, self._plan, updates=self._updates, remember=not self._optimizers)
        # A monitor that is deleted without `close` removes its probes.
        self._abandon = finalize(self, self._measured.abandon)

    def _stop_measuring(self) -> None:
        if self._measured is not None:
            self._abandon()
        self._measured = None

    def before_update(self, optimizer: Optimizer, gradients_are_there: bool = True) -> None:
        """Measure before an optimizer steps; only a loop that leaves its step out calls this itself."""
        if optimizer is self._optimizers[0]:
            rate = optimizer.param_groups[0]["lr"]
            self._learning_rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
        if self._measured is not None:
            self._measured.before_update(gradients_are_there=gradients_are_there)

    def _record_measured(self, step: int, measured: MeasuredStep) -> None:
        self._measured = None
        self._abandon.detach()
        values = self._flush(measured.finish(), step)
        self._has_measured = self._has_measured or any(key[0] == "sublayers" for key in values)
        if not self._has_measured:
            kind = type(self.model).__name__
            raise UserError(f"no block of {kind} ran in step {step}: monitor the model that is trained, not a copy")
        line = streams_line(step, values)
        if self._learning_rate is not None:
            line["learning_rate"] = float(self._learning_rate)
        self._append(line)

    # --- the record

    def _number(self, step: int | None) -> int:
        if step is None:
            return self._step + 1
        if step <= self._step:
            if not self._fresh:
                raise UserError(f"step {step} follows step {self._step}: number the steps upwards")
            self._cut_back(step - 1)
        return step

    def _cut_back(self, after: int) -> None:
        self._flush(Measurements())
        self._record.cut_back(after)
        self._history.cut_back(after)
        self._step = after

    def _flush(self, measured: Measurements, at_step: int | None = None) -> dict[Key, float]:
        """Fetch what was measured and the pending losses, and record the losses; return what was measured."""
        for step, numbers in self._losses.items():
            for name, value in numbers.items():
                if isinstance(value, Tensor):
                    measured.add(("train", str(step), name), value)
        values = measured.fetch(self._world)
        for step, numbers in self._losses.items():
            line = {name: float(values.get(("train", str(step), name), value)) for name, value in numbers.items()}
            if step == at_step and (norm := gradient_norm(values)) is not None:
                line.setdefault("gradient_norm", norm)
            self._append({"kind": "train", "step": step, **line})
            self._history.add(step, line["loss"], line.get("gradient_norm"))
        self._losses = {}
        return values

    def _append(self, line: Line) -> None:
        if self._record.is_empty:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            about = {"label": type(self.model).__name__, "parameters": parameters}
            facts = {"steps" if name == "steps_total" else name: fact for name, fact in self._history.facts.items()}
            streams = {"streams": list(self._plan.streams), "every": self.every}
            self._record.append({"kind": "model", **about, **facts, **streams})
        self._record.append(line)
