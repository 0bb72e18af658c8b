"""The train loop, one for every task: batches, AdamW, record, verdict, checkpoints, exact resume.

A checkpoint holds parameters, optimizer, random state and how far the record had come. Resuming cuts the record back to
that point and goes on: the order of the data is stateless, so nothing else needs to be remembered. Killed at any moment
and resumed, a run ends with the same bits as one never interrupted, but for the time fields of its record.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from siamesenorm.training.checkpoint import Stage, load_checkpoint, save_checkpoint
from siamesenorm.training.compiler import require_compiler
from siamesenorm.training.config import RunConfig
from siamesenorm.training.language import LanguageTask
from siamesenorm.training.metrics import MetricsLog, read_metrics
from siamesenorm.training.optimizer import build_optimizer, set_learning_rate
from siamesenorm.training.optimizer_state import optimizer_tensors, restore_optimizer
from siamesenorm.training.parallel import checkpoint_blocks, compile_blocks
from siamesenorm.training.random_state import capture_random_state, restore_random_state
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.start import describe_start, inherit, require_start
from siamesenorm.training.verdict import StabilityMonitor, Verdict

Record = dict[str, Any]


class Observer(Protocol):
    """What wants to know what happens: a console, a tracker."""

    def started(self, config: RunConfig, step: int) -> None:
        """Training begins, or goes on after `step`."""

    def recorded(self, record: Record) -> None:
        """A record was written."""

    def told(self, line: str) -> None:
        """Something a person should know."""

    def ended(self, verdict: Verdict) -> None:
        """The run is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interrupted:
    """How far an earlier process came."""

    step: int = 0
    seconds: float = 0.0
    passed_over: tuple[str, ...] = ()


def train(
    config: RunConfig, directory: Path, *, observers: tuple[Observer, ...] = (), at_stage: Stage | None = None
) -> Verdict:
    """Train the run of `config` in `directory`, or go on with it, and return its verdict.

    A finished run is not trained again. `at_stage` is called with the stages of writing checkpoints. Raises UserError
    when the directory belongs to another configuration, for data that do not fit, and on a full disk; what cannot be
    trained leaves no directory behind.
    """
    run = RunDirectory(directory)
    finished = run.verdict_of(config)
    if finished is not None:
        return finished
    loop = TrainingLoop(config, run, observers, at_stage)
    with run.claimed(config):
        return run.read_verdict() or loop.run()


