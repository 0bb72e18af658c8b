"""A sweep: methods x learning rates x seeds, all from one template, as a generator of plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from typing_extensions import Doc

from siamesenorm.comparison.experiment_plan import ComparisonKind, Part, PlannedComparison, PlannedRun
from siamesenorm.comparison.experiment_runner import Experiment, Planned
from siamesenorm.comparison.findings import Choice, Edge, choose_learning_rate
from siamesenorm.comparison.results import ExperimentResults, read_experiment
from siamesenorm.errors import UserError, unknown
from siamesenorm.models.transformer import INITIAL, TransformerConfig, read_method
from siamesenorm.norms import NormSpec
from siamesenorm.topologies import Topology, available_topologies, build_topology, topology_name
from siamesenorm.training.config import RunConfig, split_optimizer

CONTROL = "pre + qkv"
QKV_NORM = "qkv-head"


Methods = Annotated[
    tuple[str, ...],
    Doc(f"What to compare, each in quotes if it holds a plus sign. Topologies: {', '.join(available_topologies())}."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepGrid:
    """The methods, learning rates and seeds of a sweep.

    A method is a text: a topology, then what differs after plus signs: "siamese", "pre + qkv", "dhc-2:streams=4 +
    seednorm", "ln-scaling + init-normal", "siamese + muon". Every method runs at every learning rate with the
    template's seed, which chooses the method's rate by held-out loss; at that rate it runs with the other `seeds`, on
    which it is reported.
    """

    methods: Methods = ("pre", "post", "hybridnorm", "siamese-post-pre", "siamese")
    learning_rates: tuple[float, ...] = (2e-3, 8e-3, 3e-2)
    """Peak learning rates."""
    seeds: tuple[int, ...] = ()
    """Further seeds for each method at its chosen rate; the rate is chosen with --seed."""
    reported: tuple[str, ...] = ()
    """Methods that run with the further seeds; all if not given."""
    control: bool = True
    """Add Pre-Norm with QKV-norm where a method has QKV-norm."""

    def __post_init__(self) -> None:
        if not self.methods:
            raise UserError(f"no methods to compare: choose from {', '.join(available_topologies())}")
        if not self.learning_rates:
            raise UserError("no learning rates: give at least one, such as 1e-3")
        for rate in self.learning_rates:
            if not (math.isfinite(rate) and rate > 0):
                raise UserError(f"learning rate {rate} is not a positive number: write one such as 1e-3")
        for seed in self.seeds:
            if seed < 0:
                raise UserError(f"seed {seed}: choose at least 0")
        for method in (*self.methods, *self.reported):
            _read(method)
        for method in map(normalised, self.reported):
            if method not in self.all_methods:
                raise unknown("reported method", method, self.all_methods)

    @property
    def all_methods(self) -> tuple[str, ...]:
        """The methods, with the control rows."""
        own = tuple(dict.fromkeys(map(normalised, self.methods)))
        place = own.index("pre") + 1 if "pre" in own else 0
        return (*own[:place], *self.added_controls, *own[place:])

    @property
    def added_controls(self) -> tuple[str, ...]:
        """The control rows that are not among the methods.

        There is one for every operator, initialisation and optimizer that comes with QKV-norm.
        """
        if not self.control:
            return ()
        fields, others = [_read(method) for method in self.methods], ("norm", "initialisation", "optimizer")
        due = dict.fromkeys(
            " + ".join([CONTROL, *(str(each[name]) for name in others if name in each)])
            for each in fields
            if each.get("attention_norm", each["topology"].attention_norm) == QKV_NORM
        )
        return tuple(control for control in due if _read(control) not in fields)

    @property
    def reported_methods(self) -> tuple[str, ...]:
        """The methods that run with the other seeds."""
        return tuple(map(normalised, self.reported)) or self.all_methods

    def selection_runs(self, template: RunConfig) -> list[Planned]:
        """Return the runs that choose the learning rates, the lowest learning rate first."""
        rates = sorted(set(self.learning_rates))
        runs = [(rate, method) for rate in rates for method in self.all_methods]
        return [planned_run(template, method, rate, template.seed, Part.SELECTION) for rate, method in runs]

    def stages(self, experiment: Experiment) -> Iterator[Sequence[Planned]]:
        """Yield the runs that choose the rates, then, from their results, the runs with further seeds."""
        template = experiment.template
        yield self.selection_runs(template)
        seeds = [seed for seed in dict.fromkeys(self.seeds) if seed != template.seed]
        if not seeds or experiment.nothing_finished:
            return
        yield runs_at_chosen_rates(experiment, self.reported_methods, seeds)


def runs_at_chosen_rates(experiment: Experiment, methods: Sequence[str], seeds: Sequence[int]) -> list[Planned]:
    """Return runs of further seeds, each method at the rate that its selection runs have chosen."""
    runs: list[Planned] = []
    for method, choice in _choices(experiment, methods).items():
        if choice is None:
            seed = experiment.template.seed
            experiment.observer.note(f"{method}: no further seeds, as no run of seed {seed} has a result")
        else:
            rate = choice.learning_rate
            runs += [planned_run(experiment.template, method, rate, seed, Part.REPORT) for seed in seeds]
    return runs


def runs_beyond_edges(
    experiment: Experiment, methods: Sequence[str], rates: Sequence[float], most: int
) -> list[Planned]:
    """Return a selection run one step outside the tried rates for each method whose best is at their edge.

    The step is the ratio of the two outermost rates. A method that diverged at every rate is tried at a lower one. Each
    method has at most `most` runs beyond the `rates` of the grid; one that was planned and has not ended is returned
    again, and no further one before it has.
    """
    results, template, runs = _results(experiment), experiment.template, []
    for method, label in _labels(results, template, methods).items():
        planned = [run for run in experiment.plan.runs.values() if run.part is Part.SELECTION and run.method == label]
        tried = sorted({run.learning_rate for run in planned})
        ended = {run.learning_rate for run in results.runs_of(label) if run.part is Part.SELECTION and run.complete}
        beyond = [rate for rate in tried if rate not in rates]
        wanted = [rate for rate in beyond if rate not in ended]
        choice = choose_learning_rate(results, label)
        edge = Edge.LOW if choice is None else choice.edge
        if ended.issuperset(tried) and len(tried) > 1 and len(beyond) < most and edge in (Edge.LOW, Edge.HIGH):
            outermost, inner = (tried[0], tried[1]) if edge is Edge.LOW else (tried[-1], tried[-2])
            wanted = [float(f"{outermost * outermost / inner:.3g}")]
        runs += [planned_run(template, method, rate, template.seed, Part.SELECTION) for rate in wanted]
    return runs


def _results(experiment: Experiment) -> ExperimentResults:
    return read_experiment(experiment.directory, mixed=experiment.mixed)


def _labels(results: ExperimentResults, template: RunConfig, methods: Sequence[str]) -> dict[str, str]:
    """Return by method the one that the plan has for the same configuration."""
    labels = {_signature(template.with_method(run.method)): run.method for run in results.runs}
    return {method: labels.get(_signature(template.with_method(method)), method) for method in methods}


def _choices(experiment: Experiment, methods: Sequence[str]) -> dict[str, Choice | None]:
    """Return the rate that each method's selection runs have chosen; None where none of them has a result."""
    results = _results(experiment)
    labels = _labels(results, experiment.template, methods)
    return {method: choose_learning_rate(results, label) for method, label in labels.items()}


