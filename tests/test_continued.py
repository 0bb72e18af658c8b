"""Runs that start from the weights of others, and the recipe that continues converted models beside unchanged ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from siamesenorm.cli import main
from siamesenorm.comparison import experiment_runner as experiment_module
from siamesenorm.comparison.experiment_plan import ExperimentPlan, Part, PlannedRun, read_plan
from siamesenorm.comparison.experiment_runner import Experiment
from siamesenorm.comparison.findings import Conclusion
from siamesenorm.comparison.report_writer import table_in_markdown
from siamesenorm.comparison.results import ExperimentResults, read_experiment, read_run
from siamesenorm.data import PreparedData, TokenSamples
from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import NormSpec
from siamesenorm.recipes.continued import (
    ContinuedFindings,
    ContinuedPlan,
    Variant,
    conclusions,
    continuations_table,
    continued_report,
    find_continued,
)
from siamesenorm.topologies import build_topology
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loop import Instrument, TrainingLoop, train
from siamesenorm.training.loss_curve import read_loss_curve
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.verdict import judge
from siamesenorm.training.warm_start import continue_run, start_defaults
from training_runs import edit_json, records, tiny_plan, tiny_run, with_model, write_data

ROOT = Path(__file__).parents[1]
EXACT = "siamese-post-pre:normalized_input=false"
SOURCE_STEPS, SAMPLES = 20, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "counting")


@pytest.fixture(scope="module")
def source(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished Pre-Norm run."""
    run = tmp_path_factory.mktemp("runs") / "source"
    train(tiny_run(data, model={"topology": "pre"}, steps=SOURCE_STEPS), run)
    return run


def continued(data: Path, source: Path, topology: str = "pre", **changes: Any) -> RunConfig:
    fields = {"topology": build_topology(topology), **changes.pop("model", {})}
    if "norm" in fields:
        fields["norm"] = NormSpec.parse(fields["norm"])
    return continue_run(with_model(start_defaults(tiny_plan(data, **changes), source), **fields), source)


def last_model(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").iterdir()) / "model.safetensors")


def last_loss(run: Path) -> float:
    return records(run, "validation")[-1]["loss"]


class Killed(Exception): ...


class Killer(Instrument):
    """Ends the process, as far as a test can, once a record was written."""

    def __init__(self, **moment: Any) -> None:
        self.moment = moment

    def on_record(self, loop: TrainingLoop, record: dict[str, Any]) -> None:
        if self.moment.items() <= record.items():
            raise Killed


# --- configuration and identity


def test_a_run_from_scratch_is_what_it_was(data: Path) -> None:
    config = tiny_run(data)
    assert config.to_json()["warm_start"] is None
    assert RunConfig.from_json(config.to_json()).identity == config.identity


def test_a_start_counts_by_its_run_and_not_by_its_path(data: Path, source: Path, tmp_path: Path) -> None:
    config = continued(data, source)
    moved = shutil.copytree(source, tmp_path / "moved")
    assert config.warm_start is not None and config.warm_start.run == RunDirectory(source).read_config().identity
    assert continued(data, moved).identity == config.identity
    assert RunConfig.from_json(config.to_json()) == config
    others = [
        dataclasses.replace(config, warm_start=None),
        dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, run="0" * 64)),
        dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, position=0)),
    ]
    assert len({config.identity, *(other.identity for other in others)}) == 4


def test_the_model_is_that_of_the_source(data: Path, source: Path) -> None:
    old, new = RunDirectory(source).read_config().task.model, continued(data, source, EXACT).task.model
    assert new.topology.gated_opening and not new.topology.normalized_input
    assert dataclasses.replace(new, topology=old.topology) == old
    assert continued(data, source, "pre", model={"norm": "seednorm"}).task.model.norm.name == "seednorm"
    assert continued(data, source, model={"dropout": 0.1, "context": 8}).task.model.context == 8


# --- training


