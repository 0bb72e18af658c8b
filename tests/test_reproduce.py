"""Items of the papers: their plans, the runs that they share, their claims, their pages, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from report_tables import fill_tables
from siamesenorm.cli import main, reproduce
from siamesenorm.comparison import experiment_runner, formatting, report_writer
from siamesenorm.comparison.experiment_plan import read_plan, write_plan
from siamesenorm.comparison.experiment_runner import OutOfTime
from siamesenorm.comparison.findings import find
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import Table
from siamesenorm.comparison.report_writer import report_in_markdown
from siamesenorm.recipes import overhead, scales
from siamesenorm.recipes.claims import MEASURES, Cell, ClaimOutcome, judge_claims
from siamesenorm.recipes.item import Item, RunGrid
from siamesenorm.recipes.item_claims import against, claims_of
from siamesenorm.recipes.item_report import item_report, leaders
from siamesenorm.recipes.item_results import read_item
from siamesenorm.recipes.items import ITEMS
from siamesenorm.recipes.league import budget_curve, league_sections
from siamesenorm.recipes.published_numbers import find_published, published_rows
from siamesenorm.recipes.run_costs import count_operations
from siamesenorm.recipes.scales import WORKLOADS, Scale, Workload
from siamesenorm.topologies import available_topologies, build_topology
from siamesenorm.training.run_directory import RunDirectory
from test_sweep import Workers
from training_runs import tiny_run, write_data

BOOKS = Path(__file__).parents[1] / "benchmarks/books/runs"
GRIDS = [(item, grid) for item in ITEMS.values() for grid in item.grids]


# --- plans


def test_every_item_has_runs_that_can_be_configured_at_every_scale() -> None:
    for scale in Scale:
        for _, grid in GRIDS:
            if workload := WORKLOADS[grid.domain].get(scale):
                template = grid.template(workload, workload.template())
                assert template.identity and all(template.with_method(method) for method in grid.methods)
                assert len(set(grid.learning_rates(workload))) == len(grid.rates or workload.rates)


@pytest.mark.parametrize("domain", WORKLOADS)
def test_the_papers_settings_build_and_have_a_price(domain: str) -> None:
    """On the meta device: 6 operations per parameter and token at least, of 100 B tokens of 1.3 B parameters 8e20."""
    operations = count_operations(WORKLOADS[domain][Scale.FULL].template())
    assert operations > 1e18
    if domain == "language":
        assert 7e20 < operations < 1.2e21


def test_seednorm_is_trained_in_full_on_the_papers_vision_transformer() -> None:
    for name in ("seednorm-vision", "seednorm-heads"):
        grid = ITEMS[name].grids[0]
        model = WORKLOADS[grid.domain][Scale.FULL].template().task.model
        assert (model.dim, model.depth, model.heads) == (768, 12, 12)


def test_runs_of_items_are_the_committed_ones_and_each_others() -> None:
    """The committed books were trained by a sweep; nothing about their identities is written down here."""
    workload = WORKLOADS["language"][Scale.MINI]
    committed = {path.name for path in BOOKS.iterdir()}
    runs = {}
    for name in ("table2", "table3"):
        (grid,) = ITEMS[name].grids
        template = grid.template(workload, workload.template())
        runs[name] = {config.identity[:12]: run for run, config in grid.given_runs(workload, template)}
    assert len(runs["table2"].keys() & committed) == 12 + 4 * 2
    shared = runs["table2"].keys() & runs["table3"].keys()
    assert {runs["table2"][name].method for name in shared} == {"pre", "pre + qkv", "siamese"}
    assert len(shared) == 9


def test_the_headline_pair_of_table_1_has_the_five_committed_seeds_at_the_high_rate() -> None:
    workload, grid = WORKLOADS["language"][Scale.MINI], ITEMS["table1"].grids[0]
    runs = grid.given_runs(workload, grid.template(workload, workload.template()))
    assert len(runs) == len({config.identity for _, config in runs}) == 8 * 3 * 3 + 2 * 2
    committed = {path.name for path in BOOKS.iterdir()}
    for method in ("pre", "siamese"):
        high = [(run.seed, config) for run, config in runs if (run.method, run.learning_rate) == (method, 8e-3)]
        assert sorted(seed for seed, _ in high) == [0, 1, 2, 3, 4]
        assert {config.identity[:12] for _, config in high} <= committed
    full = WORKLOADS["language"][Scale.FULL]
    assert {run.seed for run, _ in grid.given_runs(full, grid.template(full, full.template()))} == {0}


def test_how_runs_are_carried_out_is_that_of_the_scale_unless_it_is_given() -> None:
    template = WORKLOADS["language"][Scale.SMALL].template()
    own = reproduce.execution(reproduce.ReproduceArguments(), template)
    assert (own.device, own.compile) == (template.execution.device, template.execution.compile)
    given = reproduce.execution(reproduce.ReproduceArguments(device="cpu", compile="off"), template)
    assert (given.device, given.compile) == ("cpu", "off")
    assert own != given and own.threads == given.threads == 1


def test_the_league_has_every_topology() -> None:
    assert set(available_topologies()) <= set(ITEMS["league"].grids[0].methods)


def test_every_experiment_on_theory_is_an_item() -> None:
    names = {"gradient-at-init", "gradient-spikes", "dynamic-variance", "gradient-scaling", "dyt-equivalence"}
    assert {name for name, item in ITEMS.items() if item.experiment} == {*names, "unbounded-activation", "cost"}


def test_the_cost_of_siamesenorm_is_its_traffic_and_a_stream_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CLAIMED", "390m-l17")
    found = overhead.overhead("390m-l17", "siamese")
    ours, base = (build_topology(name).cost for name in ("siamese", "pre"))
    assert ours and base and found.traffic and found.slower
    moved = ours.forward + ours.backward - base.forward - base.backward
    assert found.traffic == pytest.approx(2 * 17 * 1024 * overhead.BYTES * moved)
    assert 0 < found.parameters < 1e-3 and found.operations == 0 and 0.01 < found.slower < 0.05
    rows = {row[0].text: [entry.text for entry in row[1:]] for row in overhead.claim_table().groups[0].rows}
    assert [row[0] for row in rows.values()] == ["+0.50 %", "+2.00 %", NOTHING]
    whole = {m: overhead.memory_of(overhead._config(m), RECOMPUTED) for m in ("pre", "siamese")}
    streams = (whole["siamese"].kept - whole["pre"].kept) / (2048 * 1024 * 4)
    assert 17 <= streams < 21, "one more in fp32 for each block, and those of the closing"
    more = whole["siamese"].total / whole["pre"].total - 1
    assert rows["memory with recomputed blocks, counted"][1] == formatting.percent(more)


RECOMPUTED = dataclasses.replace(overhead.LAYOUT, checkpoint_activations=True)


# --- published numbers and claims


def test_published_numbers_belong_to_runs_and_are_those_of_the_papers() -> None:
    for row in published_rows():
        if row.item == "cost":
            continue
        grid = next(grid for grid in ITEMS[row.item].grids if grid.name == row.grid)
        assert row.method in grid.methods and (row.rate is None) == grid.chosen
        assert row.values or row.verdict == "diverged"
    table1 = {(row.method, row.grid, row.rate): row for row in published_rows() if row.item == "table1"}
    best = table1["siamese", "three rates", 2]
    assert (best.values["ppl"], best.values["arithmetic"], best.values["average"]) == (10.48, 39.6, 55.63)
    assert table1["hybridnorm", "three rates", 1].verdict == "diverged"
    assert table1["dhc-2", "3.5 times the steps", 2].verdict == "spiked"
    for row in table1.values():
        if row.values:
            tasks = [value for name, value in row.values.items() if name not in ("ppl", "average")]
            assert sum(tasks) / 7 == pytest.approx(row.values["average"], abs=0.011)
    large = find_published("seednorm-language", "mixture of experts", "pre + seednorm", None)
    assert large is not None and large.value("ppl (OLMoE-7B)") == 13.88
    vision = find_published("seednorm-vision", "masked autoencoding", "pre + dyt", None)
    assert vision is not None and vision.value("accuracy (ViT-L)") == 85.4
    coupling = claims_of("table2")[0]
    assert judge_claims("table2", [coupling], cells({}))[0].published == pytest.approx(-0.18)
    ablation = find_published("seednorm-ablation", "", "pre + seednorm:alpha_initial=10", 1)
    assert ablation is not None and ablation.value("loss") == 3.154


def test_every_claim_is_about_cells_of_its_item() -> None:
    for item in ITEMS.values():
        for claim in claims_of(item.name):
            assert claim.measure in MEASURES and claim.sign in (-1, 1)
            for _, cell in claim.terms:
                grid = next(grid for grid in item.grids if grid.name == cell.grid)
                assert cell.method in grid.methods and (cell.rate is None) == grid.chosen
                assert grid.chosen or not grid.rates or cell.rate in grid.rates
                error = grid.domain in ("diffusion", "autoencoder")
                assert claim.measure not in ("loss", "squared error") or error == (claim.measure == "squared error")


def cells(gaps: Mapping[str, list[float]]) -> Any:
    """Return runs whose loss is 3 plus a gap that differs by seed; infinite for one that diverged."""

    def find(cell: Cell) -> dict[int, Any]:
        found = gaps.get(cell.method, [])
        return {seed: SimpleNamespace(score=3 + gap, floor=6.0) for seed, gap in enumerate(found)}

    return find


@pytest.mark.parametrize(
    ("gaps", "outcome"),
    [
        ([-0.10, -0.11, -0.09], ClaimOutcome.CONFIRMED),
        ([-0.10, 0.11, -0.03], ClaimOutcome.NOT_SEEN),
        ([-0.10], ClaimOutcome.TOO_FEW_SEEDS),
        ([0.10, 0.11, 0.09], ClaimOutcome.CONTRADICTED),
        ([math.inf] * 3, ClaimOutcome.CONTRADICTED),
        ([], ClaimOutcome.NOT_RUN),
    ],
)
def test_a_claim_has_the_outcome_of_its_interval(gaps: list[float], outcome: ClaimOutcome) -> None:
    claim = against("lower", "siamese", "pre", grid="three rates", rate=1)
    (judged,) = judge_claims("table1", [claim], cells({"siamese": gaps, "pre": [0.001, 0.0, -0.001]}))
    assert judged.outcome is outcome
    assert judged.published == pytest.approx(math.log(10.43 / 10.84))


def test_claims_of_an_item_are_corrected_together() -> None:
    claim = against("lower", "siamese", "pre", grid="three rates", rate=1)
    runs = cells({"siamese": [-0.10, -0.12, -0.07], "pre": [0.0] * 3})
    alone, *_ = judge_claims("table1", [claim], runs)
    several = judge_claims("table1", [claim] * 13, runs)
    assert alone.outcome is ClaimOutcome.CONFIRMED
    assert {each.outcome for each in several} == {ClaimOutcome.NOT_SEEN}


def run(word: str, norms: list[float], accuracy: float = 0.4) -> Any:
    """Return a run of ten classes with a verdict, and gradient norms after a warm-up of one step."""
    curve = SimpleNamespace(steps=np.arange(1.0, len(norms) + 1), values=np.array(norms))
    return SimpleNamespace(
        word=word,
        diverged=word == "diverged",
        floor=math.log(10),
        held_out={"accuracy": accuracy},
        gradient_norms=curve,
        config={"optimizer": {"warmup_steps": 1}},
    )


@pytest.mark.parametrize(
    ("measure", "of", "value"),
    [
        ("failed", run("diverged", []), 1),
        ("failed", run("not learned", []), 1),
        ("failed", run("spiked", []), 0),
        ("trained", run("stable", []), 1),
        ("trained", run("diverged", []), -1),
        ("exploded", run("stable", [500.0, 0.4, 99.0]), 0),
        ("exploded", run("stable", [0.4, 0.4, 101.0]), 1),
        ("exploded", run("diverged", [0.4, math.inf, 0.4]), 1),
        ("exploded", run("diverged", [math.nan]), 1),
        ("accuracy", run("stable", [], 0.4), 40),
        ("accuracy", run("diverged", [], 0.4), 10),
    ],
)
def test_what_failed_exploded_or_diverged_counts_as_it_is_declared(measure: str, of: Any, value: float) -> None:
    assert MEASURES[measure].of(of) == pytest.approx(value)


@pytest.mark.parametrize(
    ("word", "outcome"), [("diverged", ClaimOutcome.ON_EVERY_SEED), ("stable", ClaimOutcome.ON_NO_SEED)]
)
def test_a_failure_is_a_verdict_and_not_any_difference(word: str, outcome: ClaimOutcome) -> None:
    claim = next(claim for claim in claims_of("table1") if claim.measure == "failed")
    runs = {"hybridnorm": run(word, []), "siamese": run("stable", [])}
    (judged,) = judge_claims("table1", [claim], lambda cell: dict.fromkeys(range(2), runs[cell.method]))
    assert judged.outcome is outcome and judged.published == 1
    assert judged.interval is judged.corrected is None, "equal answers have no interval"
    own = {"siamese": None, "hybridnorm": {0: runs["hybridnorm"]}}
    (lost,) = judge_claims("table1", [claim], lambda cell: own[cell.method])
    assert lost.outcome is ClaimOutcome.NO_RATE


def test_the_curve_of_budgets_is_of_one_learning_rate() -> None:
    def grid(*runs: tuple[int, float, float]) -> Any:
        made = [
            SimpleNamespace(steps=n, learning_rate=rate, score=loss, has_result=True, seed=seed)
            for seed, (n, rate, loss) in enumerate(runs)
        ]
        return SimpleNamespace(runs_of=lambda method: made)

    league = grid((400, 1e-2, 3.0), (400, 1e-2, 3.2), (400, 3e-2, 2.9), (400, 1e-2, 9.0))
    methods = {"league": ("pre", "siamese"), "half": ("pre",), "twice": ("pre",)}
    results: Any = SimpleNamespace(
        grids={
            "league": league,
            "half": grid((200, 1e-2, 3.5), (200, 1e-2, 3.7)),
            "twice": grid((800, 1e-2, 2.8), (800, 1e-2, 2.6)),
        },
        grid=lambda name: SimpleNamespace(methods=methods[name]),
    )
    findings: Any = SimpleNamespace(shared_seeds={0, 1, 3})
    curve = budget_curve(results, findings)
    assert curve == pytest.approx({200: 3.6, 400: 3.1, 800: 2.7}), "on the seeds of all budgets"
    findings = SimpleNamespace(shared_seeds={1})
    assert budget_curve(results, findings) == pytest.approx({200: 3.7, 400: 3.2, 800: 2.6}), "on those that rank"


# --- training, with stand-ins for processes


TINY = (
    Item(
        name="table1",
        paper="a paper",
        title="two methods",
        published="It says so.",
        grids=(RunGrid(name="three rates", methods=("pre", "siamese")),),
    ),
    Item(
        name="league",
        paper="another",
        title="at their own rates",
        published="It says nothing.",
        grids=(RunGrid(name="league", methods=("pre", "siamese"), chosen=True, headline=("pre",)),),
        ranked=True,
    ),
)


def loss_of(config: Any) -> float:
    """Return a loss whose best rate is 1e-3 for Pre-Norm, and for SiameseNorm below the grid and its extensions."""
    rate = config.optimizer.learning_rate
    distance = abs(math.log(rate / 1e-3)) if config.label == "pre" else math.log(rate / 1e-9)
    return 2.0 + 0.01 * distance + 0.001 * config.seed


@pytest.fixture
def small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Workers]]:
    workers = Workers(outcome_of=loss_of, polls_of=lambda config: 0)
    monkeypatch.setattr(experiment_runner, "_start", workers.start)
    monkeypatch.setattr(experiment_runner, "POLL_SECONDS", 0)
    monkeypatch.setattr(report_writer, "render", lambda *_: b"<svg></svg>")  # figures are drawn in other tests
    tiny = Workload(
        build=lambda data: tiny_run(data or tmp_path / "data"), rates=(3e-4, 1e-3, 3e-3), seeds=(0, 1), data="data"
    )
    full = dataclasses.replace(WORKLOADS["language"][Scale.FULL])
    monkeypatch.setitem(scales.WORKLOADS, "language", {Scale.MINI: tiny, Scale.FULL: full})
    for item in TINY:
        monkeypatch.setitem(ITEMS, item.name, item)
    write_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    yield tmp_path, workers


def test_items_share_their_runs_and_rates_are_extended_at_edges(small_world: tuple[Path, Workers]) -> None:
    path, workers = small_world
    assert main(["reproduce", "table1", "--data", "data", "--out", "out", "--jobs", "1"]) == 0
    assert len(workers.started) == 2 * 3 * 2
    assert main(["reproduce", "league", "--data", "data", "--out", "out", "--jobs", "1"]) == 0
    new = workers.started[12:]
    assert len(set(workers.started)) == len(workers.started), "no run is trained twice"
    selected = sorted(rate for method, rate, seed in new if method == "siamese" and seed == 0)
    assert selected == pytest.approx([2.7e-5, 9e-5], rel=0.01), "two steps of the grid below its low edge"
    assert not [rate for method, rate, seed in new if method == "pre" and seed == 0], "its best is inside"
    assert {(rate, seed) for method, rate, seed in new if method == "pre"} == {(1e-3, seed) for seed in (2, 3, 4, 5)}
    assert {seed for method, _, seed in new if method == "siamese"} == {0, 1, 2, 3}
    before = len(workers.started)
    assert main(["reproduce", "league", "--data", "data", "--out", "out", "--jobs", "1"]) == 0
    assert len(workers.started) == before, "at most two extensions, however often the command is repeated"
    for run in (path / "out/runs").iterdir():
        if RunDirectory(run).read_config().optimizer.learning_rate < 2e-4:
            shutil.rmtree(run)
    assert main(["reproduce", "league", "--data", "data", "--out", "out", "--jobs", "1"]) == 0
    again_trained = workers.started[before:]
    assert {(rate, seed) for _, rate, seed in again_trained} == {(rate, seed) for _, rate, seed in new if rate < 2e-4}
    before = len(workers.started)
    assert main(["reproduce", "table1", "--data", "data", "--out", "other", "--runs", "out/runs", "--jobs", "1"]) == 0
    assert len(workers.started) == before
    plan = read_plan(path / "other/mini/table1/three-rates")
    assert plan is not None and plan.jobs == 2, "how many runs were trained at a time is not known"
    write_plan(path / "other/mini/table1/three-rates", dataclasses.replace(plan, jobs=1))
    assert main(["reproduce", "table1", "--data", "data", "--out", "other", "--runs", "out/runs", "--jobs", "1"]) == 0
    again = read_plan(path / "other/mini/table1/three-rates")
    assert again is not None and again.jobs == 2, "runs of another store, in an older plan"

    judged = read_item(path / "out/mini/table1").judged()
    gap = 0.01 * (math.log(3e-4 / 1e-9) - math.log(1e-3 / 3e-4))
    assert judged[0].effect.by_seed == pytest.approx(dict.fromkeys(range(2), gap))
    assert judged[-1].outcome is ClaimOutcome.NOT_RUN
    page = (path / "out/mini/table1/report/report.md").read_text()
    assert "[arxiv.org/abs/2602.08064v1](https://arxiv.org/abs/2602.08064v1)" in page, "where the numbers are from"
    assert "- **siamese**: " in page and page.index("What the outcomes mean") < page.index("## Claims")
    assert "11.21" in page and judged[0].claim.text in page and next((path / "out/runs").iterdir()).name in page
    league = (path / "out/mini/league/report/report.md").read_text()
    assert "speedup" in league.lower() and "- **League: lowest held-out loss**: pre at 1e-3" in league
    assert "- **League: noise**: One more seed of pre falls between" in league
    assert main(["report", "out/mini/table1"]) == 0


def test_a_method_of_which_a_seed_diverged_has_no_place_in_the_league(small_world: tuple[Path, Workers]) -> None:
    """It has the lowest loss on the seeds that are left."""
    path, workers = small_world
    workers.outcome_of = lambda c: math.nan if c.label != "pre" and c.seed == 2 else loss_of(c) - (c.label != "pre")
    assert main(["reproduce", "league", "--data", "data", "--out", "out", "--jobs", "1"]) == 0
    results = read_item(path / "out/mini/league")
    table = league_sections(results, find(results.grids["league"]))["The league"]
    assert isinstance(table, Table)
    titles = [column.title for column in table.columns]
    rows = [dict(zip(titles, row, strict=True)) for group in table.groups for row in group.rows]
    assert [row["Method"].text for row in rows] == ["pre", "siamese"]
    assert rows[0]["Against noise"].text == "inside" and rows[1]["Against noise"].text == NOTHING
    (leader, *_) = leaders({name: find(each) for name, each in results.grids.items()})
    assert leader.text.startswith("pre at")


def test_the_speedup_of_the_league_is_read_from_the_budgets_of_pre_norm(
    small_world: tuple[Path, Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SiameseNorm has the loss of Pre-Norm with twice the steps, and a step 1.25 times as long."""
    path, workers = small_world
    own = RunGrid(name="league", methods=("pre", "siamese"), chosen=True)
    given = RunGrid(name="given", methods=("pre", "siamese"), rates=(1,))
    more = [RunGrid(name=f"{n} x", methods=("pre",), rates=(1,), length=n, seeds="reported") for n in (0.5, 2.0, 4.0)]
    monkeypatch.setitem(ITEMS, "league", dataclasses.replace(ITEMS["league"], grids=(own, given, *more)))

    def outcome(config: Any) -> float:
        steps = config.steps * (1 if config.label == "pre" else 2)
        return float(3.0 * steps**-0.1 + 0.01 * config.seed + abs(math.log(config.optimizer.learning_rate / 1e-3)))

    workers.outcome_of = outcome
    cost = {"candidate": "plain", "topology": "siamese", "step_to_pre": {"median": 1.25}}
    rows = [{**cost, "topology": "pre", "step_to_pre": {"median": 1.0}}, cost, {**cost, "candidate": "compiled"}]
    (path / "costs.json").write_text(json.dumps({"rows": rows}))
    command = ["reproduce", "league", "--data", "data", "--out", "out", "--jobs", "1", "--costs", "costs.json"]
    assert main(command) == 0
    results = read_item(path / "out/mini/league")
    table = league_sections(results, find(results.grids["league"]))["The league"]
    assert isinstance(table, Table)
    titles = [column.title for column in table.columns]
    found = {row[0].text: dict(zip(titles, row, strict=True)) for group in table.groups for row in group.rows}
    shown = {m: tuple(row[name].text for name in ("Step", *titles[-2:])) for m, row in found.items()}
    assert shown == {"pre": ("1.00×", "1.00×", "1.00×"), "siamese": ("1.25×", "2.00×", "1.60×")}
    page = (path / "out/mini/league/report/report.md").read_text()
    assert "**League: lowest" in page and "**Given: lowest" not in page, "of chosen rates alone"