def normalised(method: str) -> str:
    """Return the text of a method in one spelling: "pre+qkv-head" as "pre + qkv"."""
    parts = [part.strip() for part in method.split("+")]
    return " + ".join("qkv" if part == QKV_NORM else part for part in parts)


def comparisons_of(methods: Sequence[str], template: RunConfig) -> tuple[PlannedComparison, ...]:
    """Return the comparisons of methods that differ from each other in one thing.

    * Topology: a topology against Pre-Norm with the same operator, initialisation and optimizer; *control*: with
      QKV-norm against Pre-Norm with it.
    * Operator: another operator than the template's against the same method with the template's.
    * Ablation: a topology with options of its own, or with an attention norm that it does not have by itself, against
      the same topology as it is registered.
    * Optimizer, initialisation: another one than the template's against the same method with the template's.
    """
    runs = {method: template.with_method(method) for method in methods}
    pre = build_topology("pre")
    baselines: dict[tuple[str, str], ComparisonKind] = {}
    for method, run in runs.items():
        topology, norm, attention, initialisation, optimizer = own = _signature(run)
        name = topology_name(topology)
        plain = name.partition(":")[0]
        changes: dict[ComparisonKind, dict[str, Any]] = {}
        if name != "pre":
            changes[ComparisonKind.TOPOLOGY] = {"topology": pre, "attention_norm": "auto"}
            if attention == QKV_NORM:
                changes[ComparisonKind.CONTROL] = {"topology": pre, "attention_norm": QKV_NORM}
        _, usual_norm, _, usual_initialisation, usual_optimizer = _signature(template)
        if norm != usual_norm:
            changes[ComparisonKind.OPERATOR] = {"norm": usual_norm}
        if initialisation != usual_initialisation:
            changes[ComparisonKind.INITIALISATION] = {"initialisation": usual_initialisation}
        if optimizer != usual_optimizer:
            changes[ComparisonKind.OPTIMIZER] = {"optimizer": usual_optimizer}
        if (name, own) != (plain, _signature(run, attention_norm="auto")):
            changes[ComparisonKind.ABLATION] = {"topology": build_topology(plain), "attention_norm": "auto"}
        for kind, fields in changes.items():
            wanted = _signature(run, **fields)
            baseline = next((other for other in methods if _signature(runs[other]) == wanted), None)
            if baseline is not None and baseline != method:
                baselines.setdefault((method, baseline), kind)
    return tuple(PlannedComparison(method=m, baseline=b, kind=kind) for (m, b), kind in baselines.items())


