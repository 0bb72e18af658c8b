"""The files of a report: an HTML page, the same in Markdown, the figures, and CSV."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from siamesenorm.comparison.figures import Figure, render
from siamesenorm.comparison.page import render_page
from siamesenorm.comparison.sections import Code, Gallery, Report, Statements
from siamesenorm.comparison.tables import Table, for_markdown
from siamesenorm.comparison.theme import LIGHT, THEMES
from siamesenorm.files import disk_errors, write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """The files of a report."""

    page: Path
    markdown: Path
    records: tuple[Path, ...]
    figures: tuple[Path, ...]


def write_report(report: Report, out: Path) -> ReportPaths:
    """Write a report into the directory `out`, each file whole or not at all.

    The page, which holds everything, is written last. Raises `UserError` where `out` cannot be written.
    """
    drawn = report.figures
    drawings = {f"{figure.name}-{theme.name}": render(figure, theme, "svg") for figure in drawn for theme in THEMES}
    files: dict[Path, bytes] = {out / "figures" / f"{name}.svg": svg for name, svg in drawings.items()}
    files |= {out / "figures" / f"{figure.name}.png": render(figure, LIGHT, "png") for figure in drawn}
    paths = ReportPaths(
        page=out / "report.html",
        markdown=out / "report.md",
        records=tuple(out / name for name in report.records),
        figures=tuple(files),
    )
    files |= {out / name: text.encode() for name, text in report.records.items()}
    files[paths.markdown] = render_markdown(report).encode()
    files[paths.page] = render_page(report.title, report.subject, report.sections, drawings).encode()
    with disk_errors(out):
        (out / "figures" if drawn else out).mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_atomically(path, content)
    return paths


def render_markdown(report: Report) -> str:
    """Return the report as Markdown, with the figures as files beside it."""
    parts = [f"# {report.title}\n", " ".join(report.subject) + "\n"]
    for section in report.sections:
        parts.append(f"## {section.title}\n")
        for block in section.blocks:
            match block:
                case Statements():
                    parts.append(statements_in_markdown(block))
                case Table():
                    parts.append(for_markdown(block))
                case Gallery():
                    parts.extend(map(_figure, block.figures))
                case Code():
                    parts.append(f"```\n{block.text}\n```\n")
    return "\n".join(parts)


def statements_in_markdown(statements: Statements) -> str:
    """Write statements as a list, each under its topic."""
    lines = []
    for each in statements.items:
        link = f" [{each.link[0]}]({each.link[1]})" if each.link else ""
        lines.append(f"- **{each.topic}**: {each.text.replace('*', chr(92) + '*')}{link}\n")
    return "".join(lines)


def _figure(figure: Figure) -> str:
    description = escape(f"{figure.title}. {figure.alternative}")
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="figures/{figure.name}-dark.svg">'
        f'<img alt="{description}" src="figures/{figure.name}-light.svg"></picture>\n\n{figure.caption}\n'
    )
