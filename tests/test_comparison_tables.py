"""The tables as people read them: the papers' layout, in the terminal, in Markdown, and every number as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from comparison_sweeps import METHODS, PRE, SyntheticMethod, runs_of, write_sweep
from siamesenorm.comparison import formatting
from siamesenorm.comparison.accuracy_tables import accuracy_tables
from siamesenorm.comparison.comparison_report import definitions, method_notes, subject
from siamesenorm.comparison.comparison_tables import (
    against_baselines,
    at_chosen_rates,
    by_kind,
    by_learning_rate,
    comparison_tables,
    comparisons_csv,
    runs_csv,
)
from siamesenorm.comparison.findings import Findings, find
from siamesenorm.comparison.report_parts import Entry, Table
from siamesenorm.comparison.report_writer import table_in_markdown, table_on_terminal
from siamesenorm.comparison.results import read_experiment
from siamesenorm.comparison.statistics import Estimate

PICKED = [method for method in METHODS if method.label in ("pre", "pre + qkv", "post", "residual", "siamese")]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    runs = runs_of(PICKED, seeds=(0, 1, 2), steps=120)
    runs[-1] = dataclasses.replace(runs[-1], until=40)
    return find(read_experiment(write_sweep(tmp_path_factory.mktemp("sweep"), runs, missing=["never"])))


def cells(table: Table, group: str = "") -> dict[str, dict[str, Entry]]:
    """Return the entries of a group of a table by method and column, arrows left out."""
    titles = [column.title.partition("\N{NO-BREAK SPACE}")[0] for column in table.columns]
    rows = next(each for each in table.groups if each.title == group).rows
    return {row[0].text: dict(zip(titles, row, strict=True)) for row in rows}


def rows(findings: Findings, rate: str) -> dict[str, dict[str, Entry]]:
    return cells(by_learning_rate(findings), f"Learning rate {rate}")


def test_rows_are_grouped_by_learning_rate_in_the_order_of_the_sweep(findings: Findings) -> None:
    table = by_learning_rate(findings)
    assert [group.title for group in table.groups] == [f"Learning rate {rate}" for rate in ("2e-3", "8e-3", "3e-2")]
    for group in table.groups:
        assert [row[0].text for row in group.rows] == [method.label for method in PICKED]
        assert all(len(row) == len(table.columns) for row in group.rows)


def test_diverged_rows_print_diverge_and_others_a_mark(findings: Findings) -> None:
    row = rows(findings, "8e-3")["post"]
    assert (row["Train PPL"].text, row["Held-out PPL"].text, row["Train PPL"].emphasis) == ("diverge", "diverge", True)
    assert (row["Seeds"].text, str(row["Verdict"].pill)) == ("3", "✕ diverged")
    row = rows(findings, "8e-3")["residual"]
    assert row["Train PPL"].text.endswith("*") and str(row["Verdict"].pill) == "▲ spiked"
    row = rows(findings, "3e-2")["post"]
    assert row["Held-out PPL"].text.endswith("‡") and str(row["Verdict"].pill).startswith("◇ not learned")


def test_a_row_has_mean_interval_seeds_and_costs_against_the_baseline(findings: Findings) -> None:
    held_out = findings.outcomes[2e-3, "siamese"].metric("perplexity")
    assert held_out is not None and held_out.half_width is not None
    row = {title: entry.text for title, entry in rows(findings, "2e-3")["siamese"].items()}
    assert row["Held-out PPL"] == f"{held_out.mean:.3f} ± {held_out.half_width:.3f}"
    assert (row["Seeds"], row["FLOPs/token"], row["Memory"]) == ("3", "9.90 M", "612 MiB")
    assert (row["Parameters"], row["Step time"]) == ("1.65 M (+0.16 %)", "166 ms (1.17×)")
    assert rows(findings, "2e-3")["pre"]["Step time"].text == "142 ms"


def test_jobs_that_shared_a_machine_have_no_step_times(tmp_path: Path) -> None:
    found = find(read_experiment(write_sweep(tmp_path, runs_of([PRE], rates=(2e-3,), steps=40), jobs=2)))
    assert "Step time" not in rows(found, "2e-3")["pre"]
    assert "Step time" in {note.topic for note in definitions(found)}


def test_the_lowest_of_each_rate_is_strong(findings: Findings) -> None:
    for rate in ("2e-3", "8e-3", "3e-2"):
        strong = [name for name, row in rows(findings, rate).items() if row["Held-out PPL"].strong]
        assert strong == ["siamese"]


def test_columns_come_from_the_metrics_of_the_task(tmp_path: Path) -> None:
    """Here accuracy, of which the highest is the best."""
    runs = runs_of([PRE, METHODS[-1]], rates=(2e-3, 8e-3), seeds=(0, 1), steps=40, accuracy=True)
    found = find(read_experiment(write_sweep(tmp_path, runs)))
    for table in (by_learning_rate(found), at_chosen_rates(found)):
        titles = [column.title for column in table.columns]
        assert "Held-out accuracy\N{NO-BREAK SPACE}↑" in titles and not any("PPL" in title for title in titles)
    row = rows(found, "2e-3")
    accuracy = found.outcomes[2e-3, "siamese"].metric("accuracy")
    assert accuracy is not None and row["siamese"]["Held-out accuracy"].text.startswith(f"{accuracy.mean:.1%}")
    assert [row[name]["Held-out accuracy"].strong for name in ("pre", "siamese")] == [False, True]
    assert "held_out_accuracy" in runs_csv(found.results)


def test_nothing_is_the_lowest_across_unequal_seeds(tmp_path: Path) -> None:
    low, high = (SyntheticMethod(label=name, losses=(loss,)) for name, loss in (("pre", 1.5), ("post", 1.6)))
    runs = runs_of([low], rates=(2e-3,), seeds=(0, 1, 2), steps=40) + runs_of([high], rates=(2e-3,), steps=40)
    found = find(read_experiment(write_sweep(tmp_path, runs)))
    first, second = rows(found, "2e-3"), cells(at_chosen_rates(found))
    assert [first[name]["Seeds"].text for name in ("pre", "post")] == ["1", "1"]
    assert [first[name]["Held-out PPL"].strong for name in ("pre", "post")] == [True, False]
    assert [second[name]["Seeds"].text for name in ("pre", "post")] == ["2", "1 (the selection seed)"]
    assert not any(row["Held-out loss"].strong for row in second.values())


def test_a_method_that_lost_a_seed_is_not_the_lowest(tmp_path: Path) -> None:
    low, high = (SyntheticMethod(label=name, losses=(loss,)) for name, loss in (("pre", 1.5), ("post", 1.6)))
    runs = runs_of([low, high], rates=(2e-3,), seeds=(0, 1), steps=40)
    runs[1] = dataclasses.replace(runs[1], wanted="not finite")
    first = rows(find(read_experiment(write_sweep(tmp_path, runs))), "2e-3")
    assert first["pre"]["Held-out PPL"].text.endswith("†")
    assert [first[name]["Held-out PPL"].strong for name in ("pre", "post")] == [False, True]


def test_differences_have_both_intervals_and_are_grouped_by_kind(findings: Findings) -> None:
    table = against_baselines(by_kind(findings.comparisons), "nats")
    assert len(table.groups) == 3, "topology, ablation and control"
    comparison = next(each for each in findings.comparisons if (each.method, each.baseline) == ("siamese", "pre"))
    assert comparison.interval is not None and comparison.corrected is not None
    row = cells(table, table.groups[0].title)["siamese"]
    assert row["Baseline"].text == "pre" and row["Difference (nats)"].text == formatting.signed(
        comparison.interval.mean
    )
    assert row["95 % t interval"].text == formatting.interval(comparison.interval)
    assert row["Holm interval"].text == formatting.interval(comparison.corrected) != row["95 % t interval"].text
    assert comparison.decision is not None and comparison.difference.p_value is not None
    assert row["p"].text == formatting.p_value(comparison.difference.p_value)
    assert row["Holm p"].text == formatting.p_value(comparison.decision.adjusted_p) != row["p"].text
    assert comparison.steps_to_baseline is not None and float(row["Steps to its loss"].text) < 120
    assert row["Conclusion"].pill is not None and row["Conclusion"].pill.text == comparison.conclusion
    assert str(cells(at_chosen_rates(findings))["post"]["Chosen rate"].pill) == "! low edge"


def test_losses_are_set_against_the_noise_of_the_baseline(tmp_path: Path) -> None:
    losses = {"pre": 1.6, "post": 1.9, "siamese": 1.3, "dhc-2": 1.6005}
    methods = [SyntheticMethod(label=name, losses=(loss,)) for name, loss in losses.items()]
    rows = cells(at_chosen_rates(find(read_experiment(write_sweep(tmp_path, runs_of(methods, (2e-3,), (0, 1, 2)))))))
    places = {name: row["Against noise"] for name, row in rows.items()}
    assert places["pre"].text.startswith("band 1.")
    assert [str(places[name].pill) for name in ("post", "siamese", "dhc-2")] == ["↑ above", "↓ below", "≈ inside"]
    alone = find(read_experiment(write_sweep(tmp_path / "alone", runs_of(methods, (2e-3,), steps=40))))
    assert "Against noise" not in cells(at_chosen_rates(alone))["pre"]


def test_a_missing_control_row_is_noted(tmp_path: Path) -> None:
    found = find(read_experiment(write_sweep(tmp_path, runs_of([PRE, METHODS[-1]], steps=40))))
    assert "Control row missing" in {note.topic for note in definitions(found)}


def test_every_method_and_every_word_is_defined(findings: Findings) -> None:
    notes = {note.topic: note for note in method_notes(findings)}
    assert notes.keys() == {method.label for method in PICKED}
    assert "QKV-norm" in notes["pre + qkv"].text and "control" in notes["pre + qkv"].text
    assert all(note.link is not None for note in notes.values())
    topics = {note.topic for note in definitions(findings)}
    assert {"● stable", "▲ spiked", "◇ not learned", "✕ diverged", "Loss", "Train PPL", "Rate sensitivity"} <= topics


@pytest.mark.parametrize(("tokens", "words"), [(10**6, "No run saw any data twice"), (61_440, "up to 1.3 times")])
def test_train_perplexity_is_the_papers_number_only_on_fresh_data(tmp_path: Path, tokens: int, words: str) -> None:
    found = find(read_experiment(write_sweep(tmp_path, runs_of([PRE], rates=(2e-3,), steps=40, train_tokens=tokens))))
    assert words in next(note.text for note in definitions(found) if note.topic == "Train PPL")


def test_the_subject_names_methods_data_and_budget(findings: Findings) -> None:
    compared, data, budget = subject(findings)
    assert "(pre, pre + qkv, post, residual and siamese)" in compared and "(2e-3, 8e-3 and 3e-2)" in compared
    assert "the built-in corpus" in data and "(vocabulary 257)" in data and "2.21 M training tokens" in data
    for part in ("8 blocks", "width 128", "4 heads", "1.65 M parameters", "120 steps of 8 samples", "246 k tokens"):
        assert part in budget


def test_a_method_that_diverged_everywhere_says_so(tmp_path: Path) -> None:
    lost = SyntheticMethod(label="post", losses=("not finite", "not finite"))
    found = find(read_experiment(write_sweep(tmp_path, runs_of([PRE, lost], steps=40))))
    row = at_chosen_rates(found).groups[0].rows[1]
    assert str(row[1].pill) == "✕ diverged at every rate"


def test_the_terminal_shows_every_cell(findings: Findings) -> None:
    console = Console(width=220, file=io.StringIO(), color_system=None)
    for table in comparison_tables(findings):
        console.print(table_on_terminal(table, 220))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for table in comparison_tables(findings):
        for entry in (entry for group in table.groups for row in group.rows for entry in row):
            assert entry.text in shown
            assert entry.pill is None or str(entry.pill) in shown


def test_a_narrow_terminal_loses_whole_columns_and_says_which(findings: Findings) -> None:
    table = by_learning_rate(findings)
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(table_on_terminal(table, 80))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert table.columns[1].title in shown and "Memory" in shown


def test_markdown_rows_have_one_cell_a_column(findings: Findings) -> None:
    for table in comparison_tables(findings):
        lines = table_in_markdown(table).splitlines()
        assert {line.count("|") for line in lines} == {len(table.columns) + 1}
    assert "| *diverge* |" in table_in_markdown(by_learning_rate(findings))
    assert "\\* |" in table_in_markdown(by_learning_rate(findings))


def test_the_csv_has_every_run_with_numbers_that_round_trip(findings: Findings) -> None:
    records = list(csv.DictReader(io.StringIO(runs_csv(findings.results))))
    assert len(records) == 46
    for record, run in zip(records, findings.results.runs, strict=False):
        assert (record["method"], record["status"]) == (run.method, run.status)
        assert float(record["held_out_loss"]) == run.held_out["loss"]
        assert record["train_loss"] == ("" if run.train_loss is None else repr(run.train_loss))
    assert (records[-2]["status"], records[-2]["verdict"], records[-2]["steps_done"]) == ("unfinished", "", "40")
    assert (records[-1]["run"], records[-1]["status"]) == ("never", "missing")


def test_the_csv_of_comparisons_has_both_intervals(findings: Findings) -> None:
    records = list(csv.DictReader(io.StringIO(comparisons_csv(findings.comparisons))))
    assert [(record["method"], record["baseline"]) for record in records] == [
        (each.method, each.baseline) for each in findings.comparisons
    ]
    last = records[-1]
    assert float(last["holm_low"]) <= float(last["t_low"]) < float(last["difference"]) < float(last["t_high"])
    assert float(last["holm_p_value"]) >= float(last["p_value"])
    assert float(last["steps_to_baseline"]) > 0


def test_quantities_are_written_for_people() -> None:
    assert [formatting.rate(value) for value in (0.002, 3e-4, 0.0125, 1.0, 1e-10)] == [
        "2e-3", "3e-4", "1.25e-2", "1e0", "1e-10",
    ]  # fmt: skip
    assert [formatting.significant(value) for value in (4.5678, 12.606, 123.44, 12345.6, 1e9)] == [
        "4.568", "12.61", "123.4", "12346", "1.00e+09",
    ]  # fmt: skip
    assert [formatting.p_value(value) for value in (0.03125, 0.5, 9e-5, 0.0)] == [
        "0.031",
        "0.50",
        "< 0.0001",
        "< 0.0001",
    ]
    assert [formatting.steps(value) for value in (1234.0, math.inf)] == ["1,234", "never"]
    assert [formatting.count(value) for value in (999, 999_999, 1_284_096, 9.9e9)] == [
        "999",
        "1.00 M",
        "1.28 M",
        "9.90 G",
    ]
    assert [formatting.percent(ratio) for ratio in (0.0, 0.00023, -0.0123, 0.5)] == [
        "+0 %",
        "+0.023 %",
        "−1.23 %",
        "+50 %",
    ]
    assert [formatting.seconds(value) for value in (0.0416, 0.9999, 12.5)] == ["41.6 ms", "1.00 s", "12.5 s"]
    assert formatting.interval(Estimate(mean=-0.02, half_width=0.03, count=4)) == "[−0.0500, +0.0100]"
    assert formatting.listed(["a"]) == "a" and formatting.listed(["a", "b", "c"]) == "a, b and c"


def choice_record(step: int, acc: float, *, digest: str = "d", weights: str = "raw") -> dict[str, Any]:
    """Return a record of two tasks, of which the second counts per character."""
    tasks = {
        "arc_easy": {
            "acc": acc,
            "acc_per_char": 0.0,
            "primary": "acc",
            "items": 10,
            "acc_stderr": 0.03,
            "bits_per_byte": 1 - acc,
        },
        "piqa": {
            "acc": 0.0,
            "acc_per_char": acc / 2,
            "primary": "acc_per_char",
            "items": 10,
            "acc_per_char_stderr": 0.04,
            "bits_per_byte": 2.0,
        },
    }
    return {
        "kind": "evaluation", "step": step, "weights": weights, "evaluation": "multiple-choice",
        "options": {"tasks": list(tasks), "split": "validation", "digest": digest},
        "results": {**tasks, "average": 0.75 * acc},
    }  # fmt: skip


def test_accuracies_come_from_the_last_records_of_the_same_items(tmp_path: Path) -> None:
    runs = runs_of([PRE, METHODS[-1]], rates=(2e-3,), seeds=(0, 1), steps=40)
    sweep = write_sweep(tmp_path, runs)
    assert accuracy_tables(find(read_experiment(sweep))) == ()
    for number, run in enumerate(runs):
        lines = [choice_record(40, 0.5 + 0.1 * number), choice_record(20, 0.9), choice_record(40, 0.1, weights="ema")]
        file = sweep / "runs" / run.identity / "evaluations.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table, bits = accuracy_tables(find(read_experiment(sweep)))
    row = cells(table, "Learning rate 2e-3")
    assert (row["pre"]["Seeds"].text, row["pre"]["ARC-E"].text.split(" ")[0]) == ("2", "55.00")
    assert row["siamese"]["PIQA"].text.startswith("37.50") and row["siamese"]["Average"].text.startswith("56.25")
    assert row["siamese"]["ARC-E"].strong and not row["pre"]["ARC-E"].strong
    assert row["pre"]["ARC-E"].text.endswith(" (3.00)") and row["pre"]["Average"].text.endswith(" (2.50)")
    row = cells(bits, "Learning rate 2e-3")
    assert row["pre"]["ARC-E"].text.startswith("0.4500") and row["siamese"]["Average"].text.startswith("1.1250")
    assert row["siamese"]["ARC-E"].strong and not row["pre"]["ARC-E"].strong
    with file.open("a") as more:
        more.write(json.dumps(choice_record(40, 0.5, digest="other")) + "\n")
    assert len(accuracy_tables(find(read_experiment(sweep)))) == 4, "other items are no row of the same table"
