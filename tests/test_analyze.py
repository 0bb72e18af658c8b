"""`siamesenorm analyze`: records in the runs, one page that compares them, rewired models, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import siamesenorm
from refusals import refusal
from siamesenorm.analysis import available_analyses, build_analysis
from siamesenorm.cli import main
from siamesenorm.comparison.analysis_figures import FIGURES, analysis_figures
from siamesenorm.comparison.analysis_report import TITLES, analysis_table, gradient_norm_figures, subjects_table
from siamesenorm.comparison.figure_style import DARK, LIGHT, applied, hues_of
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.results import read_run
from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation import TrainedRun
from siamesenorm.topologies import Closing, Place, ResidualSpec, Streams
from siamesenorm.topologies.pre_norm_family import PreNorm
from siamesenorm.topologies.registry import TOPOLOGIES
from siamesenorm.training.loop import train
from siamesenorm.training.run_record import read_metrics
from siamesenorm.world import World
from training_runs import tiny_run, write_data

TWO_STREAMS = ("stream-share", "fusion")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("analyze")
    data = write_data(directory / "data")
    for name in ("siamese", "pre"):
        train(tiny_run(data, steps=5, model={"topology": name}), directory / name)
    return [directory / "siamese", directory / "pre"]


@pytest.fixture(scope="module")
def found(runs: list[Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the records of everything that fits, by the label of the run and the analysis."""
    several = {}
    for run in runs:
        fits = [name for name in available_analyses() if run.name == "siamese" or name not in TWO_STREAMS]
        analyses = [build_analysis(name, **({"tokens": 2} if name == "jacobians" else {"samples": 2})) for name in fits]
        several[run.name] = {record["evaluation"]: record for record in TrainedRun(run).evaluate(analyses)}
    return several


def records(run: Path) -> dict[str, dict[str, Any]]:
    return {record["evaluation"]: record for record in read_metrics(run / "evaluations.jsonl")}


def test_every_analysis_is_a_record_of_the_run(runs: list[Path], found: dict[str, dict[str, Any]]) -> None:
    for run in runs:
        kept = records(run)
        assert all(kept[name]["results"] == record["results"] for name, record in found[run.name].items())
        assert kept["pruning"]["options"] == {"samples": 2} and kept["pruning"]["step"] == 5
        assert kept["pruning"]["results"]["loss"] == kept["quantisation"]["results"]["loss"]
        assert max(kept["jacobians"]["results"]["identity"].values()) < 1e-13


def test_the_page_compares_the_runs(runs: list[Path], tmp_path: Path) -> None:
    what = ("hidden-magnitude", "stream-share")
    assert main(["analyze", *map(str, runs), "--out", str(tmp_path), "--samples", "3", "--what", *what]) == 0
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', page), "the page needs no other file"
    assert page.count("<figure") == 3, "two, and the gradient norms"
    for run in runs:
        assert TrainedRun(run).identity[:12] in page and read_run(run).environments[0]["commit"] in page
    assert "pre, stream-share" in page and "has one stream" in page
    numbers = json.loads((tmp_path / "analyses.json").read_text())
    assert [record["evaluation"] for record in numbers["siamese"]] == [*what]
    assert [record["evaluation"] for record in numbers["pre"]] == ["hidden-magnitude"]
    kept = [each for each in read_metrics(runs[1] / "evaluations.jsonl") if each["options"] == {"samples": 3}]
    assert [each["results"] for each in kept] == [numbers["pre"][0]["results"]]


@pytest.mark.parametrize("name", available_analyses())
def test_figures_name_their_axes_in_both_themes(name: str, found: dict[str, dict[str, Any]]) -> None:
    figures = analysis_figures({label: several[name] for label, several in found.items() if name in several})
    assert figures and name in FIGURES and name in TITLES
    for figure, theme in product(figures, (LIGHT, DARK)):
        assert figure.caption.endswith(".") and figure.alternative
        with applied(theme):
            drawing = figure.draw(theme)
        for axes in drawing.axes:
            assert axes.lines and axes.get_xlabel() and (axes.get_ylabel() or axes.get_yticklabels())


def test_the_table_has_a_column_for_each_run_and_a_group_for_each_analysis(found: dict[str, dict[str, Any]]) -> None:
    by_analysis = {
        name: {label: several[name] for label, several in found.items() if name in several}
        for name in available_analyses()
    }
    table = analysis_table(by_analysis, list(found))
    assert [column.title for column in table.columns] == ["quantity", "siamese", "pre"]
    assert [group.title for group in table.groups] == [TITLES[name] for name in available_analyses()]
    assert all(len(row) == 3 and row[1:] for group in table.groups for row in group.rows)


