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
from siamesenorm.comparison.findings import CONFIRMED_LOWER, NOT_CONFIRMED, SOME_DIVERGED
from siamesenorm.comparison.renderings import for_markdown
from siamesenorm.comparison.results import read_run
from siamesenorm.data import PreparedData, TokenSamples
from siamesenorm.errors import UserError
from siamesenorm.models.language import LanguageModel
from siamesenorm.norms import NormSpec
from siamesenorm.recipes.continued import Arm, Experiment, bases, conclusions, find, gaps, read_results
from siamesenorm.recipes.continued import training as recipe
from siamesenorm.recipes.continued.results import BaseRun, ContinuedRun, Results
from siamesenorm.topologies import build_topology
from siamesenorm.training.config import RunConfig
from siamesenorm.training.curves import read_loss_curve
from siamesenorm.training.instruments import Instrument
from siamesenorm.training.loop import TrainingLoop, train
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
        ("siamese-post-pre", {}, 1e-3),
        ("dhc-2", {}, 1e-3),
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
    (told,) = [record["start"] for record in records(tmp_path / "run", "model")]
    assert told["run"] == config.warm_start.run and (not told["differences"]) == (near == 0)


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
    third = continued(data, tmp_path / "second", f"{EXACT},gated_opening=true")
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
    with pytest.raises(UserError, match="is not finished"):
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
    with pytest.raises(UserError, match="step 10"):
        train(config, tmp_path / "out")


# --- the command line