@pytest.mark.parametrize(
    ("topology", "model", "near"),
    [
        ("pre", {}, 0),
        (EXACT, {}, 0),
        ("siamese-post-pre", {}, 1e-6),
        ("dhc-2", {}, 1e-6),
        ("pre", {"norm": "seednorm"}, 0),
    ],
)
def test_it_begins_where_the_source_ended(
    topology: str, model: dict[str, Any], near: float, data: Path, source: Path, tmp_path: Path
) -> None:
    config = continued(data, source, topology, steps=2, model=model)
    train(config, tmp_path / "run")
    first, *_ = records(tmp_path / "run", "validation")
    assert first["step"] == 0
    assert abs(first["loss"] - last_loss(source)) <= near
    (start,) = [record["start"] for record in records(tmp_path / "run", "model")]
    assert start["run"] == config.warm_start.run and start["differences"] == []


def test_the_data_go_on_behind_the_source(data: Path, source: Path, tmp_path: Path) -> None:
    """The first loss is that of the source's model on the samples after those it has seen."""
    train(continued(data, source, EXACT, steps=2), tmp_path / "run")
    config = RunDirectory(source).read_config()
    model = LanguageModel(config.task.model)
    model.load_state_dict(last_model(source))
    samples = TokenSamples(PreparedData.open(data), "train", config.task.model.context, config.seed)
    batch = torch.from_numpy(samples.batch(SOURCE_STEPS * SAMPLES, SAMPLES))
    loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
    assert records(tmp_path / "run", "train")[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_another_order_of_the_data_begins_at_its_front(data: Path, source: Path) -> None:
    assert continued(data, source).warm_start.position == SOURCE_STEPS * SAMPLES
    assert continued(data, source, seed=1).warm_start.position == 0
    assert continued(data, source, model={"context": 8}).warm_start.position == 0


def test_a_chain_of_runs_passes_over_all_of_their_samples(data: Path, source: Path, tmp_path: Path) -> None:
    train(continued(data, source, EXACT, steps=5), tmp_path / "second")
    third = continued(data, tmp_path / "second", f"{EXACT},gated_opening=true,exact_eps=true")
    assert third.warm_start.position == (SOURCE_STEPS + 5) * SAMPLES
    train(dataclasses.replace(third, steps=5), tmp_path / "third")
    assert records(tmp_path / "third", "validation")[0]["loss"] == last_loss(tmp_path / "second")


def test_interrupted_it_ends_with_the_same_bits_and_needs_its_source_no_more(
    data: Path, source: Path, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "source")
    plan = {"steps": 12, "model": {"dropout": 0.2}, "execution": {"checkpoint_every": 4}}
    config = continued(data, tmp_path / "source", EXACT, **plan)
    train(config, tmp_path / "whole")
    for moment in ({"kind": "model"}, {"kind": "validation", "step": 0}, {"kind": "train", "step": 3}):
        with pytest.raises(Killed):
            train(config, tmp_path / "killed", instruments=(Killer(**moment),))
    with pytest.raises(Killed):
        train(config, tmp_path / "killed", instruments=(Killer(kind="train", step=6),))
    shutil.rmtree(tmp_path / "source")
    train(config, tmp_path / "killed")
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    ours, theirs = last_model(tmp_path / "killed"), last_model(tmp_path / "whole")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert ours.keys() == theirs.keys() and ours["opening.gate.gain"].any(), "the silent stream has woken up"


def refused(config: RunConfig, out: Path) -> str:
    with pytest.raises(UserError) as refusal:
        train(config, out)
    assert "\n" not in str(refusal.value) and not out.exists()
    return str(refusal.value)


def test_sources_that_are_none(data: Path, source: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(source, tmp_path / "source")
    config = continued(data, copied)
    assert config.warm_start is not None
    assert "depth of a model" in refused(with_model(config, depth=3), tmp_path / "out")
    other = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, run="0" * 64))
    assert "restore that run" in refused(other, tmp_path / "out")
    (copied / "verdict.json").unlink()
    assert "is not finished" in refused(config, tmp_path / "out")
    with pytest.raises(UserError):
        continued(data, copied)
    shutil.rmtree(copied / "checkpoints")
    shutil.copy(source / "verdict.json", copied)
    assert "has no checkpoints" in refused(config, tmp_path / "out")
    shutil.rmtree(copied)
    assert "not the directory of a run" in refused(config, tmp_path / "out")


