"""Tables for the terminal (rich) and for Markdown."""

from __future__ import annotations

from rich import box
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from siamesenorm.comparison.findings import CONFIRMED_HIGHER, CONFIRMED_LOWER
from siamesenorm.comparison.results import DIVERGED, SPIKED, STABLE
from siamesenorm.comparison.tables import EDGE, Entry, Table

TERMINAL_STYLES = {
    STABLE: "green",
    SPIKED: "yellow",
    DIVERGED: "red",
    CONFIRMED_LOWER: "bold green",
    CONFIRMED_HIGHER: "bold red",
    EDGE: "yellow",
}


def for_terminal(table: Table, width: int = 120) -> Group:
    """Write a table for `rich.console.Console.print`, a table of its own for each group.

    Columns that do not fit the width are left out, the last ones first; a line says so.
    """
    columns = _columns_that_fit(table, width)
    parts: list[RichTable | Text] = [Text(table.title, style="bold")]
    for group in table.groups:
        rendered = RichTable(
            title=group.title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold cyan"
        )
        for column in table.columns[:columns]:
            rendered.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
        for row in group.rows:
            rendered.add_row(*(_terminal_text(entry) for entry in row[:columns]))
        parts.append(rendered)
    left_out = [column.title for column in table.columns[columns:]]
    if left_out:
        parts.append(Text(f"In the report besides: {', '.join(left_out)}.", style="dim"))
    return Group(*parts)


def _columns_that_fit(table: Table, width: int) -> int:
    used = 2
    for number, column in enumerate(table.columns):
        cells = [_terminal_text(row[number]).plain for group in table.groups for row in group.rows]
        used += 3 + max(cell_len(line) for text in (column.title, *cells) for line in text.split("\n"))
        if used > width:
            return max(1, number)
    return len(table.columns)


def for_markdown(table: Table) -> str:
    """Write a table as GitHub-flavoured Markdown, group headings as rows of their own."""
    lines = [
        _markdown_row([column.title for column in table.columns]),
        _markdown_row(["---:" if column.numeric else ":---" for column in table.columns]),
    ]
    for group in table.groups:
        if group.title:
            lines.append(_markdown_row([f"**{group.title}**"] + [""] * (len(table.columns) - 1)))
        lines.extend(_markdown_row([_markdown_text(entry) for entry in row]) for row in group.rows)
    return "\n".join(lines) + "\n"


def _terminal_text(entry: Entry) -> Text:
    text = Text(entry.text, style="bold" if entry.strong else "italic" if entry.emphasis else "")
    if entry.pill is not None:
        text.append(" " if entry.text else "")
        text.append(str(entry.pill), style=TERMINAL_STYLES.get(entry.pill.kind, "dim"))
    if entry.detail:
        text.append(f"\n{entry.detail}", style="dim")
    return text


def _markdown_text(entry: Entry) -> str:
    text = entry.text.replace("|", "\\|").replace("*", "\\*")
    text = f"**{text}**" if entry.strong else f"*{text}*" if entry.emphasis else text
    return " ".join(part for part in (text, entry.detail, str(entry.pill) if entry.pill else "") if part)


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
