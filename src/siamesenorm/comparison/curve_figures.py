"""The figures of training: loss, its difference to the baseline, and gradient norms, labelled at the curves' ends.

Curves are those of one selection seed: on one seed all methods see the same data in the same order, so that the data
cause no differences. Curves are smoothed, and thinned without losing spikes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from siamesenorm.comparison import figure_style, formatting
from siamesenorm.comparison.figure_style import CurveLabel, Figure, MethodStyle, Theme
from siamesenorm.comparison.findings import Findings
from siamesenorm.comparison.results import DIVERGED, NOT_LEARNED, SPIKED, Curve, FloatArray, Record, RunResult

HEIGHT = 4.5
LEFT = 0.175
FLOOR = "nothing learned"
DOTTED = (0.0, (1.0, 2.0))
FLOOR_STYLE = MethodStyle(hue=None, dash=DOTTED, marker="", width=0.9)
STREAM_HUES = ("green", "ink", *figure_style.HUES)
SHORTEST = 4
"""The fewest finite losses that make a curve."""
SMOOTHING_FRACTION = 0.05
MOST_POINTS = 400

Runs = Mapping[str, RunResult]
Styles = Mapping[str, MethodStyle]


def curve_figures(findings: Findings, rate: float) -> tuple[Figure, ...]:
    """Return the figures of training at a learning rate: loss and gradient norm; none where no run has a curve."""
    results = findings.results
    seed = min(results.plan.selection_seeds, default=0)
    runs = {
        run.method: run
        for run in results.runs
        if run.learning_rate == rate and run.seed == seed and len(finite_part(run.losses).steps) >= SHORTEST
    }
    if not runs:
        return ()
    baselines = {each.method: each.baseline for each in reversed(results.plan.comparisons)}
    references = {method: runs[base] for method in runs if (base := baselines.get(method)) in runs}
    styles, at = figure_style.styles_of(results.methods), formatting.rate(rate)
    smoothing = f"Seed {seed}, smoothed over 5 % of the steps, every step behind it"
    below = "Below: the difference to the baseline at the same step, on the same data. " if references else ""
    outcomes = "; ".join(outcome.description for outcome in findings.at(rate))
    losses = Figure(
        name=f"loss-{at}",
        title=f"Training loss at {at}",
        caption=f"{smoothing}. {below}Dotted: the loss of a model that has learned nothing. ✕ marks where a "
        "run diverged, ▲ where it spiked.",
        alternative=outcomes,
        draw=lambda theme: draw_losses(runs, references, styles, theme, f"Training loss at {at}"),
    )
    norms = Figure(
        name=f"gradient-norm-{at}",
        title=f"Gradient norm at {at}",
        caption=f"Norm of the whole gradient before clipping. {smoothing}; logarithmic axis.",
        alternative=outcomes,
        draw=lambda theme: draw_gradient_norms(runs, styles, theme, f"Gradient norm at {at}"),
    )
    return losses, norms


def stream_figures(run: RunResult) -> tuple[Figure, ...]:
    """Return the figure of the streams of a run; none where the stream monitor did not record them."""
    if not run.streams:
        return ()
    first, last = f"{run.streams[0]['step']:,}", f"{run.streams[-1]['step']:,}"
    depths = _rms_by_depth(run.streams[-1]).items()
    streams = Figure(
        name="streams",
        title="Residual streams",
        caption="RMS of every stream before a sublayer adds to it. Above: before the last one, over the steps. "
        f"Below: over the depth, at step {last}; thin and dotted: at step {first}.",
        alternative=f"At step {last}: "
        + "; ".join(f"{name} from {rms[0]:.3g} to {rms[-1]:.3g} over the depth" for name, rms in depths),
        draw=lambda theme: draw_streams(run, theme),
    )
    return (streams,)


def draw_losses(runs: Runs, references: Runs, styles: Styles, theme: Theme, title: str) -> Drawing:
    """Draw training losses and, below, their differences to the runs of their baselines."""
    drawing, panels = _new_drawing([*runs, FLOOR], ratios=(1.25, 1) if references else (1,))
    axes = panels[0]
    axes.set_title(title)
    smooth = {method: smoothed(finite_part(run.losses)) for method, run in runs.items()}
    for method, run in runs.items():
        _draw_curve(axes, finite_part(run.losses), smooth[method], styles[method], theme)
    floor = next((run.floor for run in runs.values() if run.floor is not None), None)
    axes.set_xlim(0, max(run.steps for run in runs.values()))
    axes.set_ylim(*_loss_range([smooth[m] for m in runs if not runs[m].diverged] or list(smooth.values()), floor))
    _label_height(axes, f"loss ({_unit(runs)})")
    labels = []
    for method, run in runs.items():
        _mark_verdict(axes, run, smooth[method], styles[method], theme)
        last = float(smooth[method].values[-1])
        labels.append(CurveLabel(height=last, text=_name(run, method), style=styles[method]))
    if floor is not None:
        axes.axhline(floor, color=theme.muted, linewidth=FLOOR_STYLE.width, linestyle=DOTTED)
        labels.append(CurveLabel(height=floor, text=FLOOR, style=FLOOR_STYLE))
    figure_style.label_ends(axes, labels, theme)
    if references:
        _draw_differences(panels[1], runs, references, styles, theme)
    return drawing


def draw_gradient_norms(runs: Runs, styles: Styles, theme: Theme, title: str) -> Drawing:
    """Draw gradient norms on a logarithmic axis."""
    drawing, (axes,) = _new_drawing(runs)
    figure_style.scale_logarithmically(axes)
    axes.set_title(title)
    _label_height(axes, "gradient norm")
    labels = []
    for method, run in runs.items():
        norms = finite_part(run.gradient_norms)
        norms = norms.part(norms.values > 0)
        if len(norms.steps) < SHORTEST:
            continue
        logarithm = smoothed(Curve(steps=norms.steps, values=np.log(norms.values)))
        smooth = Curve(steps=logarithm.steps, values=np.exp(logarithm.values))
        _draw_curve(axes, norms, smooth, styles[method], theme)
        labels.append(CurveLabel(height=float(smooth.values[-1]), text=_name(run, method), style=styles[method]))
    axes.set_xlim(0, max(run.steps for run in runs.values()))
    figure_style.label_ends(axes, labels, theme)
    return drawing


def draw_streams(run: RunResult, theme: Theme) -> Drawing:
    """Draw the RMS of every stream over the steps, before the last sublayer, and below over the depth."""
    steps = np.array([float(record["step"]) for record in run.streams])
    first, last = _rms_by_depth(run.streams[0]), _rms_by_depth(run.streams[-1])
    styles = {
        name: MethodStyle(hue=STREAM_HUES[index % len(STREAM_HUES)], dash=figure_style.DASHES[0], marker="o", width=1.6)
        for index, name in enumerate(last)
    }
    drawing, (above, below) = _new_drawing(last, ratios=(1, 1), share_steps=False)
    labels: dict[Axes, list[CurveLabel]] = {above: [], below: []}
    for name, style in styles.items():
        over_steps = np.array([_rms_by_depth(record)[name][-1] for record in run.streams])
        depth = np.arange(1.0, len(last[name]) + 1)
        _draw_curve(above, None, Curve(steps=steps, values=over_steps), style, theme)
        below.plot(depth, first[name], color=style.color(theme), linewidth=0.9, linestyle=DOTTED)
        _draw_curve(below, None, Curve(steps=depth, values=last[name]), style, theme)
        for axes, values in ((above, over_steps), (below, last[name])):
            labels[axes].append(CurveLabel(height=float(values[-1]), text=figure_style.shortened(name), style=style))
    above.set_title("Residual streams")
    above.set_xlim(0, run.steps)
    below.set_xlim(1, max(map(len, last.values())))
    below.set_xlabel("sublayer")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes, at_ends in labels.items():
        _label_height(axes, "RMS")
        figure_style.label_ends(axes, at_ends, theme)
    return drawing


def _rms_by_depth(record: Record) -> dict[str, FloatArray]:
    """Return the RMS of every stream before each sublayer."""
    values: dict[str, list[float]] = {}
    for sublayer in record["sublayers"].values():
        for name, measured in sublayer["streams"].items():
            values.setdefault(name, []).append(float(measured["rms"]))
    return {name: np.array(rms) for name, rms in values.items()}


def _new_drawing(
    names: Iterable[str], ratios: Sequence[float] = (1,), *, share_steps: bool = True
) -> tuple[Drawing, list[Axes]]:
    """Return a drawing with panels over the steps, one above the other, and room for the names of curves."""
    drawing = Drawing(figsize=(figure_style.WIDTH, HEIGHT))
    panels = drawing.subplots(len(ratios), 1, sharex=share_steps, squeeze=False, height_ratios=ratios)[:, 0]
    space = 0.13 if share_steps else 0.42
    drawing.subplots_adjust(left=LEFT, right=1 - figure_style.label_room(names), top=0.92, bottom=0.1, hspace=space)
    panels[-1 if share_steps else 0].set_xlabel("step")
    return drawing, list(panels)


def _draw_differences(axes: Axes, runs: Runs, references: Runs, styles: Styles, theme: Theme) -> None:
    """Draw loss minus reference; the axis shows the runs that did not diverge, after the first fifth of the steps."""
    labels, shown = [], [0.0]
    for method, reference in references.items():
        run = runs[method]
        gap = smoothed(difference(finite_part(run.losses), finite_part(reference.losses)))
        if not len(gap.steps):
            continue
        _draw_curve(axes, None, gap, styles[method], theme)
        if not (run.diverged or reference.diverged):
            shown.extend(gap.values[gap.steps > 0.2 * run.steps])
            last = float(gap.values[-1])
            labels.append(CurveLabel(height=last, text=formatting.signed(last, 3), style=styles[method]))
    axes.axhline(0, color=theme.ink, linewidth=0.8)
    low, high = min(shown), max(shown)
    margin = 0.08 * (high - low) or 0.05
    axes.set_ylim(low - margin, high + margin)
    _label_height(axes, f"difference ({_unit(runs)})")
    figure_style.label_ends(axes, labels, theme)


def _draw_curve(axes: Axes, raw: Curve | None, smooth: Curve, style: MethodStyle, theme: Theme) -> None:
    if raw is not None:
        thin = thinned(raw)
        axes.plot(thin.steps, thin.values, color=style.color(theme), linewidth=0.5, alpha=0.22, zorder=1.5)
    axes.plot(
        smooth.steps, smooth.values, color=style.color(theme), linewidth=style.width, linestyle=style.dash, zorder=2.5
    )


def _mark_verdict(axes: Axes, run: RunResult, smooth: Curve, style: MethodStyle, theme: Theme) -> None:
    """Mark the steps where the run diverged and spiked, at the edge of the axes where that is outside them."""
    if run.verdict is None:
        return
    marks = [(step, "^") for step in run.verdict.spikes if run.word == SPIKED]
    if run.verdict.divergence_step is not None:
        marks.append((run.verdict.divergence_step, "X"))
    for step, marker in marks:
        height = np.clip(np.interp(step, smooth.steps, smooth.values), *axes.get_ylim())
        axes.plot(
            step, height, marker=marker, markersize=7, color=style.color(theme), markeredgecolor=theme.surface,
            markeredgewidth=0.8, clip_on=False, zorder=4,
        )  # fmt: skip


def _label_height(axes: Axes, text: str) -> None:
    """Label the vertical axis at the figure's edge, whatever the width of its numbers."""
    axes.set_ylabel(text)
    axes.yaxis.set_label_coords(0.048, 0.5, blended_transform_factory(axes.figure.transFigure, axes.transAxes))