def test_the_page_says_what_was_read(runs: list[Path], found: dict[str, dict[str, Any]]) -> None:
    results = {"siamese": read_run(runs[0])}
    table = subjects_table({label: list(several.values()) for label, several in found.items()}, results)
    (group,) = table.groups
    first, second = ([entry.text for entry in row] for row in group.rows)
    assert first[:5] == ["siamese", TrainedRun(runs[0]).identity[:12], "5", "raw", "2"]
    assert second[:2] == ["pre", NOTHING], "a model that is no run has no identity"
    (record,) = TrainedRun(runs[1]).evaluate([build_analysis("hidden-magnitude", samples=10**6)])
    with torch.no_grad():
        windows = (
            TrainedRun(runs[1]).task.on_part(10**6).evaluate(TrainedRun(runs[1]).build_model(), 1, World())["items"]
        )
    assert record["results"]["samples"] == windows / TrainedRun(runs[1]).config.task.model.context  # type: ignore[attr-defined]
    assert found["pre"]["jacobians"]["results"]["samples"] == 1


def test_numbers_have_the_unit_of_the_loss_and_streams_their_names(found: dict[str, dict[str, Any]]) -> None:
    record = copy.deepcopy(found["siamese"]["outliers"])
    record["results"]["streams"] = {
        f"{name}{end}": each
        for name, end in (("main_path", ""), ("source_", "0"), ("source_", "1"))
        for each in [record["results"]["streams"]["identity"]]
    }
    table = analysis_table({"outliers": {"a": record}, "pruning": {"a": found["siamese"]["pruning"]}}, ["a"])
    outliers, pruning = ([row[0].text for row in group.rows] for group in table.groups)
    assert {"largest / median, main_path", "massive entries, source"} <= set(outliers)
    assert pruning[0] == "loss (nats/token)" and all("(nats/token)" in each for each in pruning)


def test_a_run_has_one_hue_on_a_page(runs: list[Path], found: dict[str, dict[str, Any]]) -> None:
    labels = ["post", "deepnorm", "residual"]
    records = {label: found["siamese"]["stream-share"] for label in labels[1:]}
    (share,), (norms,) = (
        analysis_figures(records, labels), gradient_norm_figures({"deepnorm": read_run(runs[0])}, labels)
    )  # fmt: skip
    expected = LIGHT.hues[hues_of(labels)["deepnorm"]]
    with applied(LIGHT):
        assert share.draw(LIGHT).axes[0].lines[0].get_color() == expected
        axes = norms.draw(LIGHT).axes[0]
    assert {line.get_color() for line in axes.lines} == {expected}
    assert all("$" not in label.get_text() for label in axes.get_yticklabels()), "short numbers beside the axis"


def test_figures_are_of_one_analysis(found: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"fusion, pruning"):
        analysis_figures({"a": found["siamese"]["pruning"], "b": found["siamese"]["fusion"]})
    with pytest.raises(UserError, match="no figure"):
        analysis_figures({"a": {"evaluation": "held-out", "results": {}}})


