"""The page of rewired families shows the committed measurements, and they are those of a function that was kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/rewire.json").read_text())["rows"]
PARALLEL = {"phi", "stablelm-parallel", "gptj", "codegen", "falcon", "falcon-two-norms", "cohere", "cohere2"}
NO_PRE_NORM = {"OLMo 2", "bert", "roberta", "distilbert", "opt-post-norm", "PixArt"}
NO_LAST_NORM = {"clip-vision", "eva02, mean of tokens", "cait"}
KEPT = [row for row in ROWS if not row["outcome"].startswith("refused")]


def test_every_family_is_there() -> None:
    families = {row["family"] for row in ROWS}
    assert families >= {"Llama", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "GPT-2", "GPT-NeoX", "OLMo", "OLMoE"}
    assert families >= {"OLMo 2", "DiT", "vit", "deit", "eva02", "beit", "cait", "t5", "whisper", "llava", "modernbert"}
    assert len({row["family"] for row in KEPT}) >= 70


def test_functions_were_kept() -> None:
    for row in KEPT:
        # No norm acts twice without the second stream's input norm: there not even rounding differs, but for sublayers
        # that keep a norm, and for the order of the three terms of parallel ones.
        once = row["topology"].endswith("normalized_input=false") and row["family"] not in {
            *PARALLEL,
            "GPT-NeoX",
            "DiT",
        }
        assert row["outcome"] == "exact"
        relative = 0.0 if once else 2e-5 if row["family"].startswith("t5") else 1e-5  # T5's attention scales no scores
        assert row["largest_difference"] <= relative * row["largest_output"], row
        alive, _, zeroed = row["zeroed_gains_with_gradient"].partition(" of ")
        assert alive == zeroed != "0", row
        assert row["reload_bit_equal"] and row["lora_starts_equal"] and row.get("same_generation", True), row
        assert row.get("compiled_step_equal", row["topology"] != "siamese-post-pre"), row


def test_what_is_refused_is_what_mathematics_forbids() -> None:
    refused = {(row["family"], row["topology"]) for row in ROWS if row["outcome"].startswith("refused")}
    measured = {row["family"] for row in ROWS}
    for family in NO_PRE_NORM & measured:
        assert {topology for name, topology in refused if name == family} == {row["topology"] for row in ROWS}
    others = {pair for pair in refused if pair[0] not in NO_PRE_NORM}
    assert {family for family, topology in others if topology == "siamese"} == {"GPT-NeoX", *(PARALLEL | NO_LAST_NORM)}
    assert {family for family, topology in others if topology != "siamese"} == NO_LAST_NORM


def test_a_trained_model_is_kept_as_a_random_one_is() -> None:
    record = json.loads((ROOT / "benchmarks/rewire_trained.json").read_text())
    assert record["training"]["parameters"] > 5e6 and record["training"]["last_loss"] < 4.5
    topologies = [
        {row["topology"] for row in record["rows"] if row["streams"] == name} for name in ("initial", "trained")
    ]
    assert topologies[0] == topologies[1] and {"siamese", "siamese-post-pre", "mhc-4", "attnres"} <= topologies[0]
    for row in record["rows"]:
        assert row["outcome"] == "exact" and row["relative_difference"] < 2e-6 and row["same_best_token"] == 1, row
        assert abs(row["loss_change"]) < 1e-6 and abs(row["loss_change_bf16"]) < 5e-4, row
