"""Tables as cells with a little meaning, and their text for a terminal and for Markdown; `page` writes them as HTML."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Group as RichGroup
from rich.table import Table as RichTable
from rich.text import Text

LOWER, HIGHER = "\N{NO-BREAK SPACE}↓", "\N{NO-BREAK SPACE}↑"
"""Follow the title of a quantity that is better when it is low, or high."""

MARKS = {
    "stable": "●",
    "spiked": "▲",
    "not learned": "◇",
    "diverged": "✕",
    "unfinished": "○",
    "confirmed lower": "✓",
    "confirmed higher": "✓",
    "edge": "!",
}
"""The mark beside a word of each kind, so that no meaning is in a colour alone."""

TONES = {
    "stable": "good",
    "confirmed lower": "good",
    "spiked": "warn",
    "edge": "warn",
    "not learned": "dull",
    "diverged": "bad",
    "confirmed higher": "bad",
    "diverged on a seed": "bad",
}
"""The tone in which a kind of word is shown: good, warn, dull or bad."""

TERMINAL_STYLES = {"good": "green", "warn": "yellow", "dull": "magenta", "bad": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pill:
    """A word that stands out, of the kind that gives it its mark and its tone."""

    kind: str
    text: str

    def __str__(self) -> str:
        """Write the mark and the word."""
        return f"{MARKS.get(self.kind, '–')} {self.text}"

    @property
    def tone(self) -> str:
        """The tone of its kind, empty for a neutral one."""
        return TONES.get(self.kind, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One cell: text, a pill or both."""

    text: str = ""
    pill: Pill | None = None
    strong: bool = False
    emphasis: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column heading with a sentence that explains it."""

    title: str
    explanation: str
    numeric: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows under one heading; the first entry of a row names it."""

    title: str = ""
    rows: tuple[tuple[Entry, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with its groups of rows."""

    title: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]

    def without_empty_columns(self, nothing: str) -> Table:
        """Return the table without the columns in which every cell is `nothing` or empty."""
        rows = [row for group in self.groups for row in group.rows]
        kept = [i for i in range(len(self.columns)) if any(r[i].pill or r[i].text not in ("", nothing) for r in rows)]
        groups = tuple(
            Group(title=group.title, rows=tuple(tuple(row[i] for i in kept) for row in group.rows))
            for group in self.groups
        )
        return Table(title=self.title, columns=tuple(self.columns[i] for i in kept), groups=groups)


def for_terminal(table: Table, width: int = 120) -> RichGroup:
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
    return RichGroup(*parts)


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


def _markdown_text(entry: Entry) -> str:
    text = entry.text.replace("|", "\\|").replace("*", "\\*")
    text = f"**{text}**" if entry.strong else f"*{text}*" if entry.emphasis else text
    return " ".join(part for part in (text, str(entry.pill) if entry.pill else "") if part)


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