def test_what_is_named_and_does_not_fit_is_refused(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = (runs[1] / "metrics.jsonl").read_bytes()
    assert "one stream" in refusal(capsys, "analyze", runs[1], "--what", "stream-share")
    assert "did you mean pruning" in refusal(capsys, "analyze", runs[1], "--what", "prunning")
    assert "--text" in refusal(capsys, "analyze", runs[1].parent)
    assert "at least 1" in refusal(capsys, "analyze", runs[1], "--samples", 0)
    assert (runs[1] / "metrics.jsonl").read_bytes() == before


def test_two_runs_of_one_method_have_their_directories_as_names(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = shutil.copytree(runs[1], tmp_path / "again")
    capsys.readouterr()
    assert main(["analyze", str(runs[1]), str(again), "--what", "pruning", "--samples", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"pre (pre)", "pre (again)"}


@pytest.fixture(scope="module")
def rewired(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """Return a rewired Llama, its directory, and a file of token ids."""
    from huggingface_hosts import VOCABULARY, build_host

    directory = tmp_path_factory.mktemp("rewired")
    model = build_host("llama")
    siamesenorm.rewire(model, "siamese-post-pre")
    model.save_pretrained(directory / "model")
    ids = torch.randint(3, VOCABULARY, (61,), generator=torch.Generator().manual_seed(2))
    np.save(directory / "ids.npy", ids.numpy())
    return model, directory / "model", directory / "ids.npy"


def test_a_rewired_model_is_analysed_on_tokens(
    rewired: tuple[Any, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, directory, tokens = rewired
    assert main(["analyze", str(directory), "--text", str(tokens), "--context", "12", "--tokens", "2", "--json"]) == 0
    found = {each["evaluation"]: each["results"] for each in json.loads(capsys.readouterr().out)["model"]}
    assert found.keys() == set(available_analyses())
    windows = torch.from_numpy(np.load(tokens))[:60].view(5, 12)
    following = torch.from_numpy(np.load(tokens))[1:61].view(5, 12)
    with torch.no_grad():
        loss = float(F.cross_entropy(model(windows).logits.flatten(0, 1), following.flatten()))
    assert found["pruning"]["loss"] == pytest.approx(loss, rel=1e-5) == found["logit-lens"]["loss"][-1]
    assert found["pruning"]["last_removed"][2] == pytest.approx(found["logit-lens"]["loss"][0])
    assert max(found["stream-share"]["activations"]["bounded"]) == 0.0, "the model starts as the Pre-Norm one it was"
    assert found["logit-lens"]["streams"]["identity"]["agreement"][-1] == 1.0
    assert len(found["outliers"]["attention"]["first"]) == 2 and found["quantisation"]["layers"] == 14
    assert max(found["jacobians"]["identity"].values()) < 1e-13


def test_runs_are_read_on_the_text_too(
    runs: list[Path], rewired: tuple[Any, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All models of a page read the same tokens, and the page names them."""
    np.save(tmp_path / "short.npy", np.arange(50) % 7)
    before = (runs[0] / "evaluations.jsonl").read_bytes()
    words = ["--text", tmp_path / "short.npy", "--context", 8, "--what", "pruning", "--samples", 3]
    command = ["analyze", *map(str, [*runs, rewired[1], *words])]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [[each["results"]["samples"], each["step"]] for (each,) in found.values()] == [[3, 5], [3, 5], [3, 0]]
    tokens = torch.arange(25) % 7
    model = TrainedRun(runs[0]).build_model()
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens[:24].view(3, 8)).logits.flatten(0, 1), tokens[1:])
    assert found["siamese"][0]["results"]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert main([*command, "--out", str(tmp_path / "page")]) == 0
    assert "on samples of short.npy" in (tmp_path / "page/report.md").read_text()
    assert (runs[0] / "evaluations.jsonl").read_bytes() == before, "the records of a run are of its own data"


class OwnClosing(Closing):
    """A closing of no class of this package."""

    def __init__(self, spec: ResidualSpec) -> None:
        super().__init__(spec)
        self.norm = spec.build_final_norm()

    def forward(self, streams: Streams) -> Tensor:
        """Return the norm of the stream."""
        return self.to_compute(self.norm(streams[0]))


@dataclass(frozen=True, kw_only=True)
class OwnTopology(PreNorm):
    """Pre-Norm with another closing."""

    def closing(self, last: Place, spec: ResidualSpec) -> Closing:  # type: ignore[override]
        """Return the closing."""
        return OwnClosing(spec)


@pytest.mark.parametrize(
    ("name", "experts"), [("siamese", {"experts": 4, "active_experts": 2}), ("own", {})], ids=["experts", "own"]
)
def test_mixtures_of_experts_and_topologies_of_ones_own_are_analysed(
    name: str,
    experts: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(TOPOLOGIES, "own", OwnTopology())
    run, what = tmp_path / "run", ["jacobians", "logit-lens", "pruning"]
    train(tiny_run(write_data(tmp_path / "data"), steps=2, model={"topology": name, **experts}), run)
    assert main([*map(str, ["analyze", run, "--what", *what, "--samples", 2, "--tokens", 2, "--json"])]) == 0
    (several,) = json.loads(capsys.readouterr().out).values()
    found = {each["evaluation"]: each["results"] for each in several}
    assert found["logit-lens"]["loss"][-1] == pytest.approx(found["pruning"]["loss"])
    jacobians = found["jacobians"]
    assert len(jacobians["largest"]) == 2 * jacobians["blocks"] == len(jacobians["rank"])
    assert name == "own" or max(jacobians["identity"].values()) < 1e-13


def test_text_that_a_model_cannot_read_is_refused(
    rewired: tuple[Any, Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, directory, _ = rewired
    np.save(tmp_path / "large.npy", np.full(40, 1000))
    np.save(tmp_path / "short.npy", np.full(5, 3))
    np.save(tmp_path / "real.npy", np.full(40, 0.5))
    (tmp_path / "text.txt").write_text("some words")
    for name, reason in (
        ("large.npy", "token 1000"), ("short.npy", "5 tokens"), ("real.npy", "float64"), ("text.txt", "no tokenizer"),
        ("none.txt", "no such file"),
    ):  # fmt: skip
        assert reason in refusal(capsys, "analyze", directory, "--text", tmp_path / name, "--context", 12)
    assert "--context" in refusal(capsys, "analyze", directory, "--text", tmp_path / "short.npy", "--context", 0)
