"""What can be reproduced: an item with its grids of runs, each of which is the plan of an experiment."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from siamesenorm.comparison.experiment_plan import Part, PlannedComparison
from siamesenorm.comparison.experiment_runner import Experiment, Planned
from siamesenorm.comparison.report_parts import Report
from siamesenorm.comparison.sweep_grid import (
    SweepGrid,
    comparisons_of,
    planned_run,
    runs_at_chosen_rates,
    runs_beyond_edges,
)
from siamesenorm.recipes.scales import WORKLOADS, Changes, Scale, Workload, changed, find_workload
from siamesenorm.training.config import RunConfig

REPORTED, HEADLINE = (1, 2, 3), (1, 2, 3, 4, 5)
"""Seeds on which methods are reported whose rate is chosen, and those of the headline pairs."""
FIRST_FIVE = (0, 1, 2, 3, 4)
"""Seeds of the headline pairs at a given rate."""
EXTENSIONS = 2
"""How often a grid of rates is extended by one step where the best rate of a method is at its edge."""


@dataclass(frozen=True, kw_only=True)
class RunGrid:
    """Methods x learning rates x seeds from one template.

    Args:
        name: Name of the grid in its item.
        domain: What is trained: a key of `WORKLOADS`.
        methods: Topologies with norms, as in a sweep.
        rates: Positions in the learning rates of the scale; all if empty.
        chosen: Whether each method's rate is chosen on the first seed, and the method reported on others.
        headline: Methods that are reported on five seeds in place of three; where rates are given, at the second.
        seeds: The seeds of given rates, those whose runs have weights ("weighted"), or those on which methods are
            reported whose rate is chosen ("reported").
        shape: Position in the shapes of the scale; the template's own if None.
        length: Factor on the number of steps.
        warmup: Whether there is a warm-up.
        evaluations: Names of what is evaluated on the runs that have weights.
    """

    name: str = ""
    domain: str = "language"
    methods: tuple[str, ...]
    rates: tuple[int, ...] = ()
    chosen: bool = False
    headline: tuple[str, ...] = ()
    seeds: Literal["given", "weighted", "reported"] = "given"
    shape: int | None = None
    length: float = 1.0
    warmup: bool = True
    evaluations: tuple[str, ...] = ()

    @property
    def directory(self) -> str:
        """The name of its directory in that of the item."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "runs"

    def learning_rates(self, workload: Workload) -> tuple[float, ...]:
        """Return the learning rates at a scale."""
        positions = self.rates or range(len(workload.rates))
        return tuple(workload.rates[min(place, len(workload.rates) - 1)] for place in positions)

    def template(self, workload: Workload, run: RunConfig) -> RunConfig:
        """Return the template of the grid from that of its workload."""
        changes: Changes = workload.shapes[self.shape] if self.shape is not None else {}
        run = changed(run, changes)
        if self.length != 1:
            run = changed(run, {"steps": math.ceil(self.length * run.steps)})
        run = changed(run, {} if self.warmup else {"optimizer.warmup_steps": 0})
        return run.with_method("pre").resolved()

    def seeds_at(self, workload: Workload) -> tuple[int, ...]:
        """Return the seeds of runs at given rates."""
        if self.seeds == "reported":
            return self.reported(workload) or workload.seeds
        return workload.weighted if self.seeds == "weighted" else workload.seeds

    def comparisons(self, template: RunConfig) -> tuple[PlannedComparison, ...]:
        """Return the comparisons of methods that differ in one thing."""
        return comparisons_of(self.methods, template)

    def stages(self, workload: Workload, experiment: Experiment) -> Iterator[Sequence[Planned]]:
        """Yield the runs; where rates are chosen, what follows from the results of the runs before."""
        template, rates = experiment.template, self.learning_rates(workload)
        if not self.chosen:
            yield self.given_runs(workload, template)
            return
        yield SweepGrid(methods=self.methods, learning_rates=rates, control=False).selection_runs(template)
        if experiment.nothing_finished:
            return
        for _ in range(EXTENSIONS):
            yield runs_beyond_edges(experiment, self.methods, rates, EXTENSIONS)
        yield runs_at_chosen_rates(experiment, self.methods, self.reported(workload))
        yield runs_at_chosen_rates(experiment, self.headline, self.reported(workload, HEADLINE))

    def given_runs(self, workload: Workload, template: RunConfig) -> list[Planned]:
        """Return the runs of a grid whose rates are given, the first seed of all methods first."""
        seeds = self.seeds_at(workload)
        runs = product(seeds, self.learning_rates(workload), self.methods)
        more = [seed for seed in self.reported(workload, FIRST_FIVE) if seed not in seeds]
        high = workload.rates[min(1, len(workload.rates) - 1)]
        return [
            planned_run(template, method, rate, seed, Part.SELECTION if seed == seeds[0] else Part.REPORT)
            for seed, rate, method in (*runs, *product(more, [high], self.headline))
        ]

    def expected_runs(self, workload: Workload, template: RunConfig) -> Iterator[Planned]:
        """Yield the runs; where rates are chosen, the middle one is assumed."""
        if not self.chosen:
            yield from self.given_runs(workload, template)
            return
        rates = self.learning_rates(workload)
        yield from SweepGrid(methods=self.methods, learning_rates=rates, control=False).selection_runs(template)
        for method in self.methods:
            for seed in self.reported(workload, HEADLINE if method in self.headline else REPORTED):
                yield planned_run(template, method, rates[len(rates) // 2], seed, Part.REPORT)

    def reported(self, workload: Workload, seeds: tuple[int, ...] = REPORTED) -> tuple[int, ...]:
        """Return the seeds on which methods are reported whose rate is chosen: none where a scale has a single seed."""
        return seeds if len(workload.seeds) > 1 else ()


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table, a figure or a claim of a paper, and the runs from which it is made again.

    Args:
        name: Name on the command line.
        paper: Where it is published: "SiameseNorm, Table 1"; empty where it is in no paper.
        title: What it shows, in a few words.
        published: What the paper did and found, in sentences.
        grids: The runs.
        experiment: Returns the page of an item that needs no training.
        ranked: Whether the page ranks the methods against Pre-Norm's noise and compute.
    """

    name: str
    paper: str
    title: str
    published: str
    grids: tuple[RunGrid, ...] = ()
    experiment: Callable[[], Report] | None = None
    ranked: bool = False

    @property
    def heading(self) -> str:
        """The title of its page: what it shows, after where it is published."""
        return f"{self.paper}: {self.title}" if self.paper else f"{self.title[:1].upper()}{self.title[1:]}"

    def grids_at(self, scale: Scale) -> tuple[RunGrid, ...]:
        """Return the grids that a scale has."""
        return tuple(grid for grid in self.grids if scale in WORKLOADS[grid.domain])

    def workload(self, grid: RunGrid, scale: Scale) -> Workload:
        """Return what a grid trains at a scale; raises UserError where there is nothing."""
        return find_workload(grid.domain, scale)