def test_a_page_has_the_data_and_the_commands_of_all_grids_and_reductions_beside_published_ones(
    small_world: tuple[Path, Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = small_world
    grids = (
        RunGrid(name="three rates", methods=("pre", "siamese"), rates=(1,)),
        RunGrid(name="other", methods=("pre",), rates=(0,)),
    )
    monkeypatch.setitem(ITEMS, "table2", Item(name="table2", paper="", title="two", published="", grids=grids))
    command = ["reproduce", "table2", "--data", "data", "--out", "out", "--jobs", "1"]
    monkeypatch.setattr("sys.argv", ["siamesenorm", *command])
    assert main(command) == 0
    plan = path / "out/mini/table2/other/plan.json"
    plan.write_text(plan.read_text().replace("reproduce table2", "reproduce table2 --minutes 9"))
    page = report_in_markdown(item_report(read_item(path / "out/mini/table2")))
    assert f"{command[0]} table2 --data" in page and "reproduce table2 --minutes 9 --data" in page
    assert page.count("Data: ") == 1 and "Other: Model: " in page
    row = next(line for line in page.splitlines() if line.startswith("| siamese | 0.41 |"))
    ours = float(row.split("|")[3].split("±")[0].replace("−", "-"))
    losses = {
        run.method: run.held_out["perplexity"]
        for run in read_item(path / "out/mini/table2").grids["three rates"].runs
        if run.seed == 0
    }
    assert ours == pytest.approx(losses["pre"] - losses["siamese"], rel=0.05)


def test_compiled_runs_are_compared_with_others_on_request_alone(small_world: tuple[Path, Workers]) -> None:
    path, workers = small_world
    command = ["--data", "data", "--out", "out", "--jobs", "1"]
    assert main(["reproduce", "table1", *command, "--compile", "off"]) == 0
    assert main(["reproduce", "league", *command, "--compile", "on"]) == 2
    assert len(workers.started) == 12 and not (path / "out/mini/league/item.json").exists()
    assert main(["reproduce", "league", *command, "--compile", "on", "--mixed"]) == 0
    assert {config.execution.compile for config in workers.configs[12:]} == {"on"}
    pages = [(path / f"out/mini/{name}/report/report.md").read_text() for name in ("table1", "league")]
    assert ["runs were compiled" in page for page in pages] == [False, True]
    assert main(["report", "out/mini/league"]) == 0
    record = path / "out/mini/league/item.json"
    record.write_text(record.read_text().replace('"mixed": true', '"mixed": false'))
    assert main(["report", "out/mini/league"]) == 2, "a grid does not disappear from the page"


def test_what_stopped_goes_on(small_world: tuple[Path, Workers]) -> None:
    _, workers = small_world
    workers.polls_of = lambda config: 10**9 if len(workers.started) > 2 else 0
    assert main(["reproduce", "table1", "--data", "data", "--out", "out", "--jobs", "1", "--minutes", "0.0001"]) == 0
    ended = [line for line in workers.ended if line.endswith(": 0")]
    workers.polls_of = lambda config: 0
    assert main(["reproduce", "table1", "--data", "data", "--out", "out", "--jobs", "1"]) == 0
    assert len([line for line in workers.ended if line.endswith(": 0")]) == 12
    assert len(ended) < 12


def test_an_item_has_a_page_after_a_kill(small_world: tuple[Path, Workers], monkeypatch: pytest.MonkeyPatch) -> None:
    path, workers = small_world
    start, command = workers.start, ["reproduce", "table1", "--data", "data", "--out", "out", "--jobs", "1"]

    def killed(*arguments: Any) -> Any:
        if len(workers.started) == 3:
            assert main(["report", "out/mini/table1"]) == 0, "a page while it runs"
            raise GeneratorExit
        return start(*arguments)

    monkeypatch.setattr(experiment_runner, "_start", killed)
    with pytest.raises(GeneratorExit):  # stands for a signal: nothing handles it
        main(command)
    assert main(["report", "out/mini/table1", "--out", "page"]) == 0
    assert (path / "page/report.html").is_file()


def test_without_an_item_the_items_are_listed(
    small_world: tuple[Path, Workers], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, workers = small_world
    monkeypatch.setattr(reproduce, "ITEMS", {item.name: item for item in TINY})
    assert main(["reproduce", "--data", "data", "--out", "out"]) == 0
    assert "Items at the scale mini" in capsys.readouterr().out
    assert not workers.started and not (path / "out").exists()


def test_evaluations_stop_at_the_deadline_and_use_the_device_of_the_runs(
    small_world: tuple[Path, Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = small_world
    assert main(["reproduce", "table1", "--data", "data", "--out", "out", "--jobs", "1"]) == 0
    devices = []

    def evaluate(waiting: Any, data_of: Any, device: str, on_progress: Any) -> None:
        devices.append(device)
        on_progress(0.5, "half")

    monkeypatch.setattr(reproduce, "evaluate_item", evaluate)
    for device in ("", "cuda"):
        arguments = reproduce.ReproduceArguments(item="table1", out=path / "out", device=device)
        reproduce.report_item(ITEMS["table1"], arguments, {}, math.inf)
        with pytest.raises(OutOfTime):
            reproduce.report_item(ITEMS["table1"], arguments, {}, time.monotonic() - 1)
    assert devices == ["cpu", "cpu", "cuda", "cuda"]


def test_grids_that_a_scale_does_not_have_are_left_out(
    small_world: tuple[Path, Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, workers = small_world
    other = RunGrid(name="other", domain="convnext", methods=("pre",))
    command = ["reproduce", "table1", "--data", "data", "--out", "out", "--jobs", "1"]
    monkeypatch.setitem(ITEMS, "table1", dataclasses.replace(TINY[0], grids=(other,)))
    assert main(command) == 2
    assert not workers.started and not (path / "out").exists()
    monkeypatch.setitem(ITEMS, "table1", dataclasses.replace(TINY[0], grids=(other, *TINY[0].grids)))
    assert main(command) == 0
    assert len(workers.started) == 12 and set(read_item(path / "out/mini/table1").grids) == {"three rates"}


def test_the_list_counts_what_there_is(small_world: tuple[Path, Workers], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = small_world
    assert main(["reproduce", "table1", "--data", "data", "--out", "out", "--jobs", "1"]) == 0
    capsys.readouterr()
    assert main(["reproduce", "league", "--list", "--data", "data", "--out", "out"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "league" in line)
    runs, ended, shared = map(int, re.findall(r"(\d+)\s*│", row)[:3])
    assert (runs, ended, shared) == (6 + 5 + 3, 6 + 2, 0)
    assert not (path / "out/mini/league").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "reproduce tabel1",
        "reproduce table1",
        "reproduce table1 --scale tiny",
        "reproduce seednorm-convnext --images images",
        "reproduce table1 --data nowhere",
        "reproduce table1 --runs nowhere",
        "reproduce table1 --costs nowhere",
        "reproduce continued --data nowhere",
        "report out/mini/table1",
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


# --- pages of the documentation

ELSEWHERE = ("comparison", "digits", "moe", "diffusion", "vision", "seednorm_heads")
"""Pages whose tables are recomputed in `test_committed_results.py` and in tests of their own."""
PAGES = sorted(
    page
    for page in (Path(__file__).parents[1] / "docs").glob("*.md")
    if "<!-- report " in page.read_text() and page.stem not in ELSEWHERE
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_its_runs(page: Path) -> None:
    text = page.read_text()
    assert fill_tables(text, page.parent) == text
