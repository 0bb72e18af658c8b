"""Fill the tables of pages from committed experiments, and draw the figures that they show.

    python benchmarks/report_tables.py docs/comparison.md docs/digits.md docs/continued.md

A table is between `<!-- report EXPERIMENT: TITLE OF THE TABLE -->` and `<!-- end -->`; EXPERIMENT is a directory
relative to the page, or an item of `siamesenorm reproduce` that trains nothing. `<!-- figure EXPERIMENT: NAME FILE -->`
draws a figure of the report into a file.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from siamesenorm.cli.report import build_report
from siamesenorm.comparison.figure_style import LIGHT, render
from siamesenorm.comparison.report_parts import Report
from siamesenorm.comparison.report_writer import table_in_markdown
from siamesenorm.recipes.items import ITEMS


@cache
def report_of(directory: Path) -> Report:
    """Return the report of a directory, or of the experiment of that name that trains nothing, made once."""
    item = ITEMS.get(directory.name)
    return item.experiment() if item and item.experiment else build_report(directory)


TABLE = re.compile(r"(<!-- report (\S+): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"<!-- figure (\S+): (\S+) (\S+) -->")


def fill_tables(page: str, directory: Path) -> str:
    """Return a page with every table filled from its experiment; raises KeyError for a title that no table has."""

    def filled(match: re.Match[str]) -> str:
        tables = {table.title: table for table in report_of(directory / match[2]).tables}
        return f"{match[1]}{table_in_markdown(tables[match[3]])}{match[4]}"

    return TABLE.sub(filled, page)


def draw_figures(page: str, directory: Path) -> None:
    """Draw the figures that a page names."""
    for experiment, name, file in FIGURE.findall(page):
        figures = {figure.name: figure for figure in report_of(directory / experiment).figures}
        (directory / file).write_bytes(render(figures[name], LIGHT, "svg"))


def main() -> None:
    """Fill the tables and draw the figures of the pages named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        page = fill_tables(path.read_text(), path.parent)
        path.write_text(page)
        draw_figures(page, path.parent)


if __name__ == "__main__":
    main()
