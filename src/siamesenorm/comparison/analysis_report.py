"""The report of analyses of several trained models: their figures, a table of their numbers, and definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from siamesenorm.analysis.analyses import ANALYSES
from siamesenorm.analysis.stream_terms import mean_of_copies
from siamesenorm.comparison import formatting
from siamesenorm.comparison.analysis_figures import FIGURES, analysis_figures
from siamesenorm.comparison.curve_figures import draw_gradient_norms
from siamesenorm.comparison.figure_style import DASHES, Figure, MethodStyle, hues_of
from siamesenorm.comparison.formatting import NOTHING
from siamesenorm.comparison.report_parts import (
    Code,
    Column,
    Entry,
    Gallery,
    Report,
    Row,
    RowGroup,
    Statements,
    Table,
    statements,
)
from siamesenorm.comparison.results import RunResult
from siamesenorm.files import encode_json

Record = Mapping[str, Any]
Numbers = Iterator[tuple[str, str]]
"""Quantities of an analysis with their values as text."""


def analysis_report(
    records: Mapping[str, Sequence[Record]],
    runs: Mapping[str, RunResult],
    *,
    data: str = "held-out samples",
    command: str = "",
    refused: Mapping[str, str] | None = None,
) -> Report:
    """Return the report of analyses on `data`, records by the label of their model; `runs` are those that have curves.

    `refused` has by topic what was left out, and why.
    """
    by_analysis = {
        name: found
        for name in ANALYSES
        if (
            found := {
                label: each for label, several in records.items() for each in several if each["evaluation"] == name
            }
        )
    }
    figures = [
        figure
        for name in FIGURES
        if name in by_analysis
        for figure in analysis_figures(by_analysis[name], list(records))
    ]
    table, subjects = analysis_table(by_analysis, list(records)), subjects_table(records, runs)
    return Report(
        title=f"Analysis of {formatting.listed(list(records))}",
        subject=(f"{formatting.plural(len(records), 'trained model')}, on {data}.",),
        sections={
            subjects.title: subjects,
            table.title: table,
            "By depth": Gallery((*figures, *gradient_norm_figures(runs, list(records)))),
            "Left out": Statements(statements(refused or {})),
            "How to read this": Statements(statements({TITLES[name]: DEFINITIONS[name] for name in by_analysis})),
            "How to repeat it": Code(command),
        },
        records={"analyses.json": encode_json({k: list(map(dict, v)) for k, v in records.items()}, indent=1) + "\n"},
    )


def gradient_norm_figures(runs: Mapping[str, RunResult], labels: Sequence[str] = ()) -> tuple[Figure, ...]:
    """Return the figure of gradient norms over training (Fig. 5 of arXiv 2602.08064); none without curves.

    `labels` are those of all models of the page, in which each has one hue.
    """
    shown = {label: run for label, run in runs.items() if len(run.gradient_norms.steps) > 1}
    if not shown:
        return ()
    styles = {
        label: MethodStyle(hue=hue, dash=DASHES[0], marker="", width=1.6)
        for label, hue in hues_of(labels or list(runs)).items()
    }
    return (
        Figure(
            name="gradient-norms",
            title="Gradient norm over training",
            caption="Norm of the whole gradient before clipping, smoothed over 5 % of the steps, every step behind it; "
            "logarithmic axis.",
            alternative="; ".join(
                f"{label} ends at {run.gradient_norms.values[-1]:.3g}" for label, run in shown.items()
            ),
            draw=lambda theme: draw_gradient_norms(shown, styles, theme, "Gradient norm over training"),
        ),
    )


def subjects_table(records: Mapping[str, Sequence[Record]], runs: Mapping[str, RunResult]) -> Table:
    """Return a table of what was analysed: run, step, samples that were read, and commit."""
    columns = (
        Column("Model", "its label on this page", numeric=False),
        Column("Run", "the first twelve digits of its identity; none for a model that is no run", numeric=False),
        Column("Step", "of the weights"),
        Column("Weights", "raw: as trained; ema: their average", numeric=False),
        Column("Samples", "samples that were read; the transition Jacobians read one"),
        Column("Commit", "of the code that trained the run", numeric=False),
    )
    rows: list[Row] = []
    for label, several in records.items():
        run = runs.get(label)
        commits = () if run is None else (str(each["commit"]) for each in run.environments if each.get("commit"))
        texts = (
            label,
            NOTHING if run is None else run.identity[:12],
            _distinct(NOTHING if run is None else f"{each['step']:,}" for each in several),
            _distinct(each["weights"] for each in several),
            _distinct(each["results"].get("samples", NOTHING) for each in several if each["evaluation"] != "jacobians"),
            _distinct(commits),
        )
        rows.append(tuple(map(Entry, texts)))
    return Table("What was analysed", columns, (RowGroup("", tuple(rows)),)).without_empty_columns()


def _distinct(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values))) or NOTHING


def analysis_table(by_analysis: Mapping[str, Mapping[str, Record]], labels: Sequence[str]) -> Table:
    """Return a table with a column for every model and a group of rows for every analysis."""
    columns = (
        Column("quantity", "what was measured", numeric=False),
        *(Column(label, f"values of {label}") for label in labels),
    )
    groups = []
    for name, records in by_analysis.items():
        values = {label: dict(SUMMARIES[name](record["results"])) for label, record in records.items()}
        quantities = dict.fromkeys(quantity for found in values.values() for quantity in found)
        rows: list[Row] = [
            (Entry(quantity), *(Entry(values.get(label, {}).get(quantity, NOTHING)) for label in labels))
            for quantity in quantities
        ]
        groups.append(RowGroup(TITLES[name], tuple(rows)))
    return Table("Numbers", columns, tuple(groups))


# --- the numbers of each analysis


def _number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else formatting.significant(float(value), digits).replace("-", formatting.MINUS)


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _magnitude(found: Record) -> Numbers:
    for what, place in (("first", 0), ("at the end", -1)):
        present = {n: each["rms"][place] for n, each in found["streams"].items() if each["rms"][place] is not None}
        for name, value in mean_of_copies(present).items():
            yield f"RMS {what}, {name}", _number(value)


def _share(found: Record) -> Numbers:
    for kind in ("gains", "activations"):
        means = {name: mean for name, values in found[kind].items() if (mean := _mean(values)) is not None}
        for name, value in mean_of_copies(means).items():
            yield f"mean share by {kind}, {name}", _percent(value)


def _fusion(found: Record) -> Numbers:
    for name, value in mean_of_copies(found["gains"] or {}).items():
        yield f"mean gain, {name}", _number(value)
    for name, value in mean_of_copies(found["shares"]).items():
        yield f"share, {name}", _percent(value)


def _lens(found: Record) -> Numbers:
    for name, values in found["streams"].items():
        yield f"agreement of {name} alone", _percent(values["agreement"][-1])
        yield f"loss of {name} alone ({found['unit']})", _number(values["loss"][-1], 4)
    if found["divergent"]:
        yield "predictions in which streams differ", _percent(found["divergent"]["share"])
        for name, value in found["divergent"]["agreement"].items():
            yield f"the model then agrees with {name}", _percent(value)
    yield f"loss after half of the blocks ({found['unit']})", _number(found["loss"][found["blocks"] // 2], 4)


def _pruning(found: Record) -> Numbers:
    whole, half = found["loss"], (found["blocks"] + 1) // 2
    unit = found["unit"]
    yield f"loss ({unit})", _number(whole, 4)
    for kind in ("removed", "zeroed"):
        yield f"rise, last block {kind} ({unit})", formatting.signed(found[kind][-1] - whole, 3)
        yield f"rise, last half {kind} ({unit})", formatting.signed(found[f"last_{kind}"][half] - whole, 3)


def _depth(found: Record) -> Numbers:
    yield "effective blocks", f"{found['effective_blocks']:.2f} of {found['blocks']}"
    yield "needed blocks", f"{found['needed_blocks']} of {found['blocks']}"
    means = {name: mean for name, values in found["influence"].items() if (mean := _mean(values)) is not None}
    for name, value in mean_of_copies(means).items():
        yield f"mean influence, {name}", _number(value)


def _outliers(found: Record) -> Numbers:
    for quantity, title in (("ratio", "largest / median"), ("massive", "massive entries")):
        largest = {
            name: max((v for v in each[quantity] if v is not None), default=None)
            for name, each in found["streams"].items()
        }
        for name, value in mean_of_copies({n: v for n, v in largest.items() if v is not None}).items():
            yield f"{title}, {name}", _number(value)
    if found["attention"]:
        yield "attention to the first token, mean", _percent(_mean(found["attention"]["first"]))
        yield "the same, uniform", _percent(_mean(found["attention"]["uniform"]))
        yield "heads that are sinks", _percent(_mean(found["attention"]["sink_heads"]))


def _quantisation(found: Record) -> Numbers:
    for scheme, each in found["schemes"].items():
        yield f"rise, {scheme.upper()} ({found['unit']})", formatting.signed(each["rise"], 4)


def _jacobians(found: Record) -> Numbers:
    yield "largest singular value", _number(max(found["largest"]))
    yield "smallest singular value", f"{min(found['smallest']):.1e}"
    yield "RMS, from the first to the end", _number(found["to_end"]["rms"][0])
    yield "mean logarithm", _number(_mean(found["mean_log"]))
    if found["identity"]:
        yield "difference from Eq. 8", f"{max(found['identity'].values()):.0e}"
    if "forward" in found:
        yield "difference from the forward pass", f"{found['forward']:.0e}"


SUMMARIES: dict[str, Callable[[Record], Numbers]] = {
    "hidden-magnitude": _magnitude,
    "stream-share": _share,
    "fusion": _fusion,
    "logit-lens": _lens,
    "pruning": _pruning,
    "effective-depth": _depth,
    "outliers": _outliers,
    "quantisation": _quantisation,
    "jacobians": _jacobians,
}
TITLES = {
    "hidden-magnitude": "Magnitude of the streams",
    "stream-share": "Share of the streams",
    "fusion": "Final fusion",
    "logit-lens": "Logit lens",
    "pruning": "Pruning",
    "effective-depth": "Effective depth",
    "outliers": "Outliers and attention sinks",
    "quantisation": "Rounding",
    "jacobians": "Transition Jacobians",
}
DEFINITIONS = {
    "hidden-magnitude": "Root mean square over the width, averaged over tokens, of each stream as the reads return it, "
    "norms on the stream included. The magnitude of arXiv 2602.08064 is this times the square root of the width.",
    "stream-share": "By gains (Fig. 6 of arXiv 2602.08064): mean |gain| of the norm on a stream, times its gate, as a "
    "part of the sum over streams. By activations: the same of the RMS of what the stream adds to the input.",
    "fusion": "Mean gain of the last norm of each stream alone, and the share of the stream's RMS in the final sum.",
    "logit-lens": "The streams after some blocks go through the model's own final norms and head. A stream alone goes "
    "through its own final norm and the output norm, with the terms of the other streams absent.",
    "pruning": "Removed: the streams skip a block. Zeroed: its sublayers write 0, and its norms still apply.",
    "effective-depth": "Effective blocks: (sum h)² / sum h² of the rises h of the loss when one block is removed. "
    "Needed blocks: the fewest first blocks from which on the loss is within 5 % of what all gain, unless another "
    "tolerance is in the record. Influence: mean 1 - cosine between a stream before and after a block (arXiv "
    "2403.03853).",
    "outliers": "Massive (arXiv 2402.17762): above 100 and above 1,000 times the median of a sample, unless other "
    "thresholds are in the record. A head is a sink if the first token has over 30 % of the attention of later ones.",
    "quantisation": "Linear layers of the blocks with symmetric rounding: one scale for each output channel of the "
    "weights and for each token of their input; no calibration.",
    "jacobians": "Singular values of the derivative of all streams after a sublayer by those before it, a few tokens, "
    "fp64. Eq. 8 of arXiv 2602.08064: the blocks of that matrix equal products of the Jacobians of norms and sublayer.",
}
