"""Figures of analyses that compare runs: each takes the records of one analysis by the label of their run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import blended_transform_factory

from siamesenorm.analysis.stream_terms import mean_of_copies
from siamesenorm.comparison import figure_style
from siamesenorm.comparison.figure_style import CurveLabel, Figure, MethodStyle, Theme
from siamesenorm.errors import UserError

Record = Mapping[str, Any]
Records = Mapping[str, Record]
"""Records of one analysis by the label of their run."""

LEFT = 0.175
PANEL = 2.35
"""Height of a panel in inches."""
DOTTED = (0.0, (1.0, 2.0))
BLOCKS = "depth (blocks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: its name, its run, which of the run's curves it is, its points, and whether a label names it."""

    name: str
    run: str
    number: int = 0
    x: Sequence[float]
    y: Sequence[float | None]
    dotted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes: its labels, its lines, and whether the height is logarithmic."""

    x: str
    y: str
    lines: tuple[Line, ...]
    logarithmic: bool = False
    zero: bool = False
    """Whether a line marks the height 0."""
    share: bool = False
    """Whether the heights are parts of 1: the axis has all of them."""


def analysis_figures(records: Records) -> tuple[Figure, ...]:
    """Return the figures of one analysis of several runs; none where nothing can be drawn.

    Raises UserError for records of different analyses, or of none.
    """
    names = sorted({str(record["evaluation"]) for record in records.values()})
    if len(names) != 1:
        raise UserError(f"records of {', '.join(names) or 'nothing'}: give those of one analysis")
    make = FIGURES.get(names[0])
    if make is None:
        raise UserError(f"{names[0]} has no figure: give records of {', '.join(FIGURES)}")
    return tuple(make({label: record["results"] for label, record in records.items()}))


# --- one function for each analysis


def _magnitude(results: Records) -> Iterator[Figure]:
    lines = tuple(
        Line(name=name, run=run, number=number, x=_depths(found), y=[*rms])
        for run, found in results.items()
        for number, (name, rms) in enumerate(_by_stream(run, found["streams"], "rms"))
    )
    panel = Panel(x=BLOCKS, y="RMS of the stream", lines=lines, logarithmic=True)
    yield _figure(
        "hidden-magnitude", "Magnitude of the streams", [panel], results,
        "RMS over the width, averaged over the tokens of held-out samples: before each sublayer, after the norms on "
        "the stream, and at the end before the final norms. Logarithmic axis. Numbered streams are averaged.",
    )  # fmt: skip


def _share(results: Records) -> Iterator[Figure]:
    kinds = {"gains": "share by gains", "activations": "share by activations"}
    panels = []
    for kind, label in kinds.items():
        lines = []
        for run, found in results.items():
            shown = [(name, values) for name, values in found[kind].items() if any(v is not None for v in values)]
            # Of two shares the second is what is left of 1.
            for number, (name, values) in enumerate(shown[:1] if len(shown) == 2 else shown):
                steps = [found["blocks"] * k / len(values) for k in range(len(values))]
                lines.append(Line(name=f"{run} {name}", run=run, number=number, x=steps, y=values))
        if lines:
            panels.append(Panel(x=BLOCKS, y=label, lines=tuple(lines), share=True))
    if panels:
        yield _figure(
            "stream-share", "Share of the streams in the input", panels, results,
            "Share of a stream in the sum that each sublayer reads; of two streams the first is drawn, the other has "
            "the rest. By learned gains: mean |gain| with which it enters. By activations: RMS of what it adds.",
        )  # fmt: skip


def _fusion(results: Records) -> Iterator[Figure]:
    rows = {
        f"{run} {name}": {"share": found["shares"][name], "gain": (found["gains"] or {}).get(name)}
        for run, found in results.items()
        for name in found["shares"]
    }
    yield Figure(
        name="fusion",
        title="Weights of the final fusion",
        caption="Share of each stream's term in the final sum, by its RMS, and the mean gain of its last norm.",
        alternative="; ".join(f"{name} {row['share']:.0%}" for name, row in rows.items()),
        draw=lambda theme: draw_rows(rows, "share, gain", "Weights of the final fusion", theme),
    )


def _lens(results: Records) -> Iterator[Figure]:
    whole: dict[str, list[Line]] = {"loss": [], "agreement": []}
    alone: dict[str, list[Line]] = {"loss": [], "agreement": []}
    for run, found in results.items():
        for kind, lines in whole.items():
            lines.append(Line(name=run, run=run, x=range(len(found[kind])), y=found[kind]))
        for kind, lines in alone.items():
            by_depth = {name: view for name, view in found["streams"].items() if len(view[kind]) > 1}
            for number, (name, values) in enumerate(_by_stream(run, by_depth, kind)):
                lines.append(Line(name=name, run=run, number=number, x=range(len(values)), y=values))
    unit = _units(results)
    panels = [
        Panel(x=BLOCKS, y=f"loss{unit}", lines=tuple(whole["loss"])),
        Panel(x=BLOCKS, y="agreement", lines=tuple(whole["agreement"]), share=True),
    ]
    yield _figure(
        "logit-lens", "Logit lens", panels, results,
        "The streams after so many blocks, through the final norms and the head: held-out loss, and the share of the "
        "model's own most likely predictions.",
    )  # fmt: skip
    panels = [
        Panel(x=BLOCKS, y=f"loss{unit}", lines=tuple(alone["loss"])),
        Panel(x=BLOCKS, y="agreement", lines=tuple(alone["agreement"]), share=True),
    ]
    if alone["loss"]:
        yield _figure(
            "logit-lens-streams", "Logit lens of single streams", panels, results,
            "The same of each stream alone, through its own final norm and the output norm, the others absent.",
        )  # fmt: skip


def _pruning(results: Records) -> Iterator[Figure]:
    last: list[Line] = []
    single: list[Line] = []
    for run, found in results.items():
        rises = {kind: [loss - found["loss"] for loss in found[kind]] for kind in (*LASTS, *SINGLES)}
        for kinds, lines, first in ((LASTS, last, 0), (SINGLES, single, 1)):
            for number, kind in enumerate(kinds):
                steps = range(first, first + len(rises[kind]))
                lines.append(Line(name=run, run=run, number=number, x=steps, y=rises[kind], dotted=number > 0))
    unit = _units(results)
    panels = [
        Panel(x="number of last blocks left out", y=f"rise of the loss{unit}", lines=tuple(last), zero=True),
        Panel(x="block left out", y=f"rise of the loss{unit}", lines=tuple(single), zero=True),
    ]
    yield _figure(
        "pruning", "Loss without blocks", panels, results,
        "Rise of the held-out loss without the last n blocks, and without one. Lines: blocks are removed, the streams "
        "pass by. Dotted: their sublayers write 0, norms on the streams act.",
    )  # fmt: skip


def _depth(results: Records) -> Iterator[Figure]:
    lines = []
    for run, found in results.items():
        influence = {name: {"influence": values} for name, values in found["influence"].items()}
        for number, (name, values) in enumerate(_by_stream(run, influence, "influence")):
            lines.append(Line(name=name, run=run, number=number, x=range(1, len(values) + 1), y=values))
    blocks = "; ".join(f"{run} {found['effective_blocks']:.1f} of {found['blocks']}" for run, found in results.items())
    yield _figure(
        "effective-depth", "Influence of the blocks",
        [Panel(x="block", y="1 \N{MINUS SIGN} cosine", lines=tuple(lines), zero=True)], results,
        "Mean of 1 \N{MINUS SIGN} cosine between a stream before and after each block. Effective blocks by the loss: "
        f"{blocks}.",
    )  # fmt: skip


def _outliers(results: Records) -> Iterator[Figure]:
    ratios, first = [], []
    for run, found in results.items():
        for number, (name, values) in enumerate(_by_stream(run, found["streams"], "ratio")):
            steps = [found["blocks"] * k / len(values) for k in range(len(values))]
            ratios.append(Line(name=name, run=run, number=number, x=steps, y=values))
        attention = found["attention"]
        if attention:
            places = range(1, len(attention["first"]) + 1)
            first.append(Line(name=run, run=run, x=places, y=attention["first"]))
            first.append(Line(name="uniform", run="", x=places, y=attention["uniform"], dotted=True))
    panels = [Panel(x=BLOCKS, y="largest / median", lines=tuple(ratios), logarithmic=True)]
    if first:
        panels.append(Panel(x="attention layer", y="attention to first token", lines=_distinct(first), zero=True))
    yield _figure(
        "outliers", "Outliers and attention sinks", panels, results,
        "Above: the largest |x| of a sample over the median, for each stream (massive activations reach 1,000). Below: "
        "the mean share of the first token in the attention of later ones; dotted: if attention were uniform.",
    )  # fmt: skip


def _quantisation(results: Records) -> Iterator[Figure]:
    rows = {
        run: {scheme.upper(): each["rise"] for scheme, each in found["schemes"].items()}
        for run, found in results.items()
    }
    yield Figure(
        name="quantisation",
        title="Loss after rounding",
        caption="Rise of the held-out loss where the linear layers of the blocks compute with so "
        "many bits of weights (W) and activations (A).",
        alternative="; ".join(
            f"{run} {', '.join(f'{k} {v:+.3g}' for k, v in row.items())}" for run, row in rows.items()
        ),
        draw=lambda theme: draw_rows(rows, f"rise of the loss{_units(results)}", "Loss after rounding", theme),
    )


def _jacobians(results: Records) -> Iterator[Figure]:
    def over_depth(values: Callable[[Record], Sequence[float]]) -> tuple[Line, ...]:
        return tuple(
            Line(
                name=run,
                run=run,
                x=[found["blocks"] * k / len(values(found)) for k in range(len(values(found)))],
                y=values(found),
            )
            for run, found in results.items()
        )

    panels = [
        Panel(x=BLOCKS, y="largest singular value", lines=over_depth(lambda r: r["largest"]), logarithmic=True),
        Panel(x=BLOCKS, y="RMS to the end", lines=over_depth(lambda r: r["to_end"]["rms"]), logarithmic=True),
    ]
    checked = [max(found["identity"].values()) for found in results.values() if found["identity"]]
    identity = f" The formula of Eq. 8 holds to {max(checked):.0e}." if checked else ""
    yield _figure(
        "jacobians", "Singular values of the transitions", panels, results,
        "Above: the largest singular value of each sublayer's transition of the streams. Below: root mean square of "
        f"those of all that follow, by which gradients reach the depth. Logarithmic axes.{identity}",
    )  # fmt: skip


LASTS, SINGLES = ("last_removed", "last_zeroed"), ("removed", "zeroed")
FIGURES: dict[str, Callable[[Records], Iterator[Figure]]] = {
    "hidden-magnitude": _magnitude,
    "effective-depth": _depth,
    "fusion": _fusion,
    "quantisation": _quantisation,
    "stream-share": _share,
    "logit-lens": _lens,
    "pruning": _pruning,
    "outliers": _outliers,
    "jacobians": _jacobians,
}
"""The figures of each analysis, in the order of a page: those of one height side by side."""


# --- curves


def _depths(found: Record) -> list[float]:
    """Return the depth in blocks before each sublayer, and that of the end."""
    count = len(found["sublayers"])
    return [found["blocks"] * k / count for k in range(count + 1)]


def _by_stream(run: str, streams: Record, quantity: str) -> list[tuple[str, list[float | None]]]:
    """Return the curves of a run's streams by label, numbered streams averaged; a single one has the run's name."""
    length = max((len(each[quantity]) for each in streams.values()), default=0)
    places = [
        mean_of_copies({name: each[quantity][k] for name, each in streams.items() if each[quantity][k] is not None})
        for k in range(length)
    ]
    names = list(dict.fromkeys(name for place in places for name in place))
    return [(f"{run} {name}" if len(names) > 1 else run, [place.get(name) for place in places]) for name in names]


def _units(results: Records) -> str:
    """Return the unit of the losses in brackets; nothing where runs differ in it."""
    units = {found["unit"] for found in results.values()}
    return f" ({units.pop()})" if len(units) == 1 else ""


def _distinct(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the lines without repetitions of the same curve under the same name."""
    return tuple({(line.name, tuple(line.y)): line for line in lines}.values())


