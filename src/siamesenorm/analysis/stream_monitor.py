"""Watch the residual streams of any model while any loop trains it, and say how the run fares.

Every so many steps the monitor puts its probes on, and takes them off when the step is measured: in between the model
is as it was. It only reads, so training is bit for bit what it is without. A compiled model runs eagerly in a measured
step, which may differ from its compiled self by rounding, and costs what the model costs uncompiled.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from siamesenorm.analysis.blocks import Blocks, find_anatomy
from siamesenorm.analysis.loss_history import LossHistory
from siamesenorm.analysis.measured_step import MeasuredStep
from siamesenorm.analysis.measurements import Key, Measurements
from siamesenorm.analysis.optimizers import listen, unwrapped
from siamesenorm.analysis.record import Line, Record, gradient_norm, streams_line
from siamesenorm.analysis.weights import WeightProbe
from siamesenorm.errors import UserError
from siamesenorm.training.verdict import DEFAULT_THRESHOLDS, Thresholds, Verdict

Number = Tensor | float


class StreamMonitor:
    """Record stream magnitudes, update ratios and the loss of a training run, and judge it.

        with StreamMonitor(model, optimizer, path="runs/mine/metrics.jsonl") as monitor:
            for batch in batches:
                loss = ...
                loss.backward()
                optimizer.step()
                monitor.step(loss)
                optimizer.zero_grad()
        print(monitor.verdict().sentence())

    Streams are seen in a model's connections (a model of this package, or a rewired one), or else at the edges of
    its blocks: `blocks` names their list or holds them, None finds the longest list of modules of one class.

    Measured are step 1 and every `every`-th one. Their lines, of kind "streams", hold
    * `sublayers`, by name: `output` |O|, and for each of its `streams` before the output is added, `rms` |x| and `max`;
      `ratio` |O| / |x|; and `change`, by how much the write changed the stream, relative to |x|: unlike the ratio it
      knows output norms, gates and scales (absent where a fused connection leaves the write to the next one).
      |x| is the RMS over the width, averaged over tokens and micro-batches. For plain blocks O is what the block adds.
    * `end`: the streams after the last block, `rms` and `max`;
    * `blocks`, by name, and `other` for the rest: `gradient_norm`, `weight_norm` before the step, `update_norm`, and
      `update_ratio` ||delta w|| / ||w||; with `updates=False` neither is measured;
    * `gradient_norm` of the whole, and `learning_rate`.
    Lines of kind "train" hold the loss of every step, and what is known of the gradient norm and the learning rate.

    With an `optimizer` (or several) the gradients are those that it sees, and the copy of the weights that a measured
    step needs lives from its step to `monitor.step`. Without, the copy lives for the whole step, and the gradients are
    those still there at `monitor.step`; so too where an optimizer gets its gradients from a closure.

    With a `path`, lines are appended to that file, and a resumed run goes on: with `step=` earlier than the file's last
    step, the file is cut back. In a distributed run every process needs a monitor; the first one writes, what its
    own streams show. `siamesenorm verdict` reads the file. `steps_total`, `warmup_steps` and `unigram_entropy` (nats)
    sharpen the verdict where they are known. Raises UserError where no blocks can be found.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        every: int = 10,
        path: str | Path | None = None,
        blocks: Blocks = None,
        updates: bool = True,
        steps_total: int | None = None,
        warmup_steps: int | None = None,
        unigram_entropy: float | None = None,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
    ) -> None:
        if every < 1:
            raise UserError(f"every is {every}: measure every step (1) or fewer")
        self.model, self.every = model, every
        self._anatomy = find_anatomy(model, blocks)
        self._weights = WeightProbe(model, self._anatomy.blocks) if updates else None
        self._history = LossHistory(
            steps_total=steps_total,
            warmup_steps=warmup_steps,
            unigram_entropy=unigram_entropy,
            thresholds=thresholds,
        )
        self._record = Record(Path(path) if path is not None and _is_first_process() else None)
        lines = self._record.lines
        self._step = max((line["step"] for line in lines if "step" in line), default=0)
        self._history.restore(lines)
        self._losses: dict[int, dict[str, Number]] = {}
        self._learning_rate: Number | None = None
        self._measured: MeasuredStep | None = None
        self._hooks = ExitStack()
        self._optimizers: tuple[Optimizer, ...] = ()
        self._attached = self._fresh = self._seen = False
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
        """Take in a step of training, after the optimizer's.

        `loss` is the mean over the batch, in nats; a tensor is not waited for until a measured step. `step` numbers the
        step where the loop does, else they are counted. `gradient_norm` is what clipping returned: before clipping.
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
        """Take in the loss of a step alone, for loops that tell it apart from the step."""
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

    # --- what it says

    def verdict(self) -> Verdict:
        """Return the verdict on the losses so far: stable, spiked or diverged; raises UserError without any."""
        self._settle(Measurements())
        return self._history.verdict()

    @property
    def should_stop(self) -> bool:
        """Whether the run has been lost for longer than the patience: ending it then cannot change its verdict.

        Losses that are still on a device are looked at with the next measured step. Raises UserError without
        `steps_total`.
        """
        if not any(isinstance(value, Tensor) for numbers in self._losses.values() for value in numbers.values()):
            self._settle(Measurements())
        return self._history.should_stop()

    @property
    def records(self) -> list[Line]:
        """The lines so far, those of the file where there is one."""
        self._settle(Measurements())
        return self._record.lines

    # --- coming and going

    def attach(self, *optimizers: Optimizer, after: int | None = None) -> None:
        """Watch the model, and these optimizers, from the next step on; again after `close`, or anew.

        `after` is the step after which the run goes on: what was recorded of later ones is forgotten. Raises UserError
        where the file would keep no step: it is the record of another run.
        """
        self._detach()
        if after is not None:
            self._cut_back(after)
        self._attached = self._fresh = True
        self._optimizers = tuple(map(unwrapped, optimizers))
        for optimizer in self._optimizers:
            self._hooks.callback(listen(optimizer, self._before_update).remove)
        if self._is_due(self._step + 1):
            self._measure_next()

    def expect(
        self,
        *,
        steps_total: int | None = None,
        warmup_steps: int | None = None,
        unigram_entropy: float | None = None,
    ) -> None:
        """Learn about the run what is not known yet."""
        self._history.expect(steps_total=steps_total, warmup_steps=warmup_steps, unigram_entropy=unigram_entropy)

    def close(self) -> None:
        """Leave model and optimizers as they were, and the file complete."""
        self._detach()
        self._settle(Measurements())
        self._record.close()

    def __enter__(self) -> Self:
        """Return the monitor."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._measured = MeasuredStep(self._anatomy.probes, self._weights, remember=not self._optimizers)
        # A monitor that is dropped unclosed takes its probes along.
        self._abandon = finalize(self, self._measured.abandon)

    def _stop_measuring(self) -> None:
        if self._measured is not None:
            self._abandon()
        self._measured = None

    def _before_update(self, optimizer: Optimizer, gradients_are_there: bool) -> None:
        """Look at an optimizer that is about to step."""
        if optimizer is self._optimizers[0]:
            rate = optimizer.param_groups[0]["lr"]
            self._learning_rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
        if self._measured is not None:
            self._measured.before_update(gradients_are_there=gradients_are_there)

    def _record_measured(self, step: int, measured: MeasuredStep) -> None:
        self._measured = None
        self._abandon.detach()
        values = self._settle(measured.finish(), step)
        self._seen = self._seen or any(key[0] == "stream" for key in values)
        if not self._seen:
            raise UserError(
                f"no block of {type(self.model).__name__} ran in step {step}: monitor the model that is trained, not "
                "a copy of it"
            )
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
        self._settle(Measurements())
        self._record.cut_back(after)
        self._history.cut_back(after)
        self._step = after

    def _settle(self, measured: Measurements, at_step: int | None = None) -> dict[Key, float]:
        """Fetch what was measured and the losses that wait, and record the losses; return what was measured."""
        for step, numbers in self._losses.items():
            for name, value in numbers.items():
                if isinstance(value, Tensor):
                    measured.add(("train", str(step), name), value)
        values = measured.fetch()
        for step, numbers in self._losses.items():
            line = {name: float(values.get(("train", str(step), name), value)) for name, value in numbers.items()}
            norm = gradient_norm(values) if step == at_step else None
            if norm is not None:
                line.setdefault("gradient_norm", norm)
            self._append({"kind": "train", "step": step, **line})
            self._history.add(step, line["loss"], line.get("gradient_norm"))
        self._losses = {}
        return values

    def _append(self, line: Line) -> None:
        if self._record.is_empty:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            facts = {"label": type(self.model).__name__, "parameters": parameters, **self._history.facts()}
            streams = list(self._anatomy.streams)
            self._record.append({"kind": "model", **facts, "streams": streams, "every": self.every})
        self._record.append(line)


def _is_first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
