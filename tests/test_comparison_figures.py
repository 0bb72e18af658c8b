"""The figures: smoothing that spikes do not move, labels that do not overlap, colours that can be distinguished."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from comparison_sweeps import METHODS, PRE, SyntheticMethod, SyntheticRun, runs_of, write_sweep
from siamesenorm.comparison.curve_figures import (
    MOST_POINTS,
    curve_figures,
    difference,
    finite_part,
    smoothed,
    thinned,
)
from siamesenorm.comparison.figure_style import (
    DARK,
    HUES,
    LIGHT,
    THEMES,
    Figure,
    Theme,
    applied,
    render,
    shortened,
    spread,
    styles_of,
)
from siamesenorm.comparison.findings import Findings, find
from siamesenorm.comparison.rate_figures import rate_figures
from siamesenorm.comparison.results import Curve, read_experiment
from siamesenorm.comparison.statistics import noise_band

# Machado, Oliveira and Fernandes (2009), severity 1: what a person without one kind of cone sees, in linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}
JUST_TOLD_APART = 15.0
"""A CIELAB distance that two lines in a figure need; 2.3 is just noticeable side by side."""

Reader = Callable[..., Findings]


def curve(*values: float) -> Curve:
    return Curve(steps=np.arange(1.0, len(values) + 1), values=np.array(values))


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    return lambda runs, **description: find(read_experiment(write_sweep(tmp_path, runs, **description)))


def linear(color: str) -> np.ndarray:
    channels = np.array(to_rgb(color))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    luminances = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (first, second))
    return (luminances[1] + 0.05) / (luminances[0] + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_hues_stand_out_and_are_distinguished_with_any_vision(theme: Theme) -> None:
    assert all(contrast(color, theme.surface) > 3 for color in theme.hues.values())
    assert contrast(theme.ink, theme.surface) > 7 and contrast(theme.muted, theme.surface) > 4.5
    assert contrast(theme.danger, theme.fill) > 4.5
    for matrix in VISION.values():
        for first, second in combinations(theme.hues.values(), 2):
            seen = [lab(np.array(matrix) @ linear(color)) for color in (first, second)]
            assert np.linalg.norm(seen[0] - seen[1]) > JUST_TOLD_APART, (first, second)


def test_every_hue_exists_in_both_themes() -> None:
    assert LIGHT.hues.keys() == DARK.hues.keys() >= set(HUES)


def test_families_share_a_hue_and_differ_by_dash() -> None:
    names = ["pre", "pre + qkv", "post", "deepnorm", "hybridnorm", "hybridnorm-star", "siamese-post-pre", "siamese"]
    styles = styles_of(names)
    assert {styles[name].hue for name in ("pre", "pre + qkv")} == {"ink"}
    assert {styles[name].hue for name in ("siamese", "siamese-post-pre")} == {"green"}
    assert styles["siamese"].dash == (0, ()) != styles["siamese-post-pre"].dash
    assert styles["hybridnorm"].hue == styles["hybridnorm-star"].hue
    assert len({(style.hue, style.dash) for style in styles.values()}) == len(names)


def test_smoothing_follows_the_bulk_and_ignores_a_spike() -> None:
    line = np.linspace(3.0, 2.0, 200)
    spiked = line.copy()
    spiked[100:102] += 5.0
    assert smoothed(curve(*spiked)).values == pytest.approx(line, abs=0.02)
    assert smoothed(curve(*np.full(30, 1.5))).values == pytest.approx(1.5)


def test_long_curves_are_thinned_without_losing_their_extremes() -> None:
    values = np.sin(np.arange(10_000) / 300)
    values[4321], values[8765] = 9.0, -9.0
    thin = thinned(curve(*values))
    assert len(thin.values) <= MOST_POINTS + 2
    assert (thin.values.max(), thin.values.min()) == (9.0, -9.0)
    assert (thin.steps[0], thin.steps[-1]) == (1, 10_000)
    assert len(smoothed(curve(*values)).values) == MOST_POINTS


def test_curves_end_where_numbers_do_and_subtract_where_both_have_steps() -> None:
    assert finite_part(curve(1.0, 2.0, np.nan, 3.0)).values.tolist() == [1.0, 2.0]
    later = Curve(steps=np.array([2.0, 3.0, 4.0]), values=np.array([1.0, 1.0, 1.0]))
    gap = difference(curve(5.0, 6.0, 7.0), later)
    assert (gap.steps.tolist(), gap.values.tolist()) == ([2.0, 3.0], [5.0, 6.0])


def test_labels_keep_their_order_and_distance_and_move_least() -> None:
    assert spread([0.5, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.45, 0.55])
    assert spread([0.9, 0.1, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.9, 0.1, 0.5])
    assert spread([1.0, 1.0, 0.2], 0.1, 0.0, 1.0) == pytest.approx([0.9, 1.0, 0.2])
    generator = np.random.default_rng(0)
    for _ in range(50):
        wanted = generator.random(8)
        placed = np.sort(spread(list(wanted), 0.1, 0.0, 1.0))
        assert np.diff(placed).min() > 0.1 - 1e-9 and placed[0] >= 0 and placed[-1] <= 1 + 1e-9


def test_long_names_are_shortened() -> None:
    assert shortened("siamese-post-pre") == "siamese-post-pre"
    assert shortened("dhc-2:streams=4,dynamic=true + seednorm") == "dhc-2:streams=4,dynamic=…"
    assert shortened("siamese-post-pre identity") == "siamese-post-pre identity"


def figures(found: Findings) -> list[Figure]:
    return [*rate_figures(found), *(f for rate in found.results.learning_rates for f in curve_figures(found, rate))]


def test_the_noise_band_is_that_of_the_baseline_at_its_chosen_rate(read: Reader) -> None:
    found = read(runs_of([PRE, METHODS[-1]], rates=(2e-3, 8e-3), seeds=(0, 1, 2), steps=40))
    noise = found.noise
    assert noise is not None and noise.baseline == "pre"
    assert (noise.low, noise.high) == noise_band(list(found.choices["pre"].losses.values()))
    frontier, sensitivity = rate_figures(found)
    assert "Framed" in frontier.caption and "The band" in sensitivity.caption
    alone = read(runs_of([PRE, METHODS[-1]], rates=(2e-3, 8e-3), steps=40))
    assert alone.noise is None
    assert not any("95 %" in figure.caption for figure in rate_figures(alone))


def texts(svg: bytes) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode())


def test_figures_are_text_with_numbers_intact_and_the_same_every_time(read: Reader) -> None:
    found = read(runs_of([PRE, METHODS[2], METHODS[-1]], rates=(2e-3, 8e-3), steps=60))
    drawn = {figure.name: figure for figure in figures(found)}
    assert list(drawn) == [
        "frontier", "sensitivity", "loss-2e-3", "gradient-norm-2e-3", "loss-8e-3", "gradient-norm-8e-3",
    ]  # fmt: skip
    frontier = render(drawn["frontier"], LIGHT, "svg")
    loss = found.outcomes[2e-3, "pre"].held_out_loss
    assert loss is not None and f"● {loss.mean:.3f}" in texts(frontier)
    assert {"pre", "post", "siamese", "2e-3", "8e-3", "✕ diverged"} <= set(texts(frontier))
    assert {"pre", "siamese", "post ✕", "nothing learned"} <= set(texts(render(drawn["loss-8e-3"], DARK, "svg")))
    assert render(drawn["frontier"], LIGHT, "svg") == frontier != render(drawn["frontier"], DARK, "svg")
    assert render(drawn["sensitivity"], LIGHT, "png").startswith(b"\x89PNG")


CROWDED = [
    SyntheticMethod(label=label, losses=(1.62, 1.6, 1.58, 1.56, 1.55, "spiked 1.57", "rises"))
    for label in ("pre", "siamese", "dhc-2:streams=4,dynamic=true", "dhc-2:streams=8,dynamic=true")
]


@pytest.mark.parametrize(
    ("methods", "rates"),
    [(METHODS, (2e-3, 8e-3, 3e-2)), (CROWDED, (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2))],
    ids=["the papers' methods", "long names at seven rates"],
)
def test_nothing_drawn_leaves_the_figure(
    read: Reader, methods: list[SyntheticMethod], rates: tuple[float, ...]
) -> None:
    drawn = figures(read(runs_of(methods, rates=rates, steps=40)))
    for figure in [*drawn[:3], drawn[-1]]:
        with applied(LIGHT):
            drawing = figure.draw(LIGHT)
            box = drawing.get_tightbbox(FigureCanvasAgg(drawing).get_renderer())
        width, height = drawing.get_size_inches()
        assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02, figure.name


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([SyntheticRun(method=PRE, rate=2e-3, seed=0, wanted=1.6, steps=40)], id="a single run"),
        pytest.param([SyntheticRun(method=PRE, rate=2e-3, seed=0, wanted=1.6, until=2)], id="only two steps"),
        pytest.param(runs_of([METHODS[2]], rates=(8e-3,), steps=40)[:1], id="nothing converged"),
        pytest.param(runs_of([SyntheticMethod(label="siamese", losses=(1.6, 1.5))], steps=40), id="no baseline"),
    ],
)
def test_sparse_sweeps_can_be_drawn(read: Reader, runs: list[SyntheticRun]) -> None:
    for figure in figures(read(runs)):
        assert b"</svg>" in render(figure, LIGHT, "svg")
