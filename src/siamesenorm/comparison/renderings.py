"""Tables for the terminal (rich) and for Markdown."""

from __future__ import annotations

from rich import box
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


def for_terminal(table: Table) -> RichTable:
    """Write a table for `rich.console.Console.print`, one section a group."""
    rendered = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in table.columns:
        rendered.add_column(column.title, justify="right" if column.numeric else "left")
    for group in table.groups:
        if group.title:
            rendered.add_section()
            rendered.add_row(Text(group.title, style="bold cyan"))
        for row in group.rows:
            rendered.add_row(*(_terminal_text(entry) for entry in row))
    return rendered


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
