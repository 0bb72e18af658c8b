"""The tables as people read them: the papers' layout, in the terminal, in Markdown, and every number as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from comparison_sweeps import METHODS, PRE, SyntheticMethod, runs_of, write_sweep
from siamesenorm.comparison import quantities
from siamesenorm.comparison.findings import Findings, find
from siamesenorm.comparison.records import comparisons_csv, runs_csv
from siamesenorm.comparison.renderings import for_markdown, for_terminal
from siamesenorm.comparison.results import read_sweep
from siamesenorm.comparison.statistics import Estimate
from siamesenorm.comparison.summary import footnotes, subject
from siamesenorm.comparison.tables import Entry, at_chosen_rates, by_learning_rate

PICKED = [method for method in METHODS if method.label in ("pre", "pre + qkv", "post", "residual", "siamese")]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    runs = runs_of(PICKED, seeds=(0, 1, 2), steps=120)
    runs[-1] = dataclasses.replace(runs[-1], until=40)
    return find(read_sweep(write_sweep(tmp_path_factory.mktemp("sweep"), runs, missing=["never"])))


def rows(findings: Findings, rate: str) -> dict[str, tuple[Entry, ...]]:
    group = next(g for g in by_learning_rate(findings).groups if g.title == f"Learning rate {rate}")
    return {row[0].text: row[1:] for row in group.rows}


def test_rows_are_grouped_by_learning_rate_in_the_order_of_the_sweep(findings: Findings) -> None:
    table = by_learning_rate(findings)
    assert [group.title for group in table.groups] == [f"Learning rate {rate}" for rate in ("2e-3", "8e-3", "3e-2")]
    for group in table.groups:
        assert [row[0].text for row in group.rows] == [method.label for method in PICKED]
        assert all(len(row) == len(table.columns) for row in group.rows)


def test_diverged_rows_print_diverge_and_spiked_ones_a_star(findings: Findings) -> None:
    train, held_out, verdict, seeds, *_ = rows(findings, "8e-3")["post"]
    assert (train.text, held_out.text, train.emphasis, seeds.text) == ("diverge", "diverge", True, "3")
    assert str(verdict.pill) == "✕ diverged"
    train, held_out, verdict, *_ = rows(findings, "8e-3")["residual"]
    assert train.text.endswith("*") and held_out.text.endswith("*")
    assert str(verdict.pill) == "▲ spiked"


def test_a_row_has_mean_interval_seeds_and_costs_against_pre(findings: Findings) -> None:
    held_out = findings.outcomes[2e-3, findings.sweep.methods[-1]].held_out_perplexity
    assert held_out is not None and held_out.half_width is not None
    _, loss, verdict, seeds, parameters, flops, time, memory = rows(findings, "2e-3")["siamese"]
    assert loss.text == f"{held_out.mean:.3f} ± {held_out.half_width:.3f}"
    assert (str(verdict.pill), seeds.text, flops.text, memory.text) == ("● stable", "3", "9.90 M", "612 MiB")
    assert (parameters.text, time.text) == ("1.65 M (+0.16 %)", "166 ms (1.17×)")
    assert [entry.text for entry in rows(findings, "2e-3")["pre"][4:7]] == ["1.65 M", "9.89 M", "142 ms"]


def test_the_lowest_of_each_rate_is_strong(findings: Findings) -> None:
    for rate in ("2e-3", "8e-3", "3e-2"):
        strong = [name for name, row in rows(findings, rate).items() if row[1].strong]
        assert strong == ["siamese"]


def test_nothing_is_the_lowest_across_unequal_seeds(tmp_path: Path) -> None:
    low, high = (SyntheticMethod(label=name, losses=(loss,)) for name, loss in (("pre", 1.5), ("post", 1.6)))
    runs = runs_of([low], rates=(2e-3,), seeds=(0, 1, 2), steps=40) + runs_of([high], rates=(2e-3,), steps=40)
    found = find(read_sweep(write_sweep(tmp_path, runs, grid={"selection_seed": 0})))
    first, second = rows(found, "2e-3"), {row[0].text: row for row in at_chosen_rates(found).groups[0].rows}
    assert [first[name][3].text for name in ("pre", "post")] == ["1", "1"]
    assert [first[name][1].strong for name in ("pre", "post")] == [True, False]
    assert [second[name][2].text for name in ("pre", "post")] == ["2", "1 (the selection seed)"]
    assert not any(row[3].strong for row in second.values())


def test_a_method_that_lost_a_seed_is_not_the_lowest(tmp_path: Path) -> None:
    low, high = (SyntheticMethod(label=name, losses=(loss,)) for name, loss in (("pre", 1.5), ("post", 1.6)))
    runs = runs_of([low, high], rates=(2e-3,), seeds=(0, 1), steps=40)
    runs[1] = dataclasses.replace(runs[1], wanted="not finite")
    first = rows(find(read_sweep(write_sweep(tmp_path, runs))), "2e-3")
    assert first["pre"][1].text.endswith("†")
    assert [first[name][1].strong for name in ("pre", "post")] == [False, True]


def test_the_second_table_compares_with_pre_and_with_the_control(findings: Findings) -> None:
    table = at_chosen_rates(findings)
    by_name = {row[0].text: row for row in table.groups[0].rows}
    comparison = findings.comparison(findings.sweep.methods[-1], findings.sweep.methods[0])
    assert comparison is not None and comparison.interval is not None
    against_pre = by_name["siamese"][5]
    assert against_pre.text == quantities.signed(comparison.interval.mean)
    assert against_pre.detail == quantities.interval(comparison.interval)
    assert against_pre.pill is not None and against_pre.pill.text == comparison.conclusion
    assert by_name["siamese"][6].pill is not None and by_name["post"][6].text == quantities.NOTHING
    assert str(by_name["post"][1].pill) == "! low edge"


def test_without_a_control_row_its_column_is_left_out_and_a_note_says_so(tmp_path: Path) -> None:
    found = find(read_sweep(write_sweep(tmp_path, runs_of([PRE, METHODS[-1]], steps=40))))
    table = at_chosen_rates(found)
    assert [column.title for column in table.columns][5:] == ["Against pre (nats)", "Rate sensitivity\xa0↓"]
    assert all(len(row) == len(table.columns) for row in table.groups[0].rows)
    assert "Control row missing" in {note.topic for note in footnotes(found)}


@pytest.mark.parametrize(("tokens", "words"), [(10**6, "This is the paper's number"), (61_440, "up to 1.3 times")])
def test_train_perplexity_is_the_papers_number_only_on_fresh_data(tmp_path: Path, tokens: int, words: str) -> None:
    found = find(read_sweep(write_sweep(tmp_path, runs_of([PRE], rates=(2e-3,), steps=40, train_tokens=tokens))))
    assert words in next(note.text for note in footnotes(found) if note.topic == "Train PPL")


def test_runs_of_unequal_budget_are_told(tmp_path: Path) -> None:
    runs = runs_of([PRE], rates=(2e-3,), steps=40) + runs_of([PRE], rates=(8e-3,), steps=44)
    topics = [note.topic for note in footnotes(find(read_sweep(write_sweep(tmp_path, runs))))]
    assert topics.count("Unequal budgets") == 1


def test_the_subject_names_methods_data_and_budget(findings: Findings) -> None:
    compared, data, budget = subject(findings)
    assert compared.startswith("5 ways to normalise the residual path (pre, pre + qkv, post, residual and siamese)")
    assert compared.endswith("3 learning rates (2e-3, 8e-3 and 3e-2) with up to 3 seeds.")
    assert data.startswith("The text is the built-in corpus, tokenizer bytes (vocabulary 257), 2.21 M training tokens")
    assert budget.endswith("width 128, 4 heads, 1.65 M parameters for 120 steps of 2,048 tokens (246 k in all).")


def test_a_method_that_diverged_everywhere_says_so(tmp_path: Path) -> None:
    lost = SyntheticMethod(label="post", losses=("not finite", "not finite"))
    found = find(read_sweep(write_sweep(tmp_path, runs_of([PRE, lost], steps=40))))
    row = at_chosen_rates(found).groups[0].rows[1]
    assert str(row[1].pill) == "✕ diverged at every rate"


def test_the_terminal_shows_every_cell(findings: Findings) -> None:
    console = Console(width=220, file=io.StringIO(), color_system=None)
    console.print(for_terminal(by_learning_rate(findings), 220), for_terminal(at_chosen_rates(findings), 220))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for table in (by_learning_rate(findings), at_chosen_rates(findings)):
        for entry in (entry for group in table.groups for row in group.rows for entry in row):
            assert entry.text in shown and entry.detail in shown
            assert entry.pill is None or str(entry.pill) in shown


def test_a_narrow_terminal_loses_whole_columns_and_says_which(findings: Findings) -> None:
    table = by_learning_rate(findings)
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(for_terminal(table, 80))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert table.columns[1].title in shown and "In the report besides" in shown and "Memory" in shown


def test_markdown_rows_have_one_cell_a_column(findings: Findings) -> None:
    for table in (by_learning_rate(findings), at_chosen_rates(findings)):
        lines = for_markdown(table).splitlines()
        assert {line.count("|") for line in lines} == {len(table.columns) + 1}
    assert "| *diverge* |" in for_markdown(by_learning_rate(findings))
    assert "\\* |" in for_markdown(by_learning_rate(findings))


def test_the_csv_has_every_run_with_numbers_that_round_trip(findings: Findings) -> None:
    records = list(csv.DictReader(io.StringIO(runs_csv(findings.sweep))))
    assert len(records) == 46
    for record, run in zip(records, findings.sweep.runs, strict=False):
        assert (record["method"], record["status"]) == (run.method.name, run.status)
        assert float(record["held_out_loss"]) == run.held_out_loss
        assert record["train_loss"] == ("" if run.train_loss is None else repr(run.train_loss))
    assert (records[-2]["status"], records[-2]["verdict"], records[-2]["steps_done"]) == ("unfinished", "", "40")
    assert (records[-1]["run"], records[-1]["status"]) == ("never", "missing")


def test_the_csv_of_comparisons_has_both_intervals(findings: Findings) -> None:
    records = list(csv.DictReader(io.StringIO(comparisons_csv(findings))))
    assert [(record["method"], record["baseline"]) for record in records] == [
        (each.method.name, each.baseline.name) for each in findings.comparisons
    ]
    last = records[-1]
    assert float(last["holm_low"]) <= float(last["low"]) < float(last["difference"]) < float(last["high"])
    assert float(last["holm_p_value"]) >= float(last["p_value"])


def test_quantities_are_written_for_people() -> None:
    assert [quantities.rate(value) for value in (0.002, 3e-4, 0.0125, 1.0, 1e-10)] == [
        "2e-3", "3e-4", "1.25e-2", "1e0", "1e-10",
    ]  # fmt: skip
    assert [quantities.perplexity(value) for value in (4.5678, 12.606, 123.44, 12345.6, 1e9)] == [
        "4.568", "12.61", "123.4", "12346", "1.00e+09",
    ]  # fmt: skip
    assert [quantities.count(value) for value in (999, 999_999, 1_284_096, 9.9e9)] == [
        "999",
        "1.00 M",
        "1.28 M",
        "9.90 G",
    ]
    assert [quantities.percent(ratio) for ratio in (0.0, 0.00023, -0.0123, 0.5)] == [
        "+0 %",
        "+0.023 %",
        "−1.23 %",
        "+50 %",
    ]
    assert [quantities.seconds(value) for value in (0.0416, 0.9999, 12.5)] == ["41.6 ms", "1.00 s", "12.5 s"]
    assert quantities.interval(Estimate(mean=-0.02, half_width=0.03, count=4)) == "[−0.0500, +0.0100]"
    assert quantities.listed(["a"]) == "a" and quantities.listed(["a", "b", "c"]) == "a, b and c"
