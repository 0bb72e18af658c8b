"""What is trained: Pre-Norm bases, and each of them continued unchanged and converted, on the same batches.

A pair shares its base, its seed, its learning rate and every batch: what differs is the residual path alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.comparison.grid import configure
from siamesenorm.errors import UserError
from siamesenorm.models.conversion import converted_config
from siamesenorm.training.config import RunConfig
from siamesenorm.training.warm_start import start_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to continue a base: the topology and the operator that it goes on with.

    `base` is a method of a sweep ("pre", "pre + qkv"); a `topology` "pre" without an operator leaves it unchanged.
    """

    base: str
    topology: str = "pre"
    norm: str | None = None

    @property
    def name(self) -> str:
        """What the base goes on as."""
        return "unchanged" if self.unchanged else " + ".join(filter(None, (self.topology, self.norm)))

    @property
    def unchanged(self) -> bool:
        """Whether the arm is the one that the others of its base are held against."""
        return self.topology == "pre" and self.norm is None


ARMS = (
    Arm(base="pre"),
    Arm(base="pre", topology="siamese-post-pre:normalized_input=false"),
    Arm(base="pre", topology="siamese-post-pre"),
    Arm(base="pre", norm="seednorm"),
    Arm(base="pre + qkv"),
    Arm(base="pre + qkv", topology="siamese"),
)
"""Post-Pre keeps the function exactly without input norm, and up to an eps with it; Hybrid-Pre's base has QKV-norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The arms over seeds and learning rates of the continuation; the base has one rate, and steps of its own."""

    arms: tuple[Arm, ...] = ARMS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    learning_rates: tuple[float, ...] = (8e-3, 2e-3)
    base_learning_rate: float = 8e-3
    base_steps: int = 300
    steps: int = 150
    warmup_fraction: float = 0.1

    def __post_init__(self) -> None:
        """Refuse an experiment without seeds or rates, and numbers that are none."""
        if not self.seeds or not self.learning_rates:
            raise UserError("nothing to train: give at least one seed and one learning rate")
        if min(self.base_steps, self.steps) < 2:
            raise UserError(f"{min(self.base_steps, self.steps)} steps: choose at least 2")
        if not 0 <= self.warmup_fraction < 1:
            raise UserError(f"warmup_fraction is {self.warmup_fraction}: choose a number from 0 to below 1")

    @property
    def bases(self) -> tuple[str, ...]:
        """The bases, each once."""
        return tuple(dict.fromkeys(arm.base for arm in self.arms))

    def base_run(self, template: RunConfig, base: str, seed: int) -> RunConfig:
        """Return the run of a base."""
        run = configure(self._of_length(template, self.base_steps), base, self.base_learning_rate, seed)
        return dataclasses.replace(run, warm_start=None)

    def base_runs(self, template: RunConfig) -> Iterator[RunConfig]:
        """Yield the runs of the bases, all bases of a seed together."""
        for seed in self.seeds:
            for base in self.bases:
                yield self.base_run(template, base, seed)

    def continued_run(self, source: RunConfig, directory: Path, arm: Arm, rate: float) -> RunConfig:
        """Return the run of an arm from the base run of `source` in `directory`: the same data, behind what it saw."""
        run = self._of_length(source, self.steps)
        model = converted_config(source.task.model, arm.topology, arm.norm)
        task = dataclasses.replace(source.task, model=model)
        optimizer = dataclasses.replace(run.optimizer, learning_rate=rate)
        return start_after(source, directory, dataclasses.replace(run, task=task, optimizer=optimizer))

    def _of_length(self, run: RunConfig, steps: int) -> RunConfig:
        """Return a run of so many steps, with its part of warm-up, evaluated at its end."""
        warmup = math.floor(self.warmup_fraction * steps)
        optimizer = dataclasses.replace(run.optimizer, warmup_steps=warmup)
        return dataclasses.replace(run, steps=steps, validation_every=steps, optimizer=optimizer)

    def to_json(self) -> dict[str, Any]:
        """Return the experiment as JSON values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}
