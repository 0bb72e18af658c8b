"""The parts of which a report is made: sections of statements, tables, figures and commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from siamesenorm.comparison.figures import Figure
from siamesenorm.comparison.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One thing a report says, under its topic; `link` is the text and the address of a link behind it."""

    topic: str
    text: str
    link: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    """A list of statements, shown in a tone: `conclusions` or `quiet`."""

    items: tuple[Statement, ...]
    tone: str = "quiet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """Figures side by side."""

    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A command, as it is typed."""

    text: str


Block = Statements | Table | Gallery | Code


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading and what is below it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report: its title, some sentences on its subject, its sections, and files of numbers by name."""

    title: str
    subject: tuple[str, ...]
    sections: tuple[ReportSection, ...]
    records: Mapping[str, str] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of all sections."""
        return tuple(block for section in self.sections for block in section.blocks)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures of all sections."""
        return tuple(figure for block in self.blocks if isinstance(block, Gallery) for figure in block.figures)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of all sections."""
        return tuple(block for block in self.blocks if isinstance(block, Table))