def test_a_source_that_gave_up_early_has_no_last_weights(data: Path, source: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(source, tmp_path / "source")
    config = continued(data, copied)
    (checkpoint,) = (copied / "checkpoints").iterdir()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    edit_json(checkpoint / "manifest.json", **{**manifest, "step": 10})
    checkpoint.rename(checkpoint.with_name("step-00000010"))
    with pytest.raises(UserError):
        train(config, tmp_path / "out")


# --- the command line


def test_a_run_is_started_from_another_on_the_command_line(
    data: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", data, "--start", source, "--steps", 3, "--batch", 4, "--optimizer.warmup-steps", 1]
    command = ["train", "mini", *map(str, arguments), "--validation-tokens", "128", "--execution.threads", "1"]
    assert main([*command, "--model.topology", EXACT, "--out", str(tmp_path / "run")]) == 0
    assert records(tmp_path / "run", "validation")[0]["loss"] == last_loss(source)
    for options, words in (
        (["--model.topology", "siamese"], "use siamese-post-pre"),
        (["--model.topology", "pre", "--model.dim", "32"], "dim of a model"),
        (["--model.topology", "pre", "--model.attention-norm", "none"], "attention_norm of a model"),
        (["--model.topology", "post"], "cannot keep the function"),
    ):
        capsys.readouterr()
        assert main([*command, *options, "--out", str(tmp_path / "refused")]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
        assert not (tmp_path / "refused").exists()


# --- the recipe

VARIANTS = (
    Variant(base="pre"),
    Variant(base="pre", method=EXACT),
    Variant(base="pre + qkv"),
    Variant(base="pre + qkv", method="siamese"),
)
TINY = ContinuedPlan(
    variants=VARIANTS, seeds=(0, 1), learning_rates=(1e-2,), base_learning_rate=1e-2, base_steps=6, steps=4
)


def train_here(trained: list[str], *, until: int = 1000) -> Any:
    """Return what trains jobs in this process, appends their names, and is interrupted after some."""

    def train_jobs(jobs: Any, at_once: int, observer: Any, deadline: float) -> dict[str, str]:
        for job in jobs:
            if job.verdict is None:
                if len(trained) == until:
                    raise KeyboardInterrupt
                train(job.config, job.directory)
                trained.append(f"{job.planned.method} {job.name}")
        return {}

    return train_jobs


def run_recipe(data: Path, out: Path, recipe: ContinuedPlan = TINY) -> dict[str, str]:
    template = recipe.template(tiny_run(data, model={"topology": "pre"}, steps=6))
    made = Experiment(directory=out, template=template, jobs=1, comparisons=recipe.comparisons, common=recipe.common)
    made.train(recipe.stages)
    return made.failures


@pytest.fixture(scope="module")
def experiment(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str]]:
    """The tiny experiment, interrupted after five runs and repeated, with what each of the two trained."""
    out, first, second = tmp_path_factory.mktemp("recipe") / "out", [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment_module, "train_jobs", train_here(first, until=5))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(data, out)
        patch.setattr(experiment_module, "train_jobs", train_here(second))
        assert run_recipe(data, out) == {}
        run_recipe(data, out)
    return out, first, second


def test_an_interrupted_experiment_resumes_and_trains_nothing_twice(experiment: Any) -> None:
    out, first, second = experiment
    assert len(first) == 5 and len(first) + len(second) == 4 + 8
    assert len(list((out / "runs").iterdir())) == 12
    assert len(set(first) | set(second)) == 12


def test_a_pair_shares_base_seed_rate_and_every_batch(experiment: Any) -> None:
    out, *_ = experiment
    plan = read_plan(out)
    assert plan is not None
    configs = {name: RunDirectory(out / "runs" / name).read_config() for name in plan.runs}
    pairs: dict[tuple[Any, ...], list[str]] = {}
    for name, run in plan.runs.items():
        if run.part is Part.CONTINUED:
            pairs.setdefault((run.seed, run.learning_rate, configs[name].warm_start), []).append(name)
    assert len(pairs) == 4
    for (seed, _, start), (unchanged, converted) in pairs.items():
        assert start.position == 6 * SAMPLES
        base = plan.runs[start.run[:12]]
        assert (base.part, base.seed) == (Part.BASE, seed)
        assert plan.runs[unchanged].method == f"{base.method} > unchanged"
        models = [configs[name].task.model for name in (unchanged, converted)]
        task = dataclasses.replace(
            configs[converted].task, model=dataclasses.replace(models[1], topology=models[0].topology)
        )
        assert dataclasses.replace(configs[converted], task=task) == configs[unchanged]


def test_gaps_are_the_differences_of_the_records(experiment: Any) -> None:
    out, *_ = experiment
    plan = read_plan(out)
    assert plan is not None
    losses = {(run.method, run.seed): last_loss(out / "runs" / name) for name, run in plan.runs.items()}
    findings = find_continued(read_experiment(out))
    assert [each.outcome.method for each in findings.continuations] == [variant.name for variant in VARIANTS]
    assert [each.base for each in findings.continuations] == [variant.base for variant in VARIANTS]
    for each in findings.comparisons:
        expected = {seed: losses[each.method, seed] - losses[each.baseline, seed] for seed in (0, 1)}
        undiverged = {seed: gap for seed, gap in expected.items() if seed in each.difference.by_seed}
        assert each.difference.by_seed == pytest.approx(undiverged)
    assert all(abs(each.jump) < 1e-4 for each in findings.continuations)


def test_other_data_and_other_directories_are_refused(experiment: Any, data: Path, tmp_path: Path) -> None:
    out, *_ = experiment
    with pytest.raises(UserError):
        run_recipe(write_data(tmp_path / "other", seed=5), out)
    for name, value in {"steps": 5, "base_steps": 7, "base_learning_rate": 2e-2, "warmup_fraction": 0.5}.items():
        with pytest.raises(UserError):
            run_recipe(data, out, dataclasses.replace(TINY, **{name: value}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UserError):
        run_recipe(data, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_a_variant_that_its_base_cannot_become_is_refused_at_once(data: Path, tmp_path: Path) -> None:
    variants = (Variant(base="pre"), Variant(base="pre", method="siamese"))
    with pytest.raises(UserError):
        run_recipe(data, tmp_path / "out", dataclasses.replace(TINY, variants=variants))
    assert not (tmp_path / "out").exists()


def test_the_command_reports_what_was_trained(experiment: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out, *_ = experiment
    for words in (["reproduce", "continued", "--out", str(out)], ["report", str(out)]):
        assert main(words) == 0
        assert "Against the baselines" in capsys.readouterr().out
        report = (out / "report" / "report.md").read_text()
        assert table_in_markdown(continuations_table(find_continued(read_experiment(out)))) in report
        assert len((out / "report" / "runs.csv").read_text().splitlines()) == 1 + 12
    assert main(["reproduce", "continued", "--out", str(out / "runs")]) == 2


# --- statistics, on numbers made up for the purpose

UNCHANGED, BETTER, SAME = VARIANTS[0], VARIANTS[1], Variant(base="pre", method="pre + seednorm")
LOSSES = {
    UNCHANGED: [3.0, 3.1, 3.2, 3.3, 3.4],
    BETTER: [2.9, 2.99, 3.12, 3.18, 3.3],  # -0.10 -0.11 -0.08 -0.12 -0.10
    SAME: [3.01, 3.08, 3.22, 3.29, 3.41],  # +0.01 -0.02 +0.02 -0.01 +0.01
}


def made_up(source: Path, *, diverged: Variant | None = None) -> ContinuedFindings:
    """Return the findings of variants that end at `LOSSES`, one a seed."""
    run = read_run(source)
    assert run.verdict is not None
    bad = dataclasses.replace(run.verdict, label="diverged")
    runs = []
    for seed in range(5):
        base = PlannedRun(method="pre", learning_rate=1e-2, seed=seed, part=Part.BASE, label="pre")
        path = Path(f"{seed:012d}")
        runs.append(
            dataclasses.replace(run, path=path, identity=path.name, **dataclasses.asdict(base), held_out={"loss": 4.0})
        )
        for variant, losses in LOSSES.items():
            planned = dataclasses.replace(base, method=variant.name, part=Part.CONTINUED, label=variant.label)
            runs.append(
                dataclasses.replace(
                    run,
                    path=path / variant.label,
                    **dataclasses.asdict(planned),
                    held_out={"loss": losses[seed]},
                    first_held_out={"loss": 4.0 + 1e-3 * seed},
                    facts={**run.facts, "start": {"run": path.name}},
                    verdict=bad if (variant, seed) == (diverged, 0) else run.verdict,
                )
            )
    recipe = ContinuedPlan(variants=tuple(LOSSES))
    plan = ExperimentPlan(runs={str(each.path): each for each in runs}, comparisons=recipe.comparisons)
    return find_continued(ExperimentResults(path=Path("made up"), plan=plan, runs=tuple(runs)))


def test_words_follow_from_paired_intervals_corrected_together(source: Path) -> None:
    findings = made_up(source)
    better, same = findings.comparisons
    assert (better.conclusion, same.conclusion) == (Conclusion.CONFIRMED_LOWER, Conclusion.NOT_CONFIRMED)
    differences = np.array([-0.10, -0.11, -0.08, -0.12, -0.10])
    error = differences.std(ddof=1) / np.sqrt(5)
    assert better.interval is not None and better.corrected is not None and same.corrected is not None
    # Two tests: the smaller p-value is compared with 0.025, where Student's t with 4 degrees of freedom is 3.4954.
    assert better.corrected.mean == pytest.approx(differences.mean())
    assert better.corrected.half_width == pytest.approx(3.4954 * error, rel=1e-4)
    assert better.interval.half_width == pytest.approx(2.7764 * error, rel=1e-4)
    assert same.corrected.half_width == pytest.approx(
        2.7764 * np.std([0.01, -0.02, 0.02, -0.01, 0.01], ddof=1) / np.sqrt(5), rel=1e-4
    )
    assert findings.continuations[1].jump == pytest.approx(4e-3)
    first, second = conclusions(findings)
    assert first.text.startswith("Ends lower") and second.text.startswith("No difference")


def test_a_lost_seed_allows_no_conclusion(source: Path) -> None:
    findings = made_up(source, diverged=BETTER)
    better, same = findings.comparisons
    assert better.conclusion is Conclusion.SOME_DIVERGED and better.decision is None
    assert same.decision is not None


# --- the committed evidence

EVIDENCE = ROOT / "benchmarks/continued"
RUNS = sorted(EVIDENCE.glob("runs/*"))


def test_the_page_says_what_the_committed_runs_say() -> None:
    findings = find_continued(read_experiment(EVIDENCE))
    page = (ROOT / "docs/continued.md").read_text()
    for table in continued_report(findings).tables:
        assert table_in_markdown(table) in page
    assert not findings.results.unfinished and not findings.results.missing
    assert {len(each.outcome.complete) for each in findings.continuations} == {5}


def test_every_committed_continuation_began_where_its_base_ended() -> None:
    assert len(RUNS) >= 40
    for each in find_continued(read_experiment(EVIDENCE)).continuations:
        assert each.base in ("pre", "pre + qkv")
        assert abs(each.jump) <= (1e-3 if each.label in ("siamese-post-pre", "siamese") else 1e-6), each.label


def test_the_verdicts_of_the_committed_runs_follow_from_their_records() -> None:
    for run in RUNS:
        stored, now = RunDirectory(run).read_verdict(), judge(read_loss_curve(run / "metrics.jsonl"))
        assert stored is not None and (now.label, now.reasons) == (stored.label, stored.reasons)


def test_the_committed_runs_name_no_place() -> None:
    for file in (*EVIDENCE.glob("*.json"), *EVIDENCE.glob("runs/*/config.json")):
        assert '"/' not in file.read_text()
