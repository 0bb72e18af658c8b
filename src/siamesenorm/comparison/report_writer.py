"""Write a report as one HTML page, as Markdown, as figures and CSV; write its tables on a terminal.

The page needs no other file. Every figure is in it twice; the reader's colour scheme chooses (`prefers-color-scheme`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from siamesenorm.comparison import report_parts
from siamesenorm.comparison.figure_style import LIGHT, THEMES, Figure, render
from siamesenorm.comparison.report_parts import Column, Entry, Report, RowGroup, Statement, Table
from siamesenorm.files import disk_errors, write_atomically

TERMINAL_STYLES = {"good": "green", "warn": "yellow", "dull": "magenta", "bad": "red"}
NO_BREAK = "\N{NON-BREAKING HYPHEN}"
NUMBER = {True: ' class="number"', False: ""}
LONG = 24
"""A text of more characters breaks into lines, so that the columns behind it are on the screen."""


def write_report(report: Report, out: Path) -> Path:
    """Write a report into the directory `out`, each file whole or not at all; return the path of its page.

    The page, which holds everything, is written last. Raises `UserError` where `out` cannot be written.
    """
    drawings = {f"{each.name}-{theme.name}": render(each, theme, "svg") for each in report.figures for theme in THEMES}
    figures = {out / "figures" / f"{name}.svg": svg for name, svg in drawings.items()}
    figures |= {out / "figures" / f"{figure.name}.png": render(figure, LIGHT, "png") for figure in report.figures}
    records = {out / name: text.encode() for name, text in report.records.items()}
    page = out / "report.html"
    texts = {out / "report.md": report_in_markdown(report).encode(), page: report_in_html(report, drawings).encode()}
    with disk_errors(out):
        (out / "figures" if figures else out).mkdir(parents=True, exist_ok=True)
        for path, content in {**figures, **records, **texts}.items():
            write_atomically(path, content)
    return page


# --- terminal


def table_on_terminal(table: Table, width: int = 120) -> Group:
    """Return a table for `rich.console.Console.print`, a table of its own for each group.

    Columns that do not fit the width are left out, the last ones first; a line says so.
    """
    fitting = _columns_that_fit(table, width)
    parts: list[RichTable | Text] = [Text(table.title, style="bold")]
    for group in table.groups:
        shown = RichTable(title=group.title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold cyan")
        for column in table.columns[:fitting]:
            shown.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
        for row in group.rows:
            shown.add_row(*map(_terminal_text, row[:fitting]))
        parts.append(shown)
    if left_out := [column.title for column in table.columns[fitting:]]:
        parts.append(Text(f"In the report besides: {', '.join(left_out)}.", style="dim"))
    return Group(*parts)


def _columns_that_fit(table: Table, width: int) -> int:
    used = 2
    for number, column in enumerate(table.columns):
        cells = [_terminal_text(row[number]).plain for group in table.groups for row in group.rows]
        used += 3 + max(cell_len(text) for text in (column.title, *cells))
        if used > width:
            return max(1, number)
    return len(table.columns)


def _terminal_text(entry: Entry) -> Text:
    text = Text(entry.text, style="bold" if entry.strong else "italic" if entry.emphasis else "")
    if entry.pill is not None:
        text.append(" " if entry.text else "")
        text.append(str(entry.pill), style=TERMINAL_STYLES.get(entry.pill.tone, "dim"))
    return text


# --- Markdown


def report_in_markdown(report: Report) -> str:
    """Return the report as Markdown, with the figures as files beside it."""
    parts = [f"# {report.title}\n", " ".join(report.subject) + "\n"]
    for title, block in report.sections.items():
        parts.append(f"## {title}\n")
        match block:
            case report_parts.Statements():
                parts.append("".join(map(_statement_in_markdown, block.items)))
            case Table():
                parts.append(table_in_markdown(block))
            case report_parts.Gallery():
                parts.extend(map(_figure_in_markdown, block.figures))
            case report_parts.Code():
                parts.append(f"```\n{block.text}\n```\n")
    return "\n".join(parts)


def table_in_markdown(table: Table) -> str:
    """Write a table as GitHub-flavoured Markdown, group headings as rows of their own."""
    lines = [[column.title for column in table.columns]]
    lines.append(["---:" if column.numeric else ":---" for column in table.columns])
    for group in table.groups:
        if group.title:
            lines.append([f"**{group.title}**"] + [""] * (len(table.columns) - 1))
        lines += [list(map(_entry_in_markdown, row)) for row in group.rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _statement_in_markdown(statement: Statement) -> str:
    link = f" [{statement.link[0]}]({statement.link[1]})" if statement.link else ""
    return f"- **{statement.topic}**: {statement.text.replace('*', chr(92) + '*')}{link}\n"


def _entry_in_markdown(entry: Entry) -> str:
    text = entry.text.replace("|", "\\|").replace("*", "\\*")
    text = f"**{text}**" if entry.strong else f"*{text}*" if entry.emphasis else text
    return " ".join(filter(None, (text, str(entry.pill or ""))))


def _figure_in_markdown(figure: Figure) -> str:
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="figures/{figure.name}-dark.svg">'
        f'<img alt="{_alternative(figure)}" src="figures/{figure.name}-light.svg"></picture>\n\n{figure.caption}\n'
    )


# --- HTML


def report_in_html(report: Report, drawings: Mapping[str, bytes]) -> str:
    """Return the page; `drawings` has the SVG of every figure by `name-light` and `name-dark`."""
    body = "".join(
        f"<section>\n<h2>{_prose(title)}</h2>\n{_block(block, drawings)}</section>\n"
        for title, block in report.sections.items()
    )
    sentences = "".join(f'<p class="subject">{_prose(sentence)}</p>\n' for sentence in report.subject)
    stylesheet = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{stylesheet}</style>\n</head>\n<body>\n"
        '<div class="wrap">\n<header>\n<p class="origin">siamesenorm report</p>\n'
        f"<h1>{_prose(report.title)}</h1>\n{sentences}</header>\n<main>\n{body}</main>\n</div>\n</body>\n</html>\n"
    )


def _block(block: report_parts.Block, drawings: Mapping[str, bytes]) -> str:
    match block:
        case report_parts.Statements():
            items = "".join(map(_statement, block.items))
            return f'<dl class="card {block.tone}">\n{items}</dl>\n'
        case Table():
            return _table(block)
        case report_parts.Gallery():
            figures = "".join(_figure(figure, drawings) for figure in block.figures)
            return f'<div class="figures">\n{figures}</div>\n'
        case report_parts.Code():
            return f'<pre class="card">{escape(block.text)}</pre>\n'


def _statement(statement: Statement) -> str:
    link = f' <a href="{escape(statement.link[1])}">{escape(statement.link[0])}</a>' if statement.link else ""
    return f"<dt>{escape(statement.topic)}</dt><dd>{_prose(statement.text)}{link}</dd>\n"


def _prose(text: str) -> str:
    """Escape a sentence, mark text between backticks as code, and keep a rate such as 2e-3 on one line."""
    unbroken = re.sub(r"(\de)-(\d)", rf"\1{NO_BREAK}\2", escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", unbroken)


def _table(table: Table) -> str:
    headings = "".join(
        f'<th scope="col"{NUMBER[column.numeric]} title="{escape(column.explanation)}">'
        f"{escape(column.title).replace('-', NO_BREAK)}</th>"
        for column in table.columns
    )
    groups = "".join(_group(group, table.columns) for group in table.groups)
    return (
        f'<div class="card scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">\n<table>\n'
        f"<caption>{escape(table.title)}</caption>\n<thead><tr>{headings}</tr></thead>\n{groups}</table>\n</div>\n"
        f'<p class="hint" aria-hidden="true">scroll sideways for more columns →</p>\n'
    )


def _group(group: RowGroup, columns: Sequence[Column]) -> str:
    title = f'<th class="group" colspan="{len(columns)}" scope="rowgroup"><span>{_prose(group.title)}</span></th>'
    rows = [f"<tr>{title}</tr>\n"] if group.title else []
    for first, *values in group.rows:
        cells = (
            f"<td{NUMBER[True] if column.numeric else _long(entry)}>{_entry(entry, pill_first=column.numeric)}</td>"
            for entry, column in zip(values, columns[1:], strict=True)
        )
        rows.append(f'<tr><th scope="row"{_long(first)}>{escape(first.text)}</th>{"".join(cells)}</tr>\n')
    return f"<tbody>\n{''.join(rows)}</tbody>\n"


def _long(entry: Entry) -> str:
    return ' class="long"' if len(entry.text) > LONG else ""


def _entry(entry: Entry, *, pill_first: bool) -> str:
    """Write a cell; in a column of numbers the pill comes first, so that the numbers stay aligned."""
    text = escape(entry.text)
    text = f"<strong>{text}</strong>" if entry.strong else f"<em>{text}</em>" if entry.emphasis else text
    pill = f'<span class="pill {entry.pill.tone}">{escape(str(entry.pill))}</span>' if entry.pill else ""
    return " ".join(filter(None, (pill, text) if pill_first else (text, pill)))


def _figure(figure: Figure, drawings: Mapping[str, bytes]) -> str:
    light, dark = (
        f"data:image/svg+xml;base64,{base64.b64encode(drawings[f'{figure.name}-{theme.name}']).decode()}"
        for theme in THEMES
    )
    return (
        f'<figure class="card">\n<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{_alternative(figure)}"></picture>\n'
        f"<figcaption>{escape(figure.caption)}</figcaption>\n</figure>\n"
    )


def _alternative(figure: Figure) -> str:
    return escape(f"{figure.title}. {figure.alternative}")
