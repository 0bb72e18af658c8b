"""A grid of runs: methods x learning rates x seeds, all from one template.

A method is text: a topology, then what differs after plus signs: "siamese", "pre + qkv", "dhc-2:streams=4 + seednorm".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from siamesenorm.errors import UserError, unknown
from siamesenorm.models.config import read_method
from siamesenorm.topologies import available_topologies
from siamesenorm.training.config import RunConfig

CONTROL = "pre + qkv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a sweep compares.

    Every method runs at every learning rate with `selection_seed`, which chooses the method's rate by held-out loss;
    at that rate it runs with the other `seeds`, on which it is reported. `reported` limits the second part to some
    methods; empty means all. `control` adds Pre-Norm with QKV-norm where a method has QKV-norm, with the method's norm.
    """

    methods: tuple[str, ...]
    learning_rates: tuple[float, ...]
    selection_seed: int = 0
    seeds: tuple[int, ...] = ()
    reported: tuple[str, ...] = ()
    control: bool = True

    def __post_init__(self) -> None:
        """Refuse empty grids, unknown methods, negative seeds and learning rates that are not positive numbers."""
        if not self.methods:
            raise UserError(f"no methods to compare: choose from {', '.join(available_topologies())}")
        if not self.learning_rates:
            raise UserError("no learning rates: give at least one, such as 1e-3")
        for rate in self.learning_rates:
            if not (math.isfinite(rate) and rate > 0):
                raise UserError(f"learning rate {rate} is not a positive number: write one such as 1e-3")
        for seed in (self.selection_seed, *self.seeds):
            if seed < 0:
                raise UserError(f"seed {seed}: choose at least 0")
        for method in (*self.methods, *self.reported):
            read_method(method)
        for method in self.reported:
            if method not in self.all_methods:
                raise unknown("reported method", method, self.all_methods)

    @property
    def all_methods(self) -> tuple[str, ...]:
        """The methods, with a control row for every norm that comes with QKV-norm."""
        if not self.control:
            return self.methods
        fields = [read_method(method) for method in self.methods]
        norms = dict.fromkeys(each.get("norm") for each in fields if _normalises_values(each))
        due = [CONTROL if norm is None else f"{CONTROL} + {norm}" for norm in norms]
        controls = [control for control in due if read_method(control) not in fields]
        place = self.methods.index("pre") + 1 if "pre" in self.methods else 0
        return (*self.methods[:place], *controls, *self.methods[place:])

    @property
    def reported_methods(self) -> tuple[str, ...]:
        """The methods that run with the other seeds."""
        return self.reported or self.all_methods

    def selection_runs(self, template: RunConfig) -> Iterator[RunConfig]:
        """Yield the runs of the first part, the lowest learning rate first."""
        for runs in zip(*(self.rates_of(template, method) for method in self.all_methods), strict=True):
            yield from runs

    def rates_of(self, template: RunConfig, method: str) -> Iterator[RunConfig]:
        """Yield a method's runs of the first part, the lowest learning rate first."""
        for rate in sorted(self.learning_rates):
            yield configure(template, method, rate, self.selection_seed)

    def reported_runs(self, template: RunConfig, method: str, rate: float) -> Iterator[RunConfig]:
        """Yield the runs of a method at its chosen rate with the other seeds."""
        for seed in self.seeds:
            if seed != self.selection_seed:
                yield configure(template, method, rate, seed)

    def to_json(self) -> dict[str, Any]:
        """Return the grid as JSON values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}


def _normalises_values(fields: dict[str, Any]) -> bool:
    return bool(fields.get("attention_norm", fields["topology"].attention_norm) == "qkv-head")


def configure(template: RunConfig, method: str, rate: float, seed: int) -> RunConfig:
    """Return the template with a method, a learning rate and a seed."""
    optimizer = dataclasses.replace(template.optimizer, learning_rate=rate)
    return dataclasses.replace(template.with_method(method), optimizer=optimizer, seed=seed)
