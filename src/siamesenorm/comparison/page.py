"""A report as one HTML page that needs nothing else: no script, no font, no image outside the file.

Every figure is in it twice, as inline data, and the reader's colour scheme chooses (`prefers-color-scheme`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

from siamesenorm.comparison.figures import Figure
from siamesenorm.comparison.sections import Block, Code, Gallery, ReportSection, Statement, Statements
from siamesenorm.comparison.tables import Entry, Group, Pill, Table

NO_BREAK = "\N{NON-BREAKING HYPHEN}"


def render_page(
    title: str, subject: Sequence[str], sections: Sequence[ReportSection], drawings: Mapping[str, bytes]
) -> str:
    """Return the page; `drawings` has the SVG of every figure by `name-light` and `name-dark`."""
    body = "".join(
        f"<section>\n<h2>{_prose(section.title)}</h2>\n"
        f"{''.join(_block(block, drawings) for block in section.blocks)}</section>\n"
        for section in sections
    )
    sentences = "".join(f'<p class="subject">{_prose(sentence)}</p>\n' for sentence in subject)
    stylesheet = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{stylesheet}</style>\n</head>\n<body>\n"
        '<div class="wrap">\n<header>\n<p class="origin">siamesenorm report</p>\n'
        f"<h1>{_prose(title)}</h1>\n{sentences}</header>\n<main>\n{body}</main>\n</div>\n</body>\n</html>\n"
    )


def _block(block: Block, drawings: Mapping[str, bytes]) -> str:
    match block:
        case Statements():
            items = "".join(map(_statement, block.items))
            return f'<dl class="card {block.tone}">\n{items}</dl>\n'
        case Table():
            return _table(block)
        case Gallery():
            figures = "".join(_figure(figure, drawings) for figure in block.figures)
            return f'<div class="figures">\n{figures}</div>\n'
        case Code():
            return f'<pre class="card">{escape(block.text)}</pre>\n'


def _statement(statement: Statement) -> str:
    link = f' <a href="{escape(statement.link[1])}">{escape(statement.link[0])}</a>' if statement.link else ""
    return f"<dt>{escape(statement.topic)}</dt><dd>{_prose(statement.text)}{link}</dd>\n"


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
        f'<p class="hint" aria-hidden="true">scroll sideways for more columns →</p>\n'
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
    first, *values = row
    cells = "".join(
        f"<td{_number_class(column.numeric)}>{_entry(entry, pill_first=column.numeric)}</td>"
        for entry, column in zip(values, table.columns[1:], strict=True)
    )
    return f'<tr><th scope="row">{escape(first.text)}</th>{cells}</tr>\n'


def _entry(entry: Entry, *, pill_first: bool) -> str:
    """Write a cell; in a column of numbers the pill comes first, so that the numbers stay aligned."""
    text = escape(entry.text)
    text = f"<strong>{text}</strong>" if entry.strong else f"<em>{text}</em>" if entry.emphasis else text
    parts = [text, _pill(entry.pill) if entry.pill else ""]
    return " ".join(filter(None, reversed(parts) if pill_first else parts))


def _pill(pill: Pill) -> str:
    return f'<span class="pill {pill.tone}">{escape(str(pill))}</span>'


def _number_class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


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