def test_a_run_is_started_from_another_on_the_command_line(
    data: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", data, "--start", source, "--steps", 3, "--batch", 4, "--optimizer.warmup-steps", 1]
    command = ["train", "mini", *map(str, arguments), "--validation-tokens", "128", "--execution.threads", "1"]
    assert main([*command, "--model.topology", EXACT, "--out", str(tmp_path / "run")]) == 0
    assert records(tmp_path / "run", "validation")[0]["loss"] == last_loss(source)
    for options, told in (
        (["--model.topology", "siamese"], "use siamese-post-pre"),
        (["--model.topology", "pre", "--model.dim", "32"], "dim of a model"),
        (["--model.topology", "pre", "--model.attention-norm", "none"], "attention_norm of a model"),
        (["--model.topology", "post"], "cannot keep the function"),
    ):
        capsys.readouterr()
        assert main([*command, *options, "--out", str(tmp_path / "refused")]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
        assert not (tmp_path / "refused").exists()


# --- the recipe

ARMS = (
    Arm(base="pre"),
    Arm(base="pre", topology=EXACT),
    Arm(base="pre + qkv"),
    Arm(base="pre + qkv", topology="siamese"),
)
TINY = Experiment(arms=ARMS, seeds=(0, 1), learning_rates=(1e-2,), base_learning_rate=1e-2, base_steps=6, steps=4)


class Silent:
    def planned(self, jobs: list[Any]) -> None: ...
    def progressed(self, running: list[Any]) -> None: ...
    def told(self, line: str) -> None: ...
    def ended(self, job: Any, error: str | None) -> None: ...


def train_here(trained: list[str], *, until: int = 1000) -> Any:
    """Return what trains jobs in this process, writes down their names, and is interrupted after some."""

    def train_jobs(jobs: list[Any], at_once: int, observer: Any) -> dict[str, str]:
        for job in jobs:
            if job.verdict is None:
                if len(trained) == until:
                    raise KeyboardInterrupt
                train(job.config, job.directory)
                trained.append(job.name)
        return {}

    return train_jobs


def run_recipe(data: Path, out: Path, experiment: Experiment = TINY) -> dict[str, str]:
    template = tiny_run(data, model={"topology": "pre"}, steps=6)
    return recipe.train_experiment(experiment, template, out, jobs=1, observer=Silent())


@pytest.fixture(scope="module")
def experiment(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str]]:
    """The tiny experiment, interrupted after five runs and repeated, with what each of the two trained."""
    out, first, second = tmp_path_factory.mktemp("recipe") / "out", [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "train_jobs", train_here(first, until=5))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(data, out)
        patch.setattr(recipe, "train_jobs", train_here(second))
        assert run_recipe(data, out) == {}
        run_recipe(data, out)
    return out, first, second


def test_an_interrupted_experiment_goes_on_and_trains_nothing_twice(experiment: Any) -> None:
    out, first, second = experiment
    assert len(first) == 5 and len(first) + len(second) == 4 + 8
    assert len(list((out / "runs").iterdir())) == 12
    assert len(set(first) | set(second)) == 12


def test_a_pair_shares_base_seed_rate_and_every_batch(experiment: Any) -> None:
    out, *_ = experiment
    plan = json.loads((out / "continued.json").read_text())
    configs = {name: json.loads((out / "runs" / name / "config.json").read_text()) for name in plan["runs"]}
    pairs: dict[tuple[Any, ...], list[str]] = {}
    for name, part in plan["runs"].items():
        if part["arm"]:
            config = configs[name]
            key = (part["base"], config["seed"], config["optimizer"]["learning_rate"], json.dumps(config["warm_start"]))
            pairs.setdefault(key, []).append(name)
    assert len(pairs) == 4
    for (base, seed, _, start), (unchanged, converted) in pairs.items():
        assert plan["runs"][unchanged]["arm"]["topology"] == "pre"
        assert json.loads(start)["position"] == 6 * SAMPLES
        (source,) = [n for n, c in configs.items() if json.loads(start)["path"].endswith(n)]
        assert plan["runs"][source] == {"base": base, "arm": None} and configs[source]["seed"] == seed
        different = {key for key in configs[unchanged] if configs[unchanged][key] != configs[converted][key]}
        assert different == {"task"}
        models = [configs[name]["task"]["model"] for name in (unchanged, converted)]
        assert {key for key in models[0] if models[0][key] != models[1][key]} == {"topology"}


def test_gaps_are_the_differences_of_the_records(experiment: Any) -> None:
    out, *_ = experiment
    plan = json.loads((out / "continued.json").read_text())
    losses: dict[tuple[str, str, int], float] = {}
    for name, part in plan["runs"].items():
        if part["arm"]:
            seed = json.loads((out / "runs" / name / "config.json").read_text())["seed"]
            losses[part["base"], part["arm"]["topology"], seed] = last_loss(out / "runs" / name)
    findings = find(read_results(out))
    assert [gap.arm for gap in findings.gaps] == list(ARMS)
    for gap in findings.compared:
        expected = {s: losses[gap.arm.base, gap.arm.topology, s] - losses[gap.arm.base, "pre", s] for s in (0, 1)}
        undiverged = {s: d for s, d in expected.items() if gap.comparison.difference.by_seed.get(s) is not None}
        assert gap.comparison.difference.by_seed == pytest.approx(undiverged)
        assert abs(gap.jump) < 1e-4


def test_other_data_and_other_directories_are_refused(experiment: Any, data: Path, tmp_path: Path) -> None:
    out, *_ = experiment
    other = write_data(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="other data or another model"):
        run_recipe(other, out)
    for name, value in {"steps": 5, "base_steps": 7, "base_learning_rate": 2e-2, "warmup_fraction": 0.5}.items():
        with pytest.raises(UserError, match=f"holds the recipe with {name} .*, not {value}: choose another --out"):
            run_recipe(data, out, dataclasses.replace(TINY, **{name: value}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UserError, match="choose another --out"):
        run_recipe(data, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_an_arm_that_its_base_cannot_become_is_refused_at_once(data: Path, tmp_path: Path) -> None:
    arms = (Arm(base="pre"), Arm(base="pre", topology="siamese"))
    with pytest.raises(UserError, match="needs attention norm 'qkv-head'"):
        run_recipe(data, tmp_path / "out", dataclasses.replace(TINY, arms=arms))
    assert not (tmp_path / "out").exists()


def test_the_command_reports_what_was_trained(experiment: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out, *_ = experiment
    assert main(["reproduce", "continued", "--out", str(out)]) == 0
    assert "Against unchanged" in capsys.readouterr().out
    report = (out / "report" / "report.md").read_text()
    assert for_markdown(gaps(find(read_results(out)))) in report
    assert len((out / "report" / "runs.csv").read_text().splitlines()) == 1 + 12
    assert main(["reproduce", "continued", "--out", str(out / "runs")]) == 2
    assert "continued.json" in capsys.readouterr().err


# --- statistics, on numbers made up for the purpose


def made_up(template: Path, losses: dict[Arm, list[float]], *, diverged: Arm | None = None) -> Results:
    """Return results in which the arms end at these losses, one a seed."""
    run = dataclasses.replace(read_run(template), verdict=None)
    bad = verdict_of_a_divergence(run)
    return Results(
        bases=tuple(BaseRun(base="pre", run=dataclasses.replace(run, seed=s, held_out_loss=4.0)) for s in range(5)),
        continued=tuple(
            ContinuedRun(
                arm=arm,
                run=dataclasses.replace(
                    run, seed=seed, held_out_loss=loss, verdict=bad if (arm, seed) == (diverged, 0) else None
                ),
                first_loss=4.0 + 1e-3 * seed,
            )
            for arm, values in losses.items()
            for seed, loss in enumerate(values)
        ),
        unfinished=0,
        experiment={},
        command=None,
        data={},
    )


def verdict_of_a_divergence(run: Any) -> Any:
    return dataclasses.replace(RunDirectory(run.path).read_verdict(), label="diverged")


UNCHANGED, BETTER, SAME = Arm(base="pre"), Arm(base="pre", topology=EXACT), Arm(base="pre", norm="seednorm")
LOSSES = {
    UNCHANGED: [3.0, 3.1, 3.2, 3.3, 3.4],
    BETTER: [2.9, 2.99, 3.12, 3.18, 3.3],  # -0.10 -0.11 -0.08 -0.12 -0.10
    SAME: [3.01, 3.08, 3.22, 3.29, 3.41],  # +0.01 -0.02 +0.02 -0.01 +0.01
}


def test_words_follow_from_paired_intervals_corrected_together(source: Path) -> None:
    findings = find(made_up(source, LOSSES))
    better, same = findings.compared
    assert (better.comparison.conclusion, same.comparison.conclusion) == (CONFIRMED_LOWER, NOT_CONFIRMED)
    differences = np.array([-0.10, -0.11, -0.08, -0.12, -0.10])
    error = differences.std(ddof=1) / np.sqrt(5)
    interval = better.comparison.interval
    # Two tests: the smaller p-value is held against 0.025, where Student's t with 4 degrees of freedom is 3.4954.
    assert interval.mean == pytest.approx(differences.mean())
    assert interval.half_width == pytest.approx(3.4954 * error, rel=1e-4)
    assert same.comparison.interval.half_width == pytest.approx(
        2.7764 * np.std([0.01, -0.02, 0.02, -0.01, 0.01], ddof=1) / np.sqrt(5), rel=1e-4
    )
    assert better.jump == pytest.approx(4e-3)
    first, second = conclusions(findings)
    assert "ends lower than unchanged, confirmed" in first and "5 seeds" in first
    assert "no difference from unchanged is confirmed" in second


def test_a_lost_seed_allows_no_conclusion(source: Path) -> None:
    findings = find(made_up(source, LOSSES, diverged=BETTER))
    better, same = findings.compared
    assert better.comparison.conclusion == SOME_DIVERGED and better.comparison.decision is None
    assert same.comparison.decision is not None
    assert "no conclusion" in conclusions(findings)[0]


# --- the committed evidence

EVIDENCE = ROOT / "benchmarks/continued"
RUNS = sorted(EVIDENCE.glob("runs/*"))


def test_the_page_says_what_the_committed_runs_say() -> None:
    findings = find(read_results(EVIDENCE))
    page = (ROOT / "docs/continued.md").read_text()
    for table in (bases(findings), gaps(findings)):
        assert for_markdown(table) in page
    assert findings.results.unfinished == 0
    assert {len(gap.outcome.complete) for gap in findings.gaps} == {5}


def test_every_committed_continuation_began_where_its_base_ended() -> None:
    assert len(RUNS) >= 40
    for gap in find(read_results(EVIDENCE)).gaps:
        exact = gap.arm.unchanged or gap.arm.norm or "normalized_input=false" in gap.arm.topology
        assert abs(gap.jump) <= (1e-6 if exact else 1e-3), gap.arm


def test_the_verdicts_of_the_committed_runs_follow_from_their_records() -> None:
    for run in RUNS:
        stored, now = RunDirectory(run).read_verdict(), judge(read_loss_curve(run / "metrics.jsonl"))
        assert stored is not None and now == stored


def test_the_committed_runs_name_no_place() -> None:
    for file in (*EVIDENCE.glob("*.json"), *EVIDENCE.glob("runs/*/config.json")):
        assert '"/' not in file.read_text()
