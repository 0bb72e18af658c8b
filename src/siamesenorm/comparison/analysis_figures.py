"""Figures of analyses that compare runs: each takes the records of one analysis by the label of their run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from siamesenorm.analysis.stream_terms import mean_of_copies
from siamesenorm.comparison.depth_panels import Line, Panel, draw_panels, draw_rows, finite
from siamesenorm.comparison.figure_style import Figure
from siamesenorm.errors import UserError

Record = Mapping[str, Any]
Records = Mapping[str, Record]
"""Records of one analysis by the label of their run."""

BLOCKS = "depth (blocks)"


def analysis_figures(records: Records, runs: Sequence[str] = ()) -> tuple[Figure, ...]:
    """Return the figures of one analysis of several runs; none where nothing can be drawn.

    `runs` are the labels of all runs of a page, in which each has one hue; those of the records if not given. Raises
    UserError for records of different analyses, or of none.
    """
    names = sorted({str(record["evaluation"]) for record in records.values()})
    if len(names) != 1:
        raise UserError(f"records of {', '.join(names) or 'nothing'}: give those of one analysis")
    make = FIGURES.get(names[0])
    if make is None:
        raise UserError(f"{names[0]} has no figure: give records of {', '.join(FIGURES)}")
    return tuple(make({label: record["results"] for label, record in records.items()}, runs or list(records)))


# --- one function for each analysis


def _magnitude(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
    lines = tuple(
        Line(name=name, run=run, number=number, x=_depths(found), y=[*rms])
        for run, found in results.items()
        for number, (name, rms) in enumerate(_by_stream(run, found["streams"], "rms"))
    )
    panel = Panel(x=BLOCKS, y="RMS of the stream", lines=lines, logarithmic=True)
    yield _figure(
        "hidden-magnitude", "Magnitude of the streams", [panel], runs,
        "RMS over the width, averaged over the tokens of held-out samples: before each sublayer, after the norms on "
        "the stream, and at the end before the final norms. Logarithmic axis. Numbered streams are averaged.",
    )  # fmt: skip


def _share(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
    kinds = {"gains": "share by gains", "activations": "share by activations"}
    panels = []
    for kind, label in kinds.items():
        lines = []
        for run, found in results.items():
            shown = [(name, values) for name, values in found[kind].items() if any(v is not None for v in values)]
            # Of two shares the second is what is left of 1.
            for number, (name, values) in enumerate(shown[:1] if len(shown) == 2 else shown):
                lines.append(Line(name=f"{run} {name}", run=run, number=number, x=_places(found, values), y=values))
        if lines:
            panels.append(Panel(x=BLOCKS, y=label, lines=tuple(lines), share=True))
    if panels:
        yield _figure(
            "stream-share", "Share of the streams in the input", panels, runs,
            "Share of a stream in the sum that each sublayer reads; of two streams the first is drawn, the other has "
            "the rest. By learned gains: mean |gain| with which it enters. By activations: RMS of what it adds.",
        )  # fmt: skip


def _fusion(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
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


def _lens(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
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
        "logit-lens", "Logit lens", panels, runs,
        "The streams after so many blocks, through the final norms and the head: held-out loss, and the share of the "
        "model's own most likely predictions.",
    )  # fmt: skip
    panels = [
        Panel(x=BLOCKS, y=f"loss{unit}", lines=tuple(alone["loss"])),
        Panel(x=BLOCKS, y="agreement", lines=tuple(alone["agreement"]), share=True),
    ]
    if alone["loss"]:
        yield _figure(
            "logit-lens-streams", "Logit lens of single streams", panels, runs,
            "The same of each stream alone, through its own final norm and the output norm, the others absent.",
        )  # fmt: skip


def _pruning(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
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
        "pruning", "Loss without blocks", panels, runs,
        "Rise of the held-out loss without the last n blocks, and without one. Lines: the streams skip the "
        "blocks. Dotted: their sublayers write 0, norms on the streams still apply.",
    )  # fmt: skip


def _depth(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
    lines = []
    for run, found in results.items():
        influence = {name: {"influence": values} for name, values in found["influence"].items()}
        for number, (name, values) in enumerate(_by_stream(run, influence, "influence")):
            lines.append(Line(name=name, run=run, number=number, x=range(1, len(values) + 1), y=values))
    blocks = "; ".join(f"{run} {found['effective_blocks']:.1f} of {found['blocks']}" for run, found in results.items())
    yield _figure(
        "effective-depth", "Influence of the blocks",
        [Panel(x="block", y="1 \N{MINUS SIGN} cosine", lines=tuple(lines), zero=True)], runs,
        "Mean of 1 \N{MINUS SIGN} cosine between a stream before and after each block. Effective blocks by the loss: "
        f"{blocks}.",
    )  # fmt: skip


def _outliers(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
    ratios, first = [], []
    for run, found in results.items():
        for number, (name, values) in enumerate(_by_stream(run, found["streams"], "ratio")):
            ratios.append(Line(name=name, run=run, number=number, x=_places(found, values), y=values))
        attention = found["attention"]
        if attention:
            places = range(1, len(attention["first"]) + 1)
            first.append(Line(name=run, run=run, x=places, y=attention["first"]))
            first.append(Line(name="uniform", run="", x=places, y=attention["uniform"], dotted=True))
    panels = [Panel(x=BLOCKS, y="largest / median", lines=tuple(ratios), logarithmic=True)]
    if first:
        panels.append(Panel(x="attention layer", y="attention to first token", lines=_distinct(first), zero=True))
    yield _figure(
        "outliers", "Outliers and attention sinks", panels, runs,
        "Above: the largest |x| of a sample over the median, for each stream (massive activations reach 1,000). Below: "
        "the mean share of the first token in the attention of later ones; dotted: if attention were uniform.",
    )  # fmt: skip


def _quantisation(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
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


def _jacobians(results: Records, runs: Sequence[str]) -> Iterator[Figure]:
    def over_depth(values: Callable[[Record], Sequence[float]]) -> tuple[Line, ...]:
        return tuple(
            Line(name=run, run=run, x=_places(found, values(found)), y=values(found)) for run, found in results.items()
        )

    panels = [
        Panel(x=BLOCKS, y="largest singular value", lines=over_depth(lambda r: r["largest"]), logarithmic=True),
        Panel(x=BLOCKS, y="RMS to the end", lines=over_depth(lambda r: r["to_end"]["rms"]), logarithmic=True),
    ]
    checked = [max(found["identity"].values()) for found in results.values() if found["identity"]]
    identity = f" The formula of Eq. 8 holds to {max(checked):.0e}." if checked else ""
    yield _figure(
        "jacobians", "Singular values of the transitions", panels, runs,
        "Above: the largest singular value of each sublayer's transition of the streams. Below: root mean square "
        f"of the singular values of the product of all later transitions. Logarithmic axes.{identity}",
    )  # fmt: skip


LASTS, SINGLES = ("last_removed", "last_zeroed"), ("removed", "zeroed")
FIGURES: dict[str, Callable[[Records, Sequence[str]], Iterator[Figure]]] = {
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
    return [*_places(found, found["sublayers"]), found["blocks"]]


def _places(found: Record, values: Sequence[object]) -> list[float]:
    """Return the depth in blocks before each of the values, one for each sublayer."""
    return [found["blocks"] * k / len(values) for k in range(len(values))]


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


def _figure(name: str, title: str, panels: Sequence[Panel], runs: Sequence[str], caption: str) -> Figure:
    ends = [f"{line.name} {_text(line.y)}" for panel in panels[:1] for line in panel.lines if not line.dotted]
    return Figure(
        name=name,
        title=title,
        caption=caption,
        alternative="; ".join(ends),
        draw=lambda theme: draw_panels(panels, runs, title, theme),
    )


def _text(values: Sequence[float | None]) -> str:
    present = finite(values)
    return f"from {present[0]:.3g} to {present[-1]:.3g}" if len(present) else "not finite"
