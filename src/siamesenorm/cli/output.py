"""What several commands print: notes, tables on a console, and their own command line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable

from rich.console import Console

PAGE_WIDTH = 140
"""Columns of a table that is not printed on a terminal."""


def console() -> Console:
    """Return the console of standard output, as wide as the terminal."""
    return Console(width=None if sys.stdout.isatty() else PAGE_WIDTH)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on standard error, a line each."""
    for note in notes:
        print(f"siamesenorm: note: {note}", file=sys.stderr)


def command_line() -> str:
    """Return the command of this process, as a shell reads it."""
    return shlex.join(["siamesenorm", *sys.argv[1:]])
