"""The variance of the gradient of SeeDNorm's dynamic term, and the page of what was measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import report_tables
from seednorm_heads import averaged, measure
from siamesenorm.norms import NormSpec, SeeDNorm
from siamesenorm.training.presets import presets
from training_runs import with_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/seednorm_heads.md"
MEASURED = ROOT / "benchmarks/seednorm_heads/variance.json"


def measured(heads: int, *, moved: bool = False) -> dict[str, float]:
    config = presets(Path())["digits"]
    norm = NormSpec.parse(f"seednorm:heads={heads}")
    config = with_model(config, depth=1, dim=32, hidden=32, norm=norm).resolved()
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, model=config.task.model))
    task = config.task.build(0)
    model = task.build_model(torch.device("cpu"))
    if moved:
        for norm_of in (module for module in model.modules() if isinstance(module, SeeDNorm)):
            torch.nn.init.normal_(norm_of.beta, generator=torch.Generator().manual_seed(0))
    return measure(model, task, batches=2, samples=16)


def test_one_head_has_the_gradient_of_all_channels() -> None:
    one = measured(1)
    assert one["gradient"] == one["joined"] > 0 and one["beta_gradient"] > 0
    assert one["dot_product"] == 0, "beta is 0"


def test_at_the_initial_weights_heads_share_the_gradient_of_one() -> None:
    """The function is the same, so the sum over heads is what one head has; each part varies less."""
    one, four = measured(1), measured(4)
    assert four["joined"] == pytest.approx(one["joined"], rel=1e-4)
    assert 0.5 / 4 < four["gradient"] / four["joined"] < 2.5 / 4


def test_the_dot_product_varies_as_its_length() -> None:
    ratio = measured(4, moved=True)["dot_product"] / measured(1, moved=True)["dot_product"]
    assert 0.5 / 4 < ratio < 2 / 4


def test_the_page_has_what_was_measured() -> None:
    content = json.loads(MEASURED.read_text())
    assert averaged(content["runs"]) == content["rows"] and len(content["runs"]) == 2 * 5 * 4
    page = PAGE.read_text()
    assert report_tables.fill_tables(page, PAGE.parent) == page
