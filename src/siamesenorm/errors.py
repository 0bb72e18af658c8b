"""The one exception that bad input raises, and what raises it at several places."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Bad input: its message is one line that names the value and the remedy; the command line exits with 2."""


def unknown(what: str, value: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that is not in a registry, with the nearest names first."""
    names = sorted(known)
    nearest = difflib.get_close_matches(value, names, n=3, cutoff=0.5)
    remedy = f"did you mean {' or '.join(nearest)}?" if nearest else f"choose from {', '.join(names)}"
    return UserError(f"unknown {what} {value!r}: {remedy}")


def optional(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional package; raises UserError, with the extra that installs it, without it."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # the latter by timm, where torchvision is of another torch
        install = f"pip install 'siamesenorm[{extra}]'"
        raise UserError(f"{what} needs {module.partition('.')[0]} ({reason(error)}): {install}") from error


def reason(error: Exception) -> str:
    """Return the first line of an exception's message, or the name of its type where there is none."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