def _figure(name: str, title: str, panels: Sequence[Panel], results: Records, caption: str) -> Figure:
    ends = [f"{line.name} {_text(line.y)}" for panel in panels[:1] for line in panel.lines if not line.dotted]
    return Figure(
        name=name,
        title=title,
        caption=caption,
        alternative="; ".join(ends),
        draw=lambda theme: draw_panels(panels, list(results), title, theme),
    )


def _text(values: Sequence[float | None]) -> str:
    finite = _finite(values)
    return f"from {finite[0]:.3g} to {finite[-1]:.3g}" if len(finite) else "not finite"


def _finite(values: Sequence[Any]) -> Any:
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    return numbers[np.isfinite(numbers)]


def draw_panels(panels: Sequence[Panel], runs: Sequence[str], title: str, theme: Theme) -> Drawing:
    """Draw panels one above the other, each with the names of its curves beside it."""
    hues = _hues(runs)
    names = [line.name for panel in panels for line in panel.lines]
    height = PANEL * len(panels) + 0.35
    drawing = Drawing(figsize=(figure_style.WIDTH, height))
    all_axes = drawing.subplots(len(panels), 1, squeeze=False)[:, 0]
    drawing.subplots_adjust(
        left=LEFT, right=1 - figure_style.label_room(names), top=1 - 0.36 / height, bottom=0.48 / height, hspace=0.3
    )
    all_axes[0].set_title(title)
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, hues, theme)
    return drawing