class TrainingLoop:
    """One run in one process."""

    def __init__(
        self, config: RunConfig, run: RunDirectory, observers: tuple[Observer, ...], at_stage: Stage | None
    ) -> None:
        if config.compile:
            require_compiler(config.execution.device)
        if config.execution.threads:
            torch.set_num_threads(config.execution.threads)
        self.config, self.run_directory, self.observers, self.at_stage = config, run, observers, at_stage
        if not run.checkpoints.exists():
            require_start(config)
        torch.manual_seed(config.seed)
        self.task = LanguageTask(config)
        self.model: nn.Module = self.task.build_model()
        self.description = self.task.describe(self.model)
        if config.checkpoint_activations:
            checkpoint_blocks(self.model)
        if config.compile:
            compile_blocks(self.model)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.schedule = config.optimizer.schedule(config.steps)
        self.watch = StabilityMonitor(
            steps_total=config.steps,
            warmup_steps=config.optimizer.warmup_steps,
            floor=self.description["floor"],
            scale=self.description["scale"],
            thresholds=config.thresholds,
        )

    def run(self) -> Verdict:
        """Train to the end, or to an early one, and write the verdict."""
        with MetricsLog(self.run_directory.metrics_file) as self.log:
            before = self._resume()
            elsewhere = self.run_directory.record_environment(self.config.execution.device)
            self._tell(lambda observer: observer.started(self.config, before.step))
            for line in (*before.passed_over, *([elsewhere] if elsewhere and before.step else [])):
                self._tell(lambda observer, line=line: observer.told(line))  # type: ignore[misc]
            self.clock = time.perf_counter() - before.seconds
            if before.step == 0:
                self._begin()
            step = before.step
            while step < self.config.steps and not self._gives_up():
                step += 1
                self._train_step(step)
                if step % self.config.validation_every == 0 or step == self.config.steps:
                    self._validate(step)
                if step % self.config.execution.checkpoint_every == 0 or step == self.config.steps:
                    self._save(step)
            return self._finish(step)

    def _begin(self) -> None:
        """Write the first record; a run that starts from another one takes its weights and is evaluated as it is."""
        if self.config.start is None:
            return self._record({"kind": "model", **self._introduction()})
        inheritance = inherit(self.config)
        self.model.load_state_dict(inheritance.weights)
        start = describe_start(self.config, inheritance)
        self._record({"kind": "model", **self._introduction(), "start": start})
        self._validate(0)

    def _introduction(self) -> Record:
        config = self.config
        return {
            **self.description,
            "steps": config.steps,
            "warmup_steps": config.optimizer.warmup_steps,
            "batch_tokens": config.batch_tokens,
        }

    def _train_step(self, step: int) -> None:
        config, begin = self.config, time.perf_counter()
        rate = config.optimizer.learning_rate * self.schedule.factor(step)
        set_learning_rate(self.optimizer, rate)
        seen = config.start.position if config.start else 0
        loss = self._accumulate(seen + (step - 1) * config.samples_per_batch)
        limit = config.optimizer.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        record: Record = {
            "kind": "train",
            "step": step,
            "tokens": step * config.batch_tokens,
            "loss": float(loss),
            "learning_rate": rate,
            "gradient_norm": float(norm),
        }
        self.watch.observe(record["loss"], record["gradient_norm"])
        self._record({**record, "step_seconds": time.perf_counter() - begin})

    def _accumulate(self, position: int) -> Tensor:
        """Return the mean loss of a batch, with its gradient in the parameters."""
        config = self.config
        parts = config.samples_per_batch // config.samples_per_micro_batch
        total = torch.zeros((), device=self.task.device)
        for part in range(parts):
            start = position + part * config.samples_per_micro_batch
            with self._precision():
                loss = self.task.loss(self.model, start, config.samples_per_micro_batch) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    @torch.no_grad()
    def _validate(self, step: int) -> None:
        self.model.eval()
        with self._precision():
            result = self.task.evaluate(self.model)
        self.model.train()
        self.watch.observe_validation(result["loss"])
        self._record({"kind": "validation", "step": step, **result})

    def _precision(self) -> torch.autocast:
        enabled = self.config.precision == "bfloat16"
        return torch.autocast(self.task.device.type, torch.bfloat16, enabled=enabled)

    def _save(self, step: int) -> None:
        names = dict(self.model.named_parameters())
        tensors, state = optimizer_tensors(self.optimizer, names)
        save_checkpoint(
            self.run_directory.checkpoints,
            step,
            {"model": dict(self.model.state_dict()), "optimizer": tensors, "random": capture_random_state()},
            {"metrics_offset": self.log.sync(), "seconds": time.perf_counter() - self.clock, "optimizer": state},
            keep=self.config.execution.keep_checkpoints,
            at_stage=self.at_stage,
        )

    def _resume(self) -> _Interrupted:
        """Restore the newest whole checkpoint and cut the record back to it; start over where there is none."""
        checkpoint = load_checkpoint(self.run_directory.checkpoints)
        if checkpoint is None:
            self.log.truncate(0)
            return _Interrupted()
        self.model.load_state_dict(checkpoint.tensors["model"])
        restore_optimizer(
            self.optimizer,
            dict(self.model.named_parameters()),
            checkpoint.tensors["optimizer"],
            checkpoint.state["optimizer"],
        )
        restore_random_state(checkpoint.tensors["random"])
        self.log.truncate(checkpoint.state["metrics_offset"])
        for record in read_metrics(self.run_directory.metrics_file):
            if record["kind"] == "train":
                self.watch.observe(record["loss"], record["gradient_norm"])
            elif record["kind"] == "validation":
                self.watch.observe_validation(record["loss"])
        return _Interrupted(step=checkpoint.step, seconds=checkpoint.state["seconds"], passed_over=checkpoint.skipped)

    def _gives_up(self) -> bool:
        return self.config.stop_early and self.watch.should_stop

    def _finish(self, step: int) -> Verdict:
        verdict = self.watch.verdict()
        status = "finished" if step == self.config.steps else "stopped_early"
        peak = _peak_memory_bytes(self.task.device)
        self._record({"kind": "end", "step": step, "status": status, "peak_memory_bytes": peak})
        self.log.sync()
        self.run_directory.write_verdict(verdict)
        self._tell(lambda observer: observer.ended(verdict))
        return verdict

    def _record(self, record: Record) -> None:
        record = {**record, "time": time.perf_counter() - self.clock}
        self.log.append(record)
        self._tell(lambda observer: observer.recorded(record))

    def _tell(self, message: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            message(observer)


def _peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held: of the accelerator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
