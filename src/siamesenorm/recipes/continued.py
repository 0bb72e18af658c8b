"""Continue pre-training a converted model: bases, and each of them continued unchanged and converted, as one plan.

A pair shares its base, its seed, its learning rate and every batch: only the residual path differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from siamesenorm.comparison.experiment import Experiment, Planned
from siamesenorm.comparison.plan import ComparisonKind, Part, PlannedComparison, PlannedRun
from siamesenorm.comparison.sweep import configured
from siamesenorm.errors import UserError
from siamesenorm.training.config import RunConfig
from siamesenorm.training.warm_start import start_after

UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to continue a base, which is a method of a sweep ("pre", "pre + qkv").

    `method` is the topology, and the operator where it changes; empty continues the base unchanged.
    """

    base: str
    method: str = ""

    @property
    def label(self) -> str:
        """The method with which the base continues."""
        return self.method or UNCHANGED

    @property
    def name(self) -> str:
        """A name that no other variant has."""
        return f"{self.base} > {self.label}"


VARIANTS = (
    Variant(base="pre"),
    Variant(base="pre", method="siamese-post-pre:normalized_input=false"),
    Variant(base="pre", method="siamese-post-pre"),
    Variant(base="pre", method="pre + seednorm"),
    Variant(base="pre + qkv"),
    Variant(base="pre + qkv", method="siamese"),
)
"""Post-Pre keeps the function exactly without input norm, and up to an eps with it; Hybrid-Pre's base has QKV-norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedPlan:
    """The variants over seeds and learning rates of the continuation; the base has one rate, and steps of its own."""

    variants: tuple[Variant, ...] = VARIANTS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    learning_rates: tuple[float, ...] = (8e-3, 2e-3)
    base_learning_rate: float = 8e-3
    base_steps: int = 300
    steps: int = 150
    warmup_fraction: float = 0.1

    def __post_init__(self) -> None:
        """Refuse an experiment without seeds or rates, and numbers that cannot be run."""
        if not self.seeds or not self.learning_rates:
            raise UserError("nothing to train: give at least one seed and one learning rate")
        if min(self.base_steps, self.steps) < 2:
            raise UserError(f"{min(self.base_steps, self.steps)} steps: choose at least 2")
        if not 0 <= self.warmup_fraction < 1:
            raise UserError(f"warmup_fraction is {self.warmup_fraction}: choose a number from 0 to below 1")

    @property
    def bases(self) -> tuple[str, ...]:
        """The bases, each once."""
        return tuple(dict.fromkeys(variant.base for variant in self.variants))

    @property
    def comparisons(self) -> tuple[PlannedComparison, ...]:
        """Every converted variant against its base continued unchanged."""
        return tuple(
            PlannedComparison(
                method=variant.name, baseline=Variant(base=variant.base).name, kind=ComparisonKind.CONVERSION
            )
            for variant in self.variants
            if variant.method
        )

    @property
    def common(self) -> dict[str, Any]:
        """The settings that all runs of a directory share; seeds, rates and variants may be added."""
        names = ("base_learning_rate", "base_steps", "steps", "warmup_fraction")
        return {"continued": {name: getattr(self, name) for name in names}}

    def template(self, run: RunConfig) -> RunConfig:
        """Return the template of the experiment: a run of the length of a base."""
        return _of_length(run, self.base_steps, self.warmup_fraction)

    def stages(self, experiment: Experiment) -> Iterator[Sequence[Planned]]:
        """Yield the bases, then their continuations; raises UserError where a base cannot be converted."""
        bases = list(self._bases(experiment.template))
        continued = [each for rate in self.learning_rates for each in self._continued(experiment, bases, rate)]
        yield bases
        yield continued

    def _bases(self, template: RunConfig) -> Iterator[Planned]:
        for seed in self.seeds:
            for base in self.bases:
                rate = self.base_learning_rate
                run = PlannedRun(method=base, learning_rate=rate, seed=seed, part=Part.BASE, label=base)
                yield run, configured(template, base, rate, seed)

    def _continued(self, experiment: Experiment, bases: Sequence[Planned], rate: float) -> Iterator[Planned]:
        for base, source in bases:
            for variant in self.variants:
                if variant.base == base.method:
                    run = PlannedRun(
                        method=variant.name,
                        learning_rate=rate,
                        seed=base.seed,
                        part=Part.CONTINUED,
                        label=variant.label,
                    )
                    target = _of_length(source, self.steps, self.warmup_fraction)
                    target = target.with_method(variant.method) if variant.method else target
                    optimizer = dataclasses.replace(target.optimizer, learning_rate=rate)
                    task = target.resolved().task.continued(source.task)
                    config = dataclasses.replace(target, task=task, optimizer=optimizer)
                    yield run, start_after(source, experiment.run_directory(source), config)


def _of_length(run: RunConfig, steps: int, warmup_fraction: float) -> RunConfig:
    """Return a run of so many steps, with its part of warm-up, evaluated at its end."""
    optimizer = dataclasses.replace(run.optimizer, warmup_steps=math.floor(warmup_fraction * steps))
    return dataclasses.replace(run, steps=steps, validation_every=steps, optimizer=optimizer)
