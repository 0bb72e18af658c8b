"""Fill the tables of pages from results files.

    python benchmarks/pages.py docs/performance.md

A table is between `<!-- table FILE: column, column where key=value -->` and `<!-- end -->`; FILE is relative to the
page, and the condition is optional.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from siamesenorm.benchmark.results import Row, markdown
from siamesenorm.errors import UserError

TABLE = re.compile(r"(<!-- table (\S+): (.+?)(?: where (\w+)=(.+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_tables(page: str, directory: Path) -> str:
    """Return a page with every table filled from its file; raises UserError for a column that no row has."""
    return TABLE.sub(lambda match: f"{match[1]}{_table(match, directory)}\n{match[6]}", page)


def _table(match: re.Match[str], directory: Path) -> str:
    file, columns = match[2], [column.strip() for column in match[3].split(",")]
    rows: list[Row] = json.loads((directory / file).read_text())["rows"]
    chosen = [row for row in rows if match[4] is None or str(row.get(match[4])) == match[5]]
    for column in columns:
        if not any(column in row for row in chosen):
            raise UserError(f"no row of {file} has {column!r}: choose from {', '.join(rows[0] if rows else ())}")
    named = [{column.replace("_", " "): row.get(column) for column in columns} for row in chosen]
    return markdown(named, [column.replace("_", " ") for column in columns])


def main() -> None:
    """Fill the tables of the pages named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(fill_tables(path.read_text(), path.parent))


if __name__ == "__main__":
    main()
