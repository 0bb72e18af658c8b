"""Sweeps: what a grid means, what runs when, and what interruptions and failures leave.

Workers are stand-ins that write the record of a run without training, but for one sweep of real ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from siamesenorm import build_language_model
from siamesenorm.cli import main
from siamesenorm.comparison import experiment_runner as experiment_module
from siamesenorm.comparison.experiment_console import ExperimentConsole
from siamesenorm.comparison.experiment_plan import ComparisonKind, ExperimentPlan, Part, PlannedRun, read_plan
from siamesenorm.comparison.experiment_runner import Experiment, ExperimentObserver, Job, shared_gpus
from siamesenorm.comparison.findings import find
from siamesenorm.comparison.results import read_experiment
from siamesenorm.comparison.sweep_grid import SweepGrid, comparisons_of, configured
from siamesenorm.errors import UserError
from siamesenorm.files import StoppedError, exclusive
from siamesenorm.models.language import language_model_config
from siamesenorm.models.transformer import read_method
from siamesenorm.sublayers.sublayer import Projection
from siamesenorm.tasks.language import LanguageTask
from siamesenorm.topologies import build_topology
from siamesenorm.training.config import RunConfig
from siamesenorm.training.execution import Choices, describe_environment
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.run_record import MetricsLog
from siamesenorm.training.verdict import judge
from training_runs import edit_json, records, tiny_run, write_data

RATES = (2e-3, 8e-3)
TINY_OPTIONS = {
    "--model.size": "nano", "--model.depth": 1, "--model.dim": 8, "--model.heads": 2, "--model.hidden": 8,
    "--model.context": 16, "--steps": 6, "--batch": 2, "--optimizer.warmup-steps": 1,
    "--validation-every": 3, "--validation-tokens": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "counting")


@pytest.fixture
def template(data: Path) -> RunConfig:
    return tiny_run(data, steps=6, model={"topology": "pre"})


# --- methods and grids -----------------------------------------------------------------------------------------------


def test_a_method_is_a_topology_and_what_differs() -> None:
    assert read_method("siamese") == {"topology": build_topology("siamese")}
    assert read_method("dhc-2:streams=4+seednorm:heads=2") == {
        "topology": build_topology("dhc-2", streams=4),
        "norm": read_method("pre + seednorm:heads=2")["norm"],
    }
    assert read_method("pre + seednorm:heads=2")["norm"].name == "seednorm"
    assert read_method("ln-scaling + init-normal")["initialisation"] == "normal"
    names = {"qkv": "qkv-head", "qkv-head": "qkv-head", "qk": "qk", "qk-head": "qk-head", "none": "none"}
    assert {name: read_method(f"pre + {name}")["attention_norm"] for name in names} == names


@pytest.mark.parametrize(
    "method",
    [
        "siamse",
        "dhc-2:stream=4",
        "pre + rmsnrm",
        "pre + ",
        "pre + qkv + qk",
        "pre + rmsnorm + layernorm",
        "pre + init-norml",
        "pre + init-normal + init-megatron",
        "pre + muon + adamw",
        "muon",
    ],
)
def test_a_text_that_is_no_method_is_refused(method: str) -> None:
    with pytest.raises(UserError):
        SweepGrid(methods=("pre", method), learning_rates=RATES)


@pytest.mark.parametrize(
    "changes",
    [
        {"methods": ()},
        {"learning_rates": ()},
        {"learning_rates": (1e-3, float("nan"))},
        {"learning_rates": (0.0,)},
        {"seeds": (1, -2)},
        {"reported": ("post",)},
    ],
)
def test_a_grid_that_cannot_be_run_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        SweepGrid(**{"methods": ("pre",), "learning_rates": RATES, **changes})


@pytest.mark.parametrize(
    ("methods", "with_control"),
    [
        (("pre", "post"), ("pre", "post")),
        (("pre", "siamese"), ("pre", "pre + qkv", "siamese")),
        (("post", "hybridnorm"), ("pre + qkv", "post", "hybridnorm")),
        (("pre", "post + qkv"), ("pre", "pre + qkv", "post + qkv")),
        (("siamese", "pre+qkv-head"), ("siamese", "pre + qkv")),
        (("siamese-post-pre", "pre"), ("siamese-post-pre", "pre")),
        (
            ("pre", "siamese", "siamese + seednorm:heads=4", "hybridnorm + seednorm:heads=4"),
            (
                "pre",
                "pre + qkv",
                "pre + qkv + seednorm:heads=4",
                "siamese",
                "siamese + seednorm:heads=4",
                "hybridnorm + seednorm:heads=4",
            ),
        ),
        (
            ("pre + muon", "siamese + muon", "hybridnorm + init-normal + muon"),
            (
                "pre + qkv + muon",
                "pre + qkv + init-normal + muon",
                "pre + muon",
                "siamese + muon",
                "hybridnorm + init-normal + muon",
            ),
        ),
        (("siamese + layernorm", "pre + layernorm + qkv"), ("siamese + layernorm", "pre + layernorm + qkv")),
    ],
)
def test_a_table_with_qkv_norm_has_its_control_row(methods: tuple[str, ...], with_control: tuple[str, ...]) -> None:
    assert SweepGrid(methods=methods, learning_rates=RATES).all_methods == with_control
    without = SweepGrid(methods=methods, learning_rates=RATES, control=False)
    assert without.all_methods == tuple(method.replace("+qkv-head", " + qkv") for method in methods)


def runs_of(grid: SweepGrid, template: RunConfig) -> list[RunConfig]:
    return [config for _, config in grid.selection_runs(template)]


def test_a_run_of_a_grid_differs_from_its_template_by_method_rate_and_seed_alone(template: RunConfig) -> None:
    grid = SweepGrid(methods=("pre", "siamese + layernorm"), learning_rates=(8e-3, 2e-3))
    planned = grid.selection_runs(dataclasses.replace(template, seed=3))
    found = [(run.method, run.learning_rate, run.seed) for run, _ in planned]
    methods = ("pre", "pre + qkv + layernorm", "siamese + layernorm")
    assert found == [(method, rate, 3) for rate in RATES for method in methods], "the safest rate comes first"
    for run, config in planned:
        model = config.task.model
        assert (model.topology, model.norm) == (
            (read := read_method(run.method))["topology"],
            read.get("norm", template.task.model.norm),
        )
        alike = dataclasses.replace(config.with_method("pre"), optimizer=template.optimizer, seed=0)
        assert dataclasses.replace(alike.resolved(), task=template.resolved().task) == template.resolved()


def test_optimizer_and_initialisation_are_what_the_method_names_else_the_templates(template: RunConfig) -> None:
    def found(run: RunConfig, method: str) -> tuple[str, str, str]:
        config = configured(run, method, 1e-3, 0)
        return config.optimizer.name, config.task.model.initialisation, config.label

    assert found(template, "pre + init-normal + muon") == ("muon", "normal", "pre + init-normal + muon")
    assert found(template, "pre") == ("adamw", "mitchell", "pre")
    other = template.with_method("pre + init-megatron + muon")
    assert found(other, "post") == ("muon", "megatron", "post + init-megatron + muon")
    assert found(other, "post + adamw") == ("adamw", "megatron", "post + init-megatron")


def test_methods_are_compared_with_a_baseline_of_the_same_optimizer_and_initialisation(template: RunConfig) -> None:
    methods = ("pre", "siamese", "pre + qkv + muon", "pre + muon", "siamese + muon", "pre + init-normal", "post + muon")
    kinds = {(each.method, each.baseline): each.kind.value for each in comparisons_of(methods, template)}
    assert kinds == {
        ("siamese", "pre"): "topology",
        ("siamese + muon", "pre + muon"): "topology",
        ("post + muon", "pre + muon"): "topology",
        ("siamese + muon", "pre + qkv + muon"): "control",
        ("pre + qkv + muon", "pre + muon"): "ablation",
        ("pre + muon", "pre"): "optimizer",
        ("siamese + muon", "siamese"): "optimizer",
        ("pre + init-normal", "pre"): "initialisation",
    }
    assert all(any(kind == each for each in ComparisonKind) for kind in kinds.values())


@pytest.mark.parametrize("method", ["pre", "pre + seednorm", "siamese + layernorm"])
def test_a_sweep_keeps_the_eps_of_a_size_in_the_attention_too(template: RunConfig, method: str) -> None:
    model = language_model_config("olmo2-1b", depth=1, dim=32, heads=2, hidden=32, vocabulary=17, context=16)
    sized = dataclasses.replace(template, task=dataclasses.replace(template.task, model=model))
    (config,) = runs_of(SweepGrid(methods=(method,), learning_rates=(1e-3,), control=False), sized)
    attention = config.task.model.attention_shape.norm
    assert dict(config.task.model.norm.options)["eps"] == dict(attention.options)["eps"] == 1e-6


def test_every_method_sees_the_same_batches_and_starts_from_the_same_weights(template: RunConfig) -> None:
    """Law 5, over every topology: up to the factors on initial weights that a topology declares."""
    grid = SweepGrid(methods=("pre", "post", "deepnorm", "dhc-2", "siamese"), learning_rates=(1e-3,))
    runs = runs_of(grid, dataclasses.replace(template, seed=2))
    batches = [run.task.build(run.seed).train.batch(12, 8) for run in runs]
    assert all((batch == batches[0]).all() for batch in batches)
    assert (template.task.build(3).train.batch(12, 8) != batches[0]).any()

    models = [build_language_model(run.task.model, seed=run.seed) for run in runs]
    reference = {name: module for name, module in models[0].named_modules() if isinstance(module, Projection)}
    assert len(reference) == 2 * 7 + 1
    for run, model in zip(runs, models, strict=True):
        torch.testing.assert_close(model.embedding.weight, models[0].embedding.weight, rtol=0, atol=0)
        for name, projection in reference.items():
            ours = model.get_submodule(name)
            factor = run.task.model.topology.initial_factor(projection.role, run.task.model.depth)
            torch.testing.assert_close(ours.weight, factor * projection.weight, rtol=1e-6, atol=0)


# --- what runs, and when ---------------------------------------------------------------------------------------------

Outcome = float | str


class Workers:
    """Stand-ins for processes: each writes the record of its run, or fails with a line, after some polls."""

    def __init__(self, outcome_of: Callable[[RunConfig], Outcome], polls_of: Callable[[RunConfig], int]) -> None:
        self.outcome_of, self.polls_of = outcome_of, polls_of
        self.started: list[tuple[str, float, int]] = []
        self.configs: list[RunConfig] = []
        self.running: dict[Path, int] = {}
        self.most_running = 0
        self.ended: list[str] = []

    def start(self, job: Job, place: int) -> StandIn:
        assert place not in self.running.values(), "another worker has this place"
        self.started.append((job.planned.method, job.planned.learning_rate, job.planned.seed))
        self.configs.append(job.config)
        self.running[job.directory] = place
        self.most_running = max(self.most_running, len(self.running))
        return StandIn(self, job)


class StandIn:
    """What a sweep sees of a process."""

    def __init__(self, workers: Workers, job: Job) -> None:
        self.workers, self.job, self.polls = workers, job, workers.polls_of(job.config)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.polls -= 1
        if self.polls < 0 and self.returncode is None:
            outcome = self.workers.outcome_of(self.job.config)
            if isinstance(outcome, str):
                (self.job.directory / "log.txt").write_text(f"Traceback ...\n{outcome}\n")
                self._end(2)
            else:
                write_finished(self.job, outcome)
                self._end(0)
        return self.returncode

    def terminate(self) -> None:
        self._end(-signal.SIGTERM)

    def wait(self) -> int | None:
        return self.returncode

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.returncode is not None

    def _end(self, code: int) -> None:
        self.returncode = code
        del self.workers.running[self.job.directory]
        self.workers.ended.append(f"{self.job.name}: {code}")


def write_finished(job: Job, held_out: float) -> None:
    """Write what a run leaves that ended with this held-out loss; infinite for one that diverged."""
    run, config = RunDirectory(job.directory), job.config
    final = min(held_out, 3.0)
    curve = [final + 0.5 / step for step in range(1, config.steps + 1)]
    if math.isinf(held_out):
        curve[-1] = math.nan
    records = [
        {
            "kind": "model", "label": config.label, "attention_norm": "qk", "parameters": 1, "steps": config.steps,
            "warmup_steps": 1, "floor": 2.8, "scale": 1.0, "unit": "nats/token",
            "metrics": [metric.to_json() for metric in LanguageTask.metrics],
        },
        *(
            {"kind": "train", "step": step, "loss": loss, "gradient_norm": 1.0, "step_seconds": 0.1}
            for step, loss in enumerate(curve, start=1)
        ),
        {"kind": "validation", "step": config.steps, "loss": final},
        {"kind": "end", "step": config.steps, "status": "finished"},
    ]  # fmt: skip
    with run.claimed(config), MetricsLog(run.metrics_file) as log:
        for record in records:
            log.append(record)
        choices = Choices(kernels=config.execution.kernels, compiled=config.execution.compile == "on")
        run.record_environment(describe_environment("cpu") | dataclasses.asdict(choices) | {"operators": []})
        run.write_verdict(judge(records))


def held_out(config: RunConfig) -> float:
    """Return a loss with its optimum at another rate for each method on seed 0, and on other seeds the reverse."""
    best = {"pre": 2e-3, "post": 8e-3}[config.label]
    good = (config.optimizer.learning_rate == best) == (config.seed == 0)
    return 1.5 if good else 2.0


@dataclasses.dataclass
class Listener(ExperimentObserver):
    """An observer that keeps what it receives."""

    said: list[str] = dataclasses.field(default_factory=list)

    def planned(self, jobs: Any) -> None:
        self.said.append(f"planned {len(jobs)}")

    def note(self, line: str) -> None:
        self.said.append(line)

    def ended(self, job: Job, error: str | None) -> None:
        self.said.append(error or "ok")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    made = Workers(outcome_of=held_out, polls_of=lambda config: 0)
    monkeypatch.setattr(experiment_module, "_start", made.start)
    monkeypatch.setattr(experiment_module, "POLL_SECONDS", 0)
    return made


@dataclasses.dataclass
class Sweep:
    """A sweep to be trained, with its grid."""

    grid: SweepGrid
    experiment: Experiment

    def run(self) -> Experiment:
        self.experiment.train(self.grid.stages)
        return self.experiment


def plan_of(directory: Path) -> ExperimentPlan:
    plan = read_plan(directory)
    assert plan is not None
    return plan


def sweep(directory: Path, template: RunConfig, *, jobs: int = 2, mixed: bool = False, **grid: Any) -> Sweep:
    made = SweepGrid(**{"methods": ("pre", "post"), "learning_rates": RATES, **grid})
    comparisons = comparisons_of(made.all_methods, template)
    experiment = Experiment(
        directory=directory, template=template, jobs=jobs, observer=Listener(), comparisons=comparisons, mixed=mixed
    )
    return Sweep(made, experiment)


def test_the_rate_is_chosen_on_one_seed_and_reported_on_the_others(
    tmp_path: Path, template: RunConfig, workers: Workers
) -> None:
    run = sweep(tmp_path / "sweep", template, seeds=(0, 1, 2)).run()
    selection = [(method, rate, 0) for rate in RATES for method in ("pre", "post")]
    reported = [("pre", 2e-3, 1), ("pre", 2e-3, 2), ("post", 8e-3, 1), ("post", 8e-3, 2)]
    assert workers.started == selection + reported
    assert run.observer.said == ["planned 4", *["ok"] * 4, "planned 4", *["ok"] * 4]
    plan = plan_of(tmp_path / "sweep")
    assert list(plan.runs) == [job.config.identity[:12] for job in run.trained]
    assert [(each.method, each.learning_rate, each.seed) for each in plan.runs.values()] == selection + reported
    assert [each.part for each in plan.runs.values()] == [Part.SELECTION] * 4 + [Part.REPORT] * 4
    assert [(each.method, each.baseline) for each in plan.comparisons] == [("post", "pre")]
    assert plan.template["task"]["digest"] == template.task.digest and plan.data["name"] and plan.jobs == 2

    workers.started.clear()
    sweep(tmp_path / "sweep", template, seeds=(0, 1, 2)).run()
    assert workers.started == [], "nothing is trained twice"
    assert plan_of(tmp_path / "sweep") == plan
    sweep(tmp_path / "sweep", template, seeds=(3,), reported=("post",), jobs=1).run()
    assert workers.started == [("post", 8e-3, 3)]
    now = plan_of(tmp_path / "sweep")
    assert list(now.runs)[:8] == list(plan.runs) and len(now.runs) == 9, "what has run stays in the report"
    assert now.jobs == 2, "some runs shared the machine"


def test_the_selection_seed_is_not_reported_again(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    made = sweep(tmp_path / "sweep", template, seeds=(0, 1))
    batches: list[list[int]] = []

    def stages(experiment: Experiment) -> Any:
        for runs in made.grid.stages(experiment):
            batches.append([run.seed for run, _ in runs])
            yield runs

    made.experiment.train(stages)
    assert batches == [[0, 0, 0, 0], [1, 1]]


def test_a_rate_is_chosen_by_the_selection_seed_even_where_others_disagree(
    tmp_path: Path, template: RunConfig, workers: Workers
) -> None:
    """At 2e-3 the further seeds of `pre` are worse than at 8e-3; a second command still reports it at 2e-3."""
    sweep(tmp_path / "sweep", template, methods=("pre",), seeds=(1,)).run()
    other = PlannedRun(method="pre", learning_rate=8e-3, seed=1, part=Part.REPORT, label="pre")
    extra = configured(template, "pre", 8e-3, 1)
    experiment = Experiment(directory=tmp_path / "sweep", template=template, jobs=1)
    experiment.train(lambda _: iter([[(other, extra)]]))
    choice = find(read_experiment(tmp_path / "sweep")).choices["pre"]
    assert (choice.learning_rate, [run.seed for run in choice.runs]) == (2e-3, [1])


def test_a_run_keeps_its_part(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    sweep(tmp_path / "sweep", template, seeds=(1,)).run()
    before = plan_of(tmp_path / "sweep")
    with pytest.raises(UserError):
        sweep(tmp_path / "sweep", dataclasses.replace(template, seed=1)).run()
    assert plan_of(tmp_path / "sweep") == before


@pytest.mark.parametrize("changes", [{"steps": 7}, {"model": {"dim": 32, "topology": "pre"}}, {"validation_every": 2}])
def test_another_sweep_in_the_directory_is_refused(
    tmp_path: Path, data: Path, template: RunConfig, workers: Workers, changes: dict[str, Any]
) -> None:
    sweep(tmp_path / "sweep", template).run()
    before = (tmp_path / "sweep" / "plan.json").read_bytes()
    other = tiny_run(data, **{"steps": 6, "model": {"topology": "pre"}, **changes})
    with pytest.raises(UserError):
        sweep(tmp_path / "sweep", other).run()
    assert (tmp_path / "sweep" / "plan.json").read_bytes() == before


def test_the_same_sweep_may_be_executed_otherwise(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    sweep(tmp_path / "sweep", template).run()
    execution = dataclasses.replace(template.execution, threads=2, checkpoint_every=3)
    same = dataclasses.replace(template, execution=execution)
    workers.started.clear()
    sweep(tmp_path / "sweep", same, learning_rates=(8e-3,)).run()
    assert workers.started == []


def test_all_runs_use_the_same_kernels_and_are_compiled_alike(
    tmp_path: Path, template: RunConfig, workers: Workers
) -> None:
    sweep(tmp_path / "sweep", template).run()
    assert {(config.execution.kernels, config.execution.compile) for config in workers.configs} == {("plain", "off")}
    fused = dataclasses.replace(template, execution=dataclasses.replace(template.execution, kernels="fused"))
    with pytest.raises(UserError):
        sweep(tmp_path / "sweep", fused, learning_rates=(1e-2,)).run()
    for run in (tmp_path / "sweep" / "runs").iterdir():
        edit_json(run / "environment.json", kernels="lean")
    workers.configs.clear()
    sweep(tmp_path / "sweep", template, learning_rates=(1e-2,)).run()
    assert {config.execution.kernels for config in workers.configs} == {"lean"}, "auto continues with what was used"
    sweep(tmp_path / "sweep", fused, learning_rates=(2e-2,), mixed=True).run()
    assert workers.configs[-1].execution.kernels == "fused"


def test_other_data_and_damaged_plans_are_refused(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    sweep(tmp_path / "sweep", template, methods=("pre",)).run()
    other = write_data(tmp_path / "other", seed=5)
    with pytest.raises(UserError):
        sweep(tmp_path / "sweep", tiny_run(other, steps=6, model={"topology": "pre"}), methods=("pre",)).run()
    (tmp_path / "sweep" / "plan.json").write_text("{")
    with pytest.raises(UserError):
        sweep(tmp_path / "sweep", template).run()


def test_a_sweep_killed_while_it_wrote_its_plan_resumes(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    for name in ("lock", ".plan.json.tmp"):
        (tmp_path / name).write_text("")
    sweep(tmp_path, template).run()
    assert len(workers.started) == 4


def test_a_lock_that_cannot_be_opened_is_refused(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(UserError):
        sweep(tmp_path, template).run()


def test_a_rate_that_failed_does_not_keep_a_method_from_further_seeds(
    tmp_path: Path, template: RunConfig, workers: Workers
) -> None:
    workers.outcome_of = lambda config: "no room left" if config.optimizer.learning_rate == 2e-3 else held_out(config)
    sweep(tmp_path / "sweep", template, seeds=(1,)).run()
    assert [run for run in workers.started if run[2] == 1] == [("pre", 8e-3, 1), ("post", 8e-3, 1)]


def test_a_method_that_diverged_everywhere_is_not_reported(
    tmp_path: Path, template: RunConfig, workers: Workers
) -> None:
    workers.outcome_of = lambda config: math.inf if config.label == "post" else 1.5
    run = sweep(tmp_path / "sweep", template, seeds=(1,)).run()
    assert [name for name, _, seed in workers.started if seed == 1] == ["pre"]
    assert any(line.startswith("post: ") for line in run.observer.said)


def test_methods_that_are_the_same_are_trained_once(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    workers.outcome_of = lambda config: 1.5
    methods = ("siamese", "siamese + qkv", "pre", "pre", "pre + qk")
    sweep(tmp_path / "sweep", template, methods=methods, learning_rates=(1e-3, 1e-3), control=False).run()
    assert workers.started == [("siamese", 1e-3, 0), ("pre", 1e-3, 0)]


def test_so_many_run_at_a_time_each_in_a_place_of_its_own(
    tmp_path: Path, template: RunConfig, workers: Workers
) -> None:
    workers.polls_of = lambda config: round(config.optimizer.learning_rate * 1e3) % 4
    rates = tuple(number * 1e-3 for number in range(1, 8))
    workers.outcome_of = lambda config: 1.5
    run = sweep(tmp_path / "sweep", template, jobs=3, learning_rates=rates).run()
    assert workers.most_running == 3
    assert len(workers.ended) == len(run.trained) == 14


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    workers.outcome_of = lambda config: "no room left" if config.optimizer.learning_rate == 2e-3 else held_out(config)
    run = sweep(tmp_path / "sweep", template).run()
    assert len(workers.started) == 4
    assert {job.name: error for job, error in run.failures.items()} == {
        f"{method} @ 0.002, seed 0": "no room left" for method in ("pre", "post")
    }
    assert sorted(run.observer.said) == ["no room left", "no room left", "ok", "ok", "planned 4"]
    workers.outcome_of, workers.started = held_out, []
    again = sweep(tmp_path / "sweep", template).run()
    assert [rate for _, rate, _ in workers.started] == [2e-3, 2e-3], "what failed is tried again"
    assert not again.failures


def test_an_interruption_ends_the_workers(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    def interrupt(config: RunConfig) -> float:
        raise KeyboardInterrupt

    workers.outcome_of, workers.polls_of = interrupt, lambda config: 1 if config.label == "post" else 9
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "sweep", template).run()
    assert not workers.running
    assert workers.ended == [f"{method} @ 0.002, seed 0: {-signal.SIGTERM}" for method in ("pre", "post")]


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, template: RunConfig, workers: Workers) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError):
        sweep(tmp_path, template).run()
    with pytest.raises(UserError):
        sweep(tmp_path / "new", template, methods=("siamese + qk",)).run()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    sweep(tmp_path / "new", template).run()
    with exclusive(tmp_path / "new" / "lock"), pytest.raises(StoppedError):
        sweep(tmp_path / "new", template).run()


def test_every_worker_has_a_gpu_of_its_own_while_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert shared_gpus("cuda") == ["3", "5"]
    assert [shared_gpus(device) for device in ("cuda:1", "cpu", "mps")] == [[], [], []], "no choice is left"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert shared_gpus("cuda") == ["0", "1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert shared_gpus("cuda") == []


def test_every_worker_of_two_gpus_sees_one(
    tmp_path: Path, template: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    shown = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: shown.append(env["CUDA_VISIBLE_DEVICES"]))
    for device in ("cuda", "cuda:1"):
        execution = dataclasses.replace(template.execution, device=device)
        job = Job(planned=PLANNED, config=dataclasses.replace(template, execution=execution), directory=tmp_path)
        for place in range(3):
            experiment_module._start(job, place)
    assert shown == ["3", "5", "3", "3,5", "3,5", "3,5"]


# --- what a person sees ----------------------------------------------------------------------------------------------


PLANNED = PlannedRun(method="pre", learning_rate=1e-2, seed=0, part=Part.SELECTION, label="pre")


def test_a_run_that_failed_shows_no_result_and_notes_are_shown(
    tmp_path: Path, template: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(planned=PLANNED, config=template, directory=tmp_path / "run")
    console = ExperimentConsole(tmp_path)
    console.planned([job])
    capsys.readouterr()
    write_finished(job, 1.5)
    with MetricsLog(RunDirectory(job.directory).metrics_file) as log:
        log.append({"kind": "note", "text": "a checkpoint was damaged"})
    console.ended(job, None)
    note, ended = capsys.readouterr().err.splitlines()
    assert note.endswith(": a checkpoint was damaged") and "held-out 1.500" in ended
    console.ended(job, "no room left")
    ended = capsys.readouterr().err.splitlines()[-1]
    assert "no room left" in ended and "held-out" not in ended


def test_the_time_of_the_rest_is_estimated_after_the_first_run(
    tmp_path: Path, template: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [configured(template, "pre", rate, 0) for rate in (1e-3, 2e-3, 4e-3)]
    jobs = [Job(planned=PLANNED, config=config, directory=tmp_path / str(n)) for n, config in enumerate(configs)]
    console = ExperimentConsole(tmp_path)
    console.planned(jobs)
    write_finished(jobs[0], 1.5)
    now = time.monotonic() + 3600.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    console.ended(jobs[0], None)
    assert "2 runs of 3 to train: about 2 h 0 min left" in capsys.readouterr().err


# --- the command -----------------------------------------------------------------------------------------------------


def command(data: Path, out: Path, *options: str) -> list[str]:
    tiny = [str(part) for option in TINY_OPTIONS.items() for part in option]
    return ["sweep", "mini", "--data", str(data), "--out", str(out), *tiny, *options]


def test_the_command_reports_what_ran_and_names_what_failed(
    data: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.outcome_of = lambda config: "no room left" if config.optimizer.learning_rate == 8e-3 else held_out(config)
    out = tmp_path / "sweep"
    options = ("--methods", "pre", "post", "--learning-rates", "2e-3", "8e-3", "--jobs", "2")
    assert main(command(data, out, *options, "--title", "Mine")) == 2
    said = capsys.readouterr()
    assert "pre @ 0.008, seed 0: no room left" in said.err.splitlines()[-1]
    assert said.out.splitlines()[-1] == f"report: {out / 'report' / 'report.html'}"
    assert "<title>Mine</title>" in (out / "report" / "report.html").read_text()
    assert "<code>siamesenorm explain pre</code>" in (out / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    "options",
    [
        ("--methods", "siamse"),
        ("--learning-rates", "abc"),
        ("--jobs", "-1"),
        ("--model.attention-norm", "qk-head"),
        ("--execution.device", "cuda:77"),
        ("--execution.device", "abacus"),
        ("--execution.trackers", "wandb"),
        ("--model.topology", "siamese"),
        ("--optimizer.learning-rate=5e-3",),
    ],
)
def test_the_command_refuses_in_one_line_and_leaves_nothing(
    data: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(command(data, tmp_path / "sweep", *options)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "sweep").exists()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes of others by their descriptors")
def test_a_real_worker_ends_with_its_sweep_which_goes_on_where_it_stopped(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    arguments = command(data, out, "--methods", "pre", "--learning-rates", "2e-3")
    started = [sys.executable, "-m", "siamesenorm", *arguments]
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline().startswith(f"1 run in {out}, 0 of them finished before")
        worker = os.pidfd_open(child(process.pid))
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    assert select.select([worker], [], [], 60)[0], "the worker outlived its sweep"
    os.close(worker)

    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {out / 'report' / 'report.html'}"
    (run,) = (out / "runs").iterdir()
    assert [record["step"] for record in records(run, "train")] == [1, 2, 3, 4, 5, 6]
    finished = (run / "metrics.jsonl").read_bytes()
    assert main(arguments) == 0
    assert (run / "metrics.jsonl").read_bytes() == finished
    assert "1 of them finished before" in capsys.readouterr().err


def child(pid: int) -> int:
    """Return the child of a process, once it has one."""
    end = time.monotonic() + 60
    while not (found := Path(f"/proc/{pid}/task/{pid}/children").read_text()):
        assert time.monotonic() < end, "no worker"
        time.sleep(0.05)
    return int(found)
