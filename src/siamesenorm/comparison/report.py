"""A report of a sweep on disk: one HTML page, the same in Markdown, every number as CSV, and the figures as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from siamesenorm.comparison.figures import Figure, figures, render
from siamesenorm.comparison.findings import Findings
from siamesenorm.comparison.page import TITLE, render_page
from siamesenorm.comparison.records import comparisons_csv, runs_csv
from siamesenorm.comparison.renderings import for_markdown
from siamesenorm.comparison.summary import Statement, conclusions, environment, footnotes, subject, unfinished
from siamesenorm.comparison.tables import at_chosen_rates, by_learning_rate
from siamesenorm.comparison.theme import LIGHT, THEMES
from siamesenorm.files import disk_errors, write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """Where the parts of a report are."""

    page: Path
    markdown: Path
    runs: Path
    comparisons: Path
    figures: tuple[Path, ...]


def write_report(findings: Findings, out: Path) -> ReportPaths:
    """Write the report of a sweep into the directory `out`, each file whole or not at all.

    The page, which holds everything, is written last. Raises `UserError` where `out` cannot be written.
    """
    drawn = figures(findings)
    drawings = {f"{figure.name}-{theme.name}": render(figure, theme, "svg") for figure in drawn for theme in THEMES}
    files: dict[Path, bytes] = {out / "figures" / f"{name}.svg": svg for name, svg in drawings.items()}
    files |= {out / "figures" / f"{figure.name}.png": render(figure, LIGHT, "png") for figure in drawn}
    paths = ReportPaths(
        page=out / "report.html",
        markdown=out / "report.md",
        runs=out / "results.csv",
        comparisons=out / "comparisons.csv",
        figures=tuple(files),
    )
    files[paths.runs] = runs_csv(findings.sweep).encode()
    files[paths.comparisons] = comparisons_csv(findings).encode()
    files[paths.markdown] = render_markdown(findings, drawn).encode()
    files[paths.page] = render_page(findings, drawings, drawn).encode()
    with disk_errors(out):
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_atomically(path, content)
    return paths


def render_markdown(findings: Findings, drawn: Sequence[Figure]) -> str:
    """Return the report as Markdown, with the figures as files beside it."""
    parts = [
        f"# {TITLE}\n",
        " ".join(subject(findings)) + "\n",
        _statements(conclusions(findings)),
        f"## {at_chosen_rates(findings).title}\n",
        for_markdown(at_chosen_rates(findings)),
        f"## {by_learning_rate(findings).title}\n",
        for_markdown(by_learning_rate(findings)),
        _statements(footnotes(findings)),
        "## Figures\n",
        *(_figure(figure) for figure in drawn),
    ]
    if absent := unfinished(findings.sweep):
        parts += ["## Unfinished runs\n", _statements(absent)]
    if findings.sweep.command:
        parts += ["## How to repeat it\n", f"```\n{findings.sweep.command}\n```\n"]
    if entries := environment(findings.sweep):
        parts += ["## Environment\n", _statements(entries)]
    return "\n".join(parts)


def _statements(statements: Sequence[Statement]) -> str:
    return "".join(f"- **{each.topic}**: {each.text.replace('*', chr(92) + '*')}\n" for each in statements)


def _figure(figure: Figure) -> str:
    description = escape(f"{figure.title}. {figure.alternative}")
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="figures/{figure.name}-dark.svg">'
        f'<img alt="{description}" src="figures/{figure.name}-light.svg"></picture>\n\n{figure.caption}\n'
    )
