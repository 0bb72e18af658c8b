"""The one exception that bad input raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: its message is one line that names the value and the remedy; the command line exits with 2."""


def unknown(what: str, value: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that is not in a registry, with the nearest names first."""
    names = sorted(known)
    nearest = difflib.get_close_matches(value, names, n=3, cutoff=0.5)
    remedy = f"did you mean {' or '.join(nearest)}?" if nearest else f"choose from {', '.join(names)}"
    return UserError(f"unknown {what} {value!r}: {remedy}")


def reason(error: Exception) -> str:
    """Return the first line of an exception's message, or the name of its type where there is none."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