def _draw_panel(axes: Axes, panel: Panel, hues: Mapping[str, str], theme: Theme) -> None:
    labels: dict[str, CurveLabel] = {}
    for line in panel.lines:
        style = _style(line, hues)
        values = np.array([np.nan if value is None else float(value) for value in line.y])
        axes.plot(
            np.asarray(line.x, dtype=float), values, color=style.color(theme), linewidth=style.width,
            linestyle=style.dash, marker="o", markersize=2.2 if line.dotted else 3.0,
        )  # fmt: skip
        finite = _finite(line.y)
        if len(finite):
            label = CurveLabel(height=float(finite[-1]), text=figure_style.shortened(line.name), style=style)
            labels.setdefault(line.name, label)
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    if panel.zero:
        axes.axhline(0, color=theme.muted, linewidth=0.8, zorder=1.5)
    if panel.share:
        axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.yaxis.set_label_coords(0.048, 0.5, blended_transform_factory(axes.figure.transFigure, axes.transAxes))
    figure_style.label_ends(axes, list(labels.values()), theme)


def _hues(runs: Sequence[str]) -> dict[str, str]:
    """Return a hue for each run: `pre` and `siamese` have theirs in every figure, others the next ones."""
    others = iter([hue for _ in range(1 + len(runs) // len(figure_style.HUES)) for hue in figure_style.HUES])
    return {run: figure_style.RESERVED_HUES.get(run) or next(others) for run in runs}


def _style(line: Line, hues: Mapping[str, str]) -> MethodStyle:
    """Return the style of a line: the hue of its run, and a dash by its place among the run's curves."""
    dash = DOTTED if line.dotted else figure_style.DASHES[line.number % len(figure_style.DASHES)]
    return MethodStyle(hue=hues.get(line.run), dash=dash, marker="", width=1.0 if line.dotted else 1.6)


# --- rows


def draw_rows(rows: Mapping[str, Mapping[str, float | None]], label: str, title: str, theme: Theme) -> Drawing:
    """Draw a row for every name, with a mark for each of its values; a legend names the marks."""
    series = list(dict.fromkeys(name for row in rows.values() for name in row))
    names = [figure_style.shortened(name) for name in rows]
    height = 1.15 + 0.27 * len(rows)
    drawing = Drawing(figsize=(figure_style.WIDTH, height))
    axes = drawing.subplots()
    drawing.subplots_adjust(
        left=figure_style.name_room(names) + 0.03, right=0.96, top=1 - 0.62 / height, bottom=0.46 / height
    )
    hues = [theme.hues[hue] for hue in ("green", *figure_style.HUES)]
    handles = []
    for index, name in enumerate(series):
        marker, color = figure_style.MARKERS[index % len(figure_style.MARKERS)], hues[index % len(hues)]
        points = [(value, place) for place, row in enumerate(rows.values()) if (value := row.get(name)) is not None]
        axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, markersize=6, color=color, clip_on=False)
        handles.append(Line2D([], [], linestyle="", marker=marker, markersize=6, color=color, label=name))
    axes.axvline(0, color=theme.muted, linewidth=0.8)
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)
    drawing.suptitle(title, x=0.02, y=1 - 0.06 / height, ha="left", va="top", fontsize=11, fontweight="bold")
    drawing.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.01, 1 - 0.26 / height), ncols=len(series), frameon=False,
        fontsize=8.5, handletextpad=0.2, columnspacing=1.2, labelcolor=theme.muted,
    )  # fmt: skip
    return drawing
