"""Tables of measurements are those of the committed results; what the page on performance claims of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pages import TABLE, fill_tables
from siamesenorm.errors import UserError

ROOT = Path(__file__).parents[1]
TABLES = {
    "cost": 1, "evaluation": 4, "huggingface": 1, "performance": 6, "rewire": 2, "scale": 3, "seednorm_heads": 1,
    "stability": 1, "theory": 1, "vision": 1,
}  # fmt: skip
"""Numbers of tables of measurements, by page."""
RESULTS = sorted([*ROOT.glob("benchmarks/performance/*.json"), *ROOT.glob("benchmarks/gpu/*.json")])


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert len(TABLE.findall(text)) == TABLES.get(page.stem, 0)
    assert fill_tables(text, page.parent) == text, f"python benchmarks/pages.py {page}"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_results_name_their_environment(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["environment"]["torch"] and record["environment"]["commit"]
    assert record["rows"] or record["not_measured"]


def test_no_kernel_spills() -> None:
    rows = json.loads((ROOT / "benchmarks/performance/registers.json").read_text())["rows"]
    assert {row["dim"] for row in rows if row["streams"] == "bfloat16"} >= {1024, 2048, 4096}
    spilling = {(row["boundary"], row["norm"], row["dim"], row["streams"]) for row in rows if row["spilled_bytes"]}
    assert spilling == {
        ("deepnorm", "rmsnorm", 512, "float32"),
        ("residual", "rmsnorm", 512, "float32"),
        ("siamese mlp", "layernorm", 4096, "float32"),
    }, "none from 1024 to 4096 in bf16 and 2048 in fp32; the page names these"


def test_the_fused_boundary_keeps_two_tensors_and_three_scalars_at_most() -> None:
    rows = json.loads((ROOT / "benchmarks/performance/boundary.json").read_text())["rows"]
    fused = [row for row in rows if row["candidate"] == "fused"]
    lean = [row for row in rows if row["candidate"] == "lean"]
    assert {row["topology"] for row in fused} >= {"pre", "post", "residual", "siamese", "siamese-post-pre"}
    assert all(row["kept_tensors"] <= 2 and row["kept_scalars_a_token"] < 3.01 for row in fused)
    assert lean and all(row["kept_tensors"] <= 1 for row in lean)


def test_a_table_is_filled_from_the_rows_that_the_condition_chooses(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"rows": [{"a": 1, "b_c": "x"}, {"a": 2, "b_c": "y"}]}))
    page = "before\n<!-- table r.json: a, b_c where b_c=y -->\nold\n<!-- end -->\nafter\n"
    filled = (
        "before\n<!-- table r.json: a, b_c where b_c=y -->\n| a | b c |\n|---|---|\n| 2 | y |\n<!-- end -->\nafter\n"
    )
    assert fill_tables(page, tmp_path) == filled
    assert fill_tables(filled, tmp_path) == filled
    with pytest.raises(UserError, match="no row of r.json has 'd'"):
        fill_tables("<!-- table r.json: d -->\n<!-- end -->", tmp_path)