def _loss_range(curves: Sequence[Curve], floor: float | None) -> tuple[float, float]:
    """Return the axis that shows the curves from a tenth of the steps on, and the floor."""
    known = [] if floor is None else [floor]
    low = min([*(float(curve.values.min()) for curve in curves), *known])
    high = max([*(float(curve.values[int(0.1 * len(curve.values)) :].max()) for curve in curves), *known])
    return low - 0.05 * (high - low), high + 0.16 * (high - low)


def _name(run: RunResult, method: str) -> str:
    mark = {DIVERGED: " ✕", NOT_LEARNED: " ◇", SPIKED: " *"}.get(run.word or "", "" if run.complete else " ○")
    return f"{figure_style.shortened(method)}{mark}"


def _unit(runs: Runs) -> str:
    return next(iter(runs.values())).unit


def finite_part(curve: Curve) -> Curve:
    """Return the curve up to the step before its first value that is not finite."""
    broken = np.flatnonzero(~np.isfinite(curve.values))
    return curve.part(slice(int(broken[0]) if len(broken) else None))


def smoothed(curve: Curve) -> Curve:
    """Return the curve of midmeans over 5 % of the steps, at 400 steps or fewer: spikes do not move it.

    A midmean is the mean of the middle half of a window; at the ends the window is cut, not padded.
    """
    length = len(curve.values)
    reach = max(1, round(SMOOTHING_FRACTION * length / 2))
    places = np.unique(np.linspace(0, length - 1, min(length, MOST_POINTS)).round().astype(int))
    windows = [np.sort(curve.values[max(0, place - reach) : place + reach + 1]) for place in places]
    values = [np.mean(window[len(window) // 4 : len(window) - len(window) // 4]) for window in windows]
    return Curve(steps=curve.steps[places], values=np.array(values))


def thinned(curve: Curve) -> Curve:
    """Return at most about 400 points: the lowest and the highest of each stretch, so that no spike is lost."""
    length = len(curve.values)
    if length <= MOST_POINTS:
        return curve
    edges = np.linspace(0, length, MOST_POINTS // 2 + 1).astype(int)
    kept: set[int] = {0, length - 1}
    for start, end in pairwise(edges):
        stretch = curve.values[start:end]
        kept |= {int(start + np.argmin(stretch)), int(start + np.argmax(stretch))}
    return curve.part(sorted(kept))


def difference(curve: Curve, reference: Curve) -> Curve:
    """Return `curve - reference` at the steps that both have."""
    steps, own, other = np.intersect1d(curve.steps, reference.steps, assume_unique=True, return_indices=True)
    return Curve(steps=steps, values=curve.values[own] - reference.values[other])
