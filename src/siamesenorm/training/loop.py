"""The train loop, one for every task: batches, optimizers, record, verdict, checkpoints, exact resume.

A checkpoint holds parameters, optimizer, random state and the length of the record. Resuming cuts the record back to
that length: the order of the data is stateless, so nothing else needs to be stored. Killed at any moment and resumed, a
run ends with the same bits as one never interrupted, but for the time fields and the notes of its record. On SIGTERM
and SIGINT it writes a checkpoint after the step under way and raises `Interrupted`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.tasks.task import Losses
from siamesenorm.training import execution
from siamesenorm.training.checkpoint import (
    Checkpoint,
    capture_random_state,
    load_checkpoint,
    restore_random_state,
)
from siamesenorm.training.config import RunConfig
from siamesenorm.training.optimizer import (
    SpikeFilter,
    build_optimizers,
    clip_gradients,
    empty_state,
    optimizer_tensors,
    restore_optimizers,
    set_learning_rate,
)
from siamesenorm.training.parallel import parallelise, shards_of, share_batch, synchronise_gradients
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import MetricsLog, read_metrics
from siamesenorm.training.stop_signals import Interrupted, StopSignals
from siamesenorm.training.verdict import StabilityMonitor, Verdict
from siamesenorm.training.warm_start import load_start, require_start
from siamesenorm.training.weight_average import WeightAverage
from siamesenorm.world import World, shard_like

if TYPE_CHECKING:
    from siamesenorm.training.distributed_checkpoint import CheckpointSaver

Record = dict[str, Any]


class Instrument:
    """What watches a run: it reads what it needs from the loop; every method does nothing by default."""

    reads_parameters: ClassVar[bool] = False
    """Whether it needs whole parameters, which a process of a sharded run does not have."""
    in_every_process: ClassVar[bool] = False
    """Whether every process of a run has it, because it measures together with the others; else the first has."""

    def on_start(self, loop: TrainingLoop, step: int) -> None:
        """Training starts, or resumes after `step`."""

    def on_record(self, loop: TrainingLoop, record: Record) -> None:
        """A record of any kind was written."""

    def before_update(self, loop: TrainingLoop, record: Record, norms: list[Tensor]) -> None:
        """The gradients of a step are there, and clipped; `norms` are those of each before; see `clip_gradients`."""

    def on_step(self, loop: TrainingLoop, record: Record) -> None:
        """An optimizer step was recorded."""

    def on_validation(self, loop: TrainingLoop, record: Record) -> None:
        """An evaluation was recorded."""

    def on_note(self, loop: TrainingLoop, line: str) -> None:
        """A line for people was recorded."""

    def on_end(self, loop: TrainingLoop, verdict: Verdict) -> None:
        """The run is finished."""

    def close(self) -> None:
        """The run has ended, or failed."""


def train(config: RunConfig, directory: Path, *, instruments: tuple[Instrument, ...] = ()) -> Verdict:
    """Train the run of `config` in `directory`, or resume it, and return its verdict.

    A finished run is not trained again. Raises UserError when the directory belongs to another configuration, for data
    that do not fit, and on a full disk; what cannot be trained leaves no directory behind. Raises Interrupted after
    SIGTERM or SIGINT, with a whole checkpoint of the last step.
    """
    config, run = config.resolved(), RunDirectory(directory)
    device = execution.find_device(config.execution.device)
    with World.joined(device, even_alone=config.bf16_parameters) as world, ExitStack() as held:
        finished = world.on_first(lambda: run.verdict_of(config))
        if finished is not None:
            return finished
        loop = TrainingLoop(config, run, world, instruments)
        try:
            world.on_first(lambda: held.enter_context(run.claimed(config)))
            return world.on_first(run.read_verdict) or loop.run()
        finally:
            for instrument in instruments:
                instrument.close()


class TrainingLoop:
    """One run, in one process or several; the first one writes its files and has its instruments."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        world: World,
        instruments: tuple[Instrument, ...] = (),
    ) -> None:
        if config.execution.threads:
            torch.set_num_threads(config.execution.threads)
        self.config, self.run_directory, self.world = config, run, world
        self.instruments = tuple(each for each in instruments if world.is_first or each.in_every_process)
        sharded = config.is_sharded(world.size)
        if sharded and any(i.reads_parameters for i in instruments):
            cause = "bf16_parameters is true" if config.bf16_parameters else "parallel is shard"
            raise UserError(f"{cause}: evaluation.every needs whole parameters: change it, or leave it out")
        if not run.checkpoints.exists():
            require_start(config)
        self.device = world.device
        torch.manual_seed(config.seed + world.rank)
        self.task = config.task.build(config.seed)
        blueprint = self.task.build_model(torch.device("meta"))
        self.share, self.at_once = share_batch(blueprint, config, world)
        self.parts = self.share // self.at_once
        self.seen = config.warm_start.position if config.warm_start else 0
        execution.require_memory(blueprint, self.device, shards_of(config, world))
        self.description = self.task.describe(blueprint)
        operations = self.description["flops_per_sample"] * config.batch * config.steps
        earlier = next(iter(run.read_environments()), None) if run.checkpoints.exists() else None
        self.choices = execution.choose(config.execution, operations, earlier)
        device = torch.device("meta") if sharded else self.device
        self.model: nn.Module = self.task.build_model(device, self.choices.kernels)
        if config.checkpoint_activations:
            execution.checkpoint_blocks(self.model, config.execution.recomputation)
        if self.choices.compiled:
            execution.compile_blocks(self.model)
        self.replica = parallelise(self.model, config, world)
        self.optimizers = build_optimizers(self.model, config.optimizer, self.task.rate_factors(self.model))
        self.average = WeightAverage(self.model, config.ema) if config.ema else None
        self.schedule = config.optimizer.schedule(config.steps)
        self.filter = SpikeFilter(config.optimizer.skip_above)
        self.monitor = StabilityMonitor(
            steps_total=config.steps,
            warmup_steps=config.optimizer.warmup_steps,
            floor=self.task.floor,
            scale=self.task.scale,
            thresholds=config.thresholds,
        )

    def run(self) -> Verdict:
        """Train to the end, or to an early one, and write the verdict."""
        config = self.config
        with ExitStack() as opened:
            if self.world.is_first:
                self.log = opened.enter_context(MetricsLog(self.run_directory.metrics_file))
            self.saver = opened.enter_context(self._checkpoints())
            checkpoint = self._resume()
            step = checkpoint.step if checkpoint else 0
            self.clock = time.perf_counter() - (checkpoint.state["seconds"] if checkpoint else 0.0)
            environment = (
                execution.describe_environment(config.execution.device)
                | dataclasses.asdict(self.choices)
                | {"operators": execution.operators_in_use(self.model, self.device), "processes": self.world.size}
            )
            changes = self.world.on_first(lambda: self.run_directory.record_environment(environment))
            for instrument in self.instruments:
                instrument.on_start(self, step)
            for damaged in checkpoint.skipped if checkpoint else ():
                self.note(f"skipped the damaged checkpoint {damaged}; resumes after step {step}")
            if changes and step:
                self.note(changes)
            if step == 0:
                self._begin()
            signals = opened.enter_context(StopSignals())
            while not self._ends(step):
                step += 1
                self._train_step(step)
                if step % config.validation_every == 0 or step == config.steps:
                    self._validate(step)
                ends = self._ends(step)
                stop = 0 if ends else int(self.world.largest(signals.received))
                if stop:
                    self.note(f"{Signals(stop).name}: left after step {step}; the same command resumes")
                if stop or ends or step % config.execution.checkpoint_every == 0:
                    self._save(step)
                if stop:
                    self.saver.wait()
                    raise Interrupted(stop)
            self.saver.wait()
            return self._finish(step)

    def _ends(self, step: int) -> bool:
        return step == self.config.steps or (self.config.stop_early and self.monitor.should_stop)

    def _begin(self) -> None:
        """Write the first record; a run with a warm start loads its weights and is evaluated as it is."""
        config, task = self.config, self.task
        record: Record = {
            "kind": "model",
            "label": config.label,
            **self.description,
            **{name: getattr(task, name) for name in ("floor", "scale", "unit", "item", "items_per_sample")},
            "metrics": [metric.to_json() for metric in task.metrics],
            "steps": config.steps,
            "warmup_steps": config.optimizer.warmup_steps,
            "batch": config.batch,
        }
        if config.warm_start is None:
            return self.record(record)
        weights, start = load_start(config.warm_start, task)
        self._load_weights(weights)
        if self.average:
            self.average = WeightAverage(self.model, config.ema)
        self.record({**record, "start": start})
        self._validate(0)

    def _train_step(self, step: int) -> None:
        config, begin = self.config, time.perf_counter()
        rate = config.optimizer.learning_rate * self.schedule.factor(step)
        set_learning_rate(self.optimizers, rate)
        losses = self._accumulate(self.seen + (step - 1) * config.batch)
        norm, norms = clip_gradients(self.model, config.optimizer.clip or math.inf)
        # The one wait of a step for the device: before the update, which then runs beside the host's work.
        record: Record = {
            "kind": "train",
            "step": step,
            "samples": step * config.batch,
            **{name: float(value) for name, value in losses.items()},
            "learning_rate": rate,
            "gradient_norm": float(norm),
        }
        skipped = self.filter.skips(record["gradient_norm"], self.world)
        record |= {"skipped": True} if skipped else {}
        self.monitor.observe(record["loss"], record["gradient_norm"], skipped=skipped)
        for instrument in self.instruments:
            instrument.before_update(self, record, norms)
        for optimizer in self.optimizers:
            if not skipped:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.update()
        self.record({**record, "step_seconds": time.perf_counter() - begin})

    def forward(self, position: int, part: int) -> Losses:
        """Return the losses of a micro-batch of this process, in the batch at a position."""
        with execution.autocast(self.config.precision, self.device):
            start = position + self.world.rank * self.share + part * self.at_once
            return self.task.loss(self.replica, start, self.at_once)

    def _accumulate(self, position: int) -> dict[str, Tensor]:
        """Return the mean losses of a batch, main ("loss") and auxiliary, with the gradient in the parameters."""
        sums: dict[str, Tensor] = {"loss": torch.zeros((), device=self.device)}
        for part in range(self.parts):
            synchronise_gradients(self.replica, part == self.parts - 1)
            losses = self.forward(position, part)
            (losses.objective / self.parts).backward()  # type: ignore[no-untyped-call]
            found = {"loss": losses.mean, **{name: value for name, (value, _) in losses.auxiliary.items()}}
            for name, value in found.items():
                sums[name] = sums.get(name, 0) + value.detach() / self.parts
        return dict(zip(sums, self.world.mean(torch.stack(list(sums.values()))).unbind(), strict=True))

    @torch.no_grad()
    def _validate(self, step: int) -> None:
        result = self._evaluate()
        if self.average:
            with self.average.applied():
                averaged = self._evaluate()
            result |= {
                f"ema_{metric.name}": averaged[metric.name] for metric in self.task.metrics if metric.name in averaged
            }
        self.monitor.observe_validation(result["loss"])
        self.record({"kind": "validation", "step": step, **result})

    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        with execution.autocast(self.config.precision, self.device):
            result = self.task.evaluate(self.model, self.at_once, self.world)
        self.model.train()
        return result

    def _checkpoints(self) -> CheckpointSaver:
        # Imported here: the import costs seconds, which reading a run does not need.
        from siamesenorm.training.distributed_checkpoint import CheckpointSaver

        execution = self.config.execution
        return CheckpointSaver(
            self.run_directory.checkpoints, keep=execution.keep_checkpoints, every=execution.keep_every
        )

    def _save(self, step: int) -> None:
        """Copy the state of this step; it is written while the next steps are trained."""
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_tensors(self.optimizers),
            "random": capture_random_state(self.world.rank),
        }
        if self.average:
            tensors["ema"] = self.average.averages
        seconds = time.perf_counter() - self.clock
        state = self.world.on_first(lambda: {"metrics_offset": self.log.sync(), "seconds": seconds})
        self.saver.save(step, tensors, state)

    def _resume(self) -> Checkpoint | None:
        """Restore the newest whole checkpoint and cut the record back to it; start over where there is none."""
        checkpoint = load_checkpoint(self.run_directory.checkpoints, world=self.world)

        def cut() -> list[Record]:
            self.log.truncate(checkpoint.state["metrics_offset"] if checkpoint else 0)
            return list(read_metrics(self.run_directory.metrics_file)) if checkpoint else []

        records = self.world.on_first(cut)
        if checkpoint is None:
            return None
        self._restore(checkpoint)
        for record in records:
            if record["kind"] == "train":
                self.monitor.observe(record["loss"], record["gradient_norm"], skipped=record.get("skipped", False))
                self.filter.skips(record["gradient_norm"])
            elif record["kind"] == "validation":
                self.monitor.observe_validation(record["loss"])
        return checkpoint

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Fill this process's part of the state; its random state where the checkpoint has one for it."""
        stored, random = checkpoint.stored, capture_random_state(self.world.rank)
        tensors = {"model": self.model.state_dict()}
        if self.average:
            tensors["ema"] = self.average.averages
        if "optimizer" in stored:
            layout = {name: (each.dtype, each.shape) for name, each in stored["optimizer"].items()}
            tensors["optimizer"] = empty_state(self.optimizers, layout)
            if random.keys() <= stored["random"].keys():
                tensors["random"] = random
        elif checkpoint.step < self.config.steps:
            raise UserError(
                f"{checkpoint.path} has no optimizer state, because its run had ended: remove "
                f"{self.run_directory.path} to train it from its start"
            )
        self.saver.read_into(tensors, checkpoint)
        if "optimizer" in tensors:
            restore_optimizers(self.optimizers, tensors["optimizer"])
        if "random" in tensors:
            restore_random_state(random)

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load whole tensors; a sharded model takes its parts."""
        present = self.model.state_dict()
        self.model.load_state_dict({name: shard_like(tensor, present.get(name)) for name, tensor in weights.items()})

    def _finish(self, step: int) -> Verdict:
        verdict = self.monitor.verdict()
        status = "finished" if step == self.config.steps else "stopped_early"
        memory = execution.peak_memory(self.device)
        self.record({"kind": "end", "step": step, "status": status, "peak_memory_bytes": memory})

        def close() -> None:
            self.log.sync()
            self.run_directory.write_verdict(verdict)
            self.saver.end(keep_states=self.config.execution.keep_states)

        self.world.on_first(close)
        for instrument in self.instruments:
            instrument.on_end(self, verdict)
        return verdict

    def record(self, record: Record) -> None:
        """Append to the run's record, with the time, and show it to the instruments."""
        record = {**record, "time": time.perf_counter() - self.clock}
        if self.world.is_first:
            self.log.append(record)
        for instrument in self.instruments:
            instrument.on_record(self, record)
            if record["kind"] == "train":
                instrument.on_step(self, record)
            elif record["kind"] == "validation":
                instrument.on_validation(self, record)

    def note(self, line: str) -> None:
        """Record a line for people, and show it."""
        self.record({"kind": "note", "text": line})
        for instrument in self.instruments:
            instrument.on_note(self, line)
