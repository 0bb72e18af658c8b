"""The experiments on theory: what they measure has a known answer, and a claim follows from its number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from siamesenorm.cli import main
from siamesenorm.norms import SeeDNorm
from siamesenorm.recipes import gradient_theory, seednorm_theory
from siamesenorm.recipes.gradient_theory import count_spikes, gradient_at_init, gradient_spikes, xavier_model
from siamesenorm.recipes.seednorm_theory import (
    dynamic_variance,
    dyt_equivalence,
    gradient_scaling,
    unbounded_activation,
)
from siamesenorm.recipes.theory import slope
from siamesenorm.sublayers.sublayer import Projection


def test_a_slope_is_the_exponent_of_a_power() -> None:
    assert slope([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2.0)
    assert slope([1, 10], [5, 0.5]) == pytest.approx(-1.0)


def test_the_variance_of_dot_products_is_the_width_of_a_head() -> None:
    result = dynamic_variance(widths=(32, 128), heads=(1, 4), draws=200)
    assert result.record["variances"]["1 head"] == pytest.approx([32, 128], rel=0.1)
    assert result.record["variances"]["4 heads"] == pytest.approx([8, 32], rel=0.1)
    aligned = [D + D**2 + 2 * D for D in (32, 128)]  # |beta|^2 and |beta|^4, beta standard normal
    assert result.record["variances"]["1 head, aligned"] == pytest.approx(aligned, rel=0.2)
    assert [claim.holds for claim in result.claims] == [True, False]


def test_a_wrong_number_of_heads_refutes_the_theorem(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SeeDNorm.dot_products
    monkeypatch.setattr(SeeDNorm, "dot_products", lambda norm, x: whole(norm, x).sum(-1, keepdim=True))
    result = dynamic_variance(widths=(32, 64), heads=(1, 4), draws=20)
    assert not result.claims[0].holds and result.claims[0].outcome == "does not hold"


def test_gradients_at_k_x_are_those_of_the_formulas() -> None:
    result = gradient_scaling(dim=128)
    assert all(claim.holds for claim in result.claims), result.claims
    relative = result.record["relative"]
    assert relative["RMSNorm"] == pytest.approx([2.0**-power for power in range(11)])
    assert relative["SeeDNorm"][1] != pytest.approx(0.5, rel=0.02), "between 0 and saturation it is not 1/k"


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = seednorm_theory._gradient
    monkeypatch.setattr(seednorm_theory, "_gradient", lambda norm, x, upstream: right(norm, x, upstream) * 1.001)
    assert not gradient_scaling(dim=64).claims[-1].holds


def test_dyt_and_rmsnorm_satisfy_one_equation_at_constant_norm_alone() -> None:
    result = dyt_equivalence()
    assert all(claim.holds for claim in result.claims)
    assert result.record["deviations"]["DyT, larger"] == pytest.approx(3.0), "at 0 the derivative is 4 times too large"


def test_an_unbounded_sigma_grows_with_the_input() -> None:
    result = unbounded_activation(dim=64)
    assert all(claim.holds for claim in result.claims), result.claims
    only_bounded = unbounded_activation(activations=("tanh", "silu"), dim=64).record["slopes"]
    assert only_bounded == pytest.approx({"tanh": 0.0, "silu": 1.0}, abs=0.05)


def test_initial_gradients_are_those_of_the_first_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_theory, "SEEDS", (0,))
    monkeypatch.setattr(gradient_theory, "BATCH", 2)
    monkeypatch.setattr(gradient_theory, "DOCUMENTS", 3)
    gradient_theory._corpus.cache_clear()
    result = gradient_at_init(("pre", "post"), depths=(2, 4))
    gradient_theory._corpus.cache_clear()
    norms = result.record["norms"]
    assert [len(norms["post"][depth]) for depth in ("2", "4")] == [2, 4]
    assert norms["pre"]["4"][0] > norms["pre"]["4"][-1], "Pre-Norm's gradient falls towards the output"
    assert result.record["exponents"]["pre"] < result.record["exponents"]["post"]
    model = xavier_model("deepnorm", 2, 0)
    projection = model.get_submodule("blocks.0.mlp.up")
    assert isinstance(projection, Projection)
    factor = model.config.topology.initial_factor("mlp_up", 2)
    assert (
        float(projection.weight.detach().std()) == pytest.approx(factor * (2 / (64 + 256)) ** 0.5, rel=0.05)
        and factor != 1
    )


def test_spikes_are_steps_above_twice_the_later_median() -> None:
    calm = [9.0] * 10 + [1.0] * 20
    assert count_spikes(calm) == 0, "the first steps do not count"
    assert count_spikes([*calm[:15], 2.1, float("nan"), 1.9, *calm[18:]]) == 2


def test_spikes_are_counted_over_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_theory, "_training_norms", lambda method, steps, rate: (NORMS[method], [3.0] * 30))
    result = gradient_spikes()
    assert result.record["spikes"] == {"pre": 0, "post": 3} and result.claims[0].holds


def test_the_training_of_spikes_steps_on_new_batches() -> None:
    norms, losses = gradient_theory._training_norms("pre", 5, 8e-3)
    assert len(norms) == len(losses) == 5 and losses[-1] < losses[0] - 0.5
    still, unchanged = gradient_theory._training_norms("pre", 3, 0.0)
    assert (still[0], unchanged[0]) == (norms[0], losses[0])
    assert len(set(unchanged)) == 3 and max(unchanged) - min(unchanged) < 0.5, "the batches differ, the weights do not"
    assert abs(unchanged[1] - losses[1]) > 0.01


NORMS = {"pre": [1.0] * 30, "post": [*[1.0] * 12, 3.0, 4.0, 5.0, *[1.0] * 15]}


def test_the_command_writes_the_page_and_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "dyt-equivalence", "--out", str(tmp_path)])
    assert capsys.readouterr().out.startswith("Holds: ")
    page = tmp_path / "dyt-equivalence"
    assert (page / "report.html").exists() and json.loads((page / "dyt-equivalence.json").read_text())["dim"] == 64
    assert "siamesenorm reproduce dyt-equivalence" in (page / "report.md").read_text()
