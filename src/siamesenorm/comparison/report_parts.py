"""What reports consist of: sections of statements, tables, figures and commands; `report_writer` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress

from siamesenorm.comparison.figure_style import Figure
from siamesenorm.comparison.formatting import NOTHING

LOWER, HIGHER = "\N{NO-BREAK SPACE}↓", "\N{NO-BREAK SPACE}↑"
"""Follow the title of a quantity that is better when it is low, or high."""

SIGNS = {
    "stable": ("●", "good"),
    "spiked": ("▲", "warn"),
    "not learned": ("◇", "dull"),
    "diverged": ("✕", "bad"),
    "unfinished": ("○", ""),
    "confirmed lower": ("✓", "good"),
    "confirmed higher": ("✓", "bad"),
    "diverged on a seed": ("–", "bad"),
    "edge": ("!", "warn"),
    "confirmed": ("✓", "good"),
    "seen on every seed": ("✓", "good"),
    "contradicted": ("✕", "bad"),
    "below noise": ("↓", "good"),
    "inside noise": ("≈", ""),
    "above noise": ("↑", "bad"),
}
"""The mark beside a word of each kind, so that no meaning is in a colour alone, and its tone."""
NEUTRAL = ("–", "")


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence under its topic; `link` is the text and the address of a link behind it."""

    topic: str
    text: str
    link: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Statements:
    """A list of statements, shown in a tone: `conclusions` or `quiet`."""

    items: tuple[Statement, ...]
    tone: str = "quiet"


def statements(texts: Mapping[str, str]) -> tuple[Statement, ...]:
    """Return a statement for every topic with its text."""
    return tuple(Statement(topic, text) for topic, text in texts.items())


@dataclass(frozen=True, slots=True)
class Pill:
    """A word that stands out, of the kind that gives it its mark and its tone."""

    kind: str
    text: str

    def __str__(self) -> str:
        """Write the mark and the word."""
        return f"{SIGNS.get(self.kind, NEUTRAL)[0]} {self.text}"

    @property
    def tone(self) -> str:
        """The tone of its kind, empty for a neutral one."""
        return SIGNS.get(self.kind, NEUTRAL)[1]


@dataclass(frozen=True, slots=True)
class Entry:
    """One cell of a table: text, a pill or both."""

    text: str = ""
    pill: Pill | None = None
    strong: bool = field(default=False, kw_only=True)
    emphasis: bool = field(default=False, kw_only=True)


Row = tuple[Entry, ...]
"""The cells of a row; the first one names it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column heading with a sentence that explains it."""

    title: str
    explanation: str
    numeric: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows under one heading."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its groups of rows."""

    title: str
    columns: tuple[Column, ...]
    groups: tuple[RowGroup, ...]

    def without_empty_columns(self) -> Table:
        """Return the table without the columns in which no cell has a value."""
        columns = zip(*(row for group in self.groups for row in group.rows), strict=True)
        kept = [any(entry.pill or entry.text not in ("", NOTHING) for entry in column) for column in columns]
        groups = (RowGroup(each.title, tuple(tuple(compress(row, kept)) for row in each.rows)) for each in self.groups)
        return Table(self.title, tuple(compress(self.columns, kept)), tuple(groups))


@dataclass(frozen=True, slots=True)
class Gallery:
    """Figures side by side."""

    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """A command, as it is typed."""

    text: str


Block = Statements | Table | Gallery | Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report: its title, sentences on its subject, a block under each heading, and files of numbers by name.

    Sections whose list, gallery or command is empty are left out.
    """

    title: str
    subject: tuple[str, ...]
    sections: Mapping[str, Block]
    records: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        empty = (Statements(()), Gallery(()), Code(""))
        sections = {title: block for title, block in self.sections.items() if block not in empty}
        object.__setattr__(self, "sections", sections)

    @property
    def conclusions(self) -> tuple[Statement, ...]:
        """The statements in the tone `conclusions`."""
        lists = (block for block in self.sections.values() if isinstance(block, Statements))
        return tuple(item for block in lists if block.tone == "conclusions" for item in block.items)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures."""
        blocks = self.sections.values()
        return tuple(figure for block in blocks if isinstance(block, Gallery) for figure in block.figures)

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables."""
        return tuple(block for block in self.sections.values() if isinstance(block, Table))