def configured(template: RunConfig, method: str, rate: float, seed: int) -> RunConfig:
    """Return the template with a method, a learning rate and a seed."""
    run = template.with_method(method)
    optimizer = dataclasses.replace(run.optimizer, learning_rate=rate)
    return dataclasses.replace(run, optimizer=optimizer, seed=seed).resolved()


def planned_run(template: RunConfig, method: str, rate: float, seed: int, part: Part) -> Planned:
    """Return a run of a grid and its configuration."""
    run = PlannedRun(method=method, learning_rate=rate, seed=seed, part=part, label=method)
    return run, configured(template, method, rate, seed)


def _read(method: str) -> dict[str, Any]:
    """Return what a method names, the initialisation and the optimizer as in its text; raises UserError."""
    model, optimizer = split_optimizer(method)
    fields = read_method(model)
    if "initialisation" in fields:
        fields["initialisation"] = f"{INITIAL}{fields['initialisation']}"
    return fields | ({"optimizer": optimizer} if optimizer else {})


def _signature(run: RunConfig, **changes: Any) -> tuple[Topology, NormSpec, str, str, str]:
    """Return topology, operator, attention norm, initialisation and optimizer of a run, with some of them changed.

    A model that is no Transformer has an operator and an optimizer alone.
    """
    model, optimizer = run.task.model, changes.pop("optimizer", run.optimizer.name)
    if not isinstance(model, TransformerConfig):
        return build_topology("pre"), changes.get("norm", model.norm), "none", "", optimizer
    model = dataclasses.replace(model, **changes)
    return model.topology, model.norm, model.attention_shape.attention_norm, model.initialisation, optimizer
