"""The report as one HTML page that needs nothing else: no script, no font, no image outside the file.

Every figure is there twice, as inline data, and the reader's colour scheme chooses (`prefers-color-scheme`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby

from siamesenorm.comparison.figures import Figure
from siamesenorm.comparison.findings import CONFIRMED_HIGHER, CONFIRMED_LOWER, SOME_DIVERGED, Findings
from siamesenorm.comparison.results import DIVERGED, SPIKED, STABLE
from siamesenorm.comparison.summary import Statement, conclusions, environment, footnotes, subject, unfinished
from siamesenorm.comparison.tables import EDGE, Entry, Group, Pill, Table, at_chosen_rates, by_learning_rate

TITLE = "Normalising the residual path"

NO_BREAK = "\N{NON-BREAKING HYPHEN}"

TONES = {
    STABLE: "good",
    CONFIRMED_LOWER: "good",
    SPIKED: "warn",
    EDGE: "warn",
    DIVERGED: "bad",
    CONFIRMED_HIGHER: "bad",
    SOME_DIVERGED: "bad",
}


def render_page(findings: Findings, drawings: Mapping[str, bytes], figures: Sequence[Figure]) -> str:
    """Return the page; `drawings` has the SVG of every figure by `name-light` and `name-dark`."""
    overview, *training = [list(group) for _, group in groupby(figures, key=lambda figure: figure.section)]
    body = [
        _section("What came out", _statements(conclusions(findings), "conclusions")),
        _section("Every method at its own best rate", _table(at_chosen_rates(findings))),
        _section(overview[0].section, _figures(overview, drawings)),
        _section("Results by learning rate", _table(by_learning_rate(findings))),
        *(_section(group[0].section, _figures(group, drawings)) for group in training),
        _section("How to read this", _statements(footnotes(findings), "quiet")),
    ]
    if absent := unfinished(findings.sweep):
        body.append(_section("Unfinished runs", _statements(absent, "quiet")))
    if command := findings.sweep.command:
        body.append(_section("How to repeat it", f'<pre class="card">{escape(command)}</pre>\n'))
    if entries := environment(findings.sweep):
        body.append(_section("Environment", _statements(entries, "quiet")))
    stylesheet = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{TITLE}</title>\n<style>\n{stylesheet}</style>\n</head>\n<body>\n"
        f'<div class="wrap">\n{_header(findings)}<main>\n{"".join(body)}</main>\n</div>\n</body>\n</html>\n'
    )


def _header(findings: Findings) -> str:
    sentences = "".join(f'<p class="subject">{_prose(sentence)}</p>\n' for sentence in subject(findings))
    return f'<header>\n<p class="origin">siamesenorm comparison</p>\n<h1>{TITLE}</h1>\n{sentences}</header>\n'


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{_prose(title)}</h2>\n{content}</section>\n"


def _statements(statements: Sequence[Statement], tone: str) -> str:
    items = "".join(f"<dt>{escape(each.topic)}</dt><dd>{_prose(each.text)}</dd>\n" for each in statements)
    return f'<dl class="card {tone}">\n{items}</dl>\n'


def _prose(text: str) -> str:
    """Escape a sentence, and keep a learning rate such as 2e-3 on one line."""
    return re.sub(r"(\de)-(\d)", rf"\1{NO_BREAK}\2", escape(text))


def _table(table: Table) -> str:
    headings = "".join(
        f'<th scope="col"{_number_class(column.numeric)} title="{escape(column.explanation)}">'
        f"{escape(column.title).replace('-', NO_BREAK)}</th>"
        for column in table.columns
    )
    groups = "".join(_group(group, table) for group in table.groups)
    return (
        f'<div class="card scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">\n<table>\n'
        f"<caption>{escape(table.title)}</caption>\n<thead><tr>{headings}</tr></thead>\n{groups}</table>\n</div>\n"
    )


def _group(group: Group, table: Table) -> str:
    heading = ""
    if group.title:
        span = len(table.columns)
        heading = (
            f'<tr><th class="group" colspan="{span}" scope="rowgroup"><span>{_prose(group.title)}</span></th></tr>\n'
        )
    rows = "".join(_row(row, table) for row in group.rows)
    return f"<tbody>\n{heading}{rows}</tbody>\n"


def _row(row: Sequence[Entry], table: Table) -> str:
    method, *values = row
    cells = "".join(
        f"<td{_number_class(column.numeric)}>{_entry(entry, pill_first=column.numeric)}</td>"
        for entry, column in zip(values, table.columns[1:], strict=True)
    )
    return f'<tr><th scope="row">{escape(method.text)}</th>{cells}</tr>\n'


def _entry(entry: Entry, *, pill_first: bool) -> str:
    """Write a cell; in a column of numbers the pill comes first, so that the numbers stay aligned."""
    text = escape(entry.text)
    text = f"<strong>{text}</strong>" if entry.strong else f"<em>{text}</em>" if entry.emphasis else text
    parts = [text, _pill(entry.pill) if entry.pill else ""]
    detail = f"<small>{escape(entry.detail)}</small>" if entry.detail else ""
    return " ".join(filter(None, reversed(parts) if pill_first else parts)) + detail


def _pill(pill: Pill) -> str:
    return f'<span class="pill {TONES.get(pill.kind, "")}">{escape(str(pill))}</span>'


def _number_class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _figures(figures: Sequence[Figure], drawings: Mapping[str, bytes]) -> str:
    return f'<div class="figures">\n{"".join(_figure(figure, drawings) for figure in figures)}</div>\n'


def _figure(figure: Figure, drawings: Mapping[str, bytes]) -> str:
    light, dark = (_inline(drawings[f"{figure.name}-{theme}"]) for theme in ("light", "dark"))
    description = escape(f"{figure.title}. {figure.alternative}")
    return (
        f'<figure class="card">\n<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{description}"></picture>\n'
        f"<figcaption>{escape(figure.caption)}</figcaption>\n</figure>\n"
    )


def _inline(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
