"""The page of rewired families shows the committed measurements, and they are those of a function that was kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pages import fill_tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/rewire.md"
ROWS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/rewire.json").read_text())["rows"]
KEPT = [row for row in ROWS if not row["outcome"].startswith("refused")]


def test_the_page_shows_the_measurements() -> None:
    page = PAGE.read_text()
    assert fill_tables(page, PAGE.parent) == page, "make rewire-table"


def test_every_family_is_there() -> None:
    families = {row["family"] for row in ROWS}
    assert families >= {"Llama", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "GPT-2", "GPT-NeoX", "OLMo", "OLMoE"}
    assert families >= {"OLMo 2", "DiT", "vit", "deit"}


@pytest.mark.parametrize("row", KEPT, ids=lambda row: f"{row['family']}-{row['topology']}")
def test_a_function_was_kept(row: dict[str, Any]) -> None:
    # No norm acts twice without the second stream's input norm: there not even rounding differs.
    once = row["topology"].endswith("normalized_input=false")
    relative = 1e-3 if row["outcome"] != "exact" else 0.0 if once else 2e-6
    assert row["largest_difference"] <= relative * row["largest_output"]
    alive, _, zeroed = row["zeroed_gains_with_gradient"].partition(" of ")
    assert alive == zeroed != "0"
    assert row["reload_bit_equal"] and row["lora_starts_equal"]
    assert row.get("compiled_step_equal", row["topology"] != "siamese-post-pre")


def test_what_is_refused_is_what_mathematics_forbids() -> None:
    refused = {(row["family"], row["topology"]) for row in ROWS if row["outcome"].startswith("refused")}
    assert {topology for family, topology in refused if family == "OLMo 2"} == {row["topology"] for row in ROWS}
    assert {pair for pair in refused if pair[0] != "OLMo 2"} == {("GPT-NeoX", "siamese")}
