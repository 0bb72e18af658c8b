"""What is the same for every library of models: its import, its errors in one line, its progress bars, its files."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from siamesenorm.errors import UserError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The floating dtypes of safetensors by its own names."""


def import_library(name: str, extra: str, directory: Path) -> Any:
    """Return a library; raises UserError, with the extra of this package that brings it, if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{directory} is a model of {name}, which cannot be imported ({error}): pip install 'siamesenorm[{extra}]'"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json in a directory, empty without one; raises UserError for a damaged one."""
    file = directory / "config.json"
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{file} holds no configuration of a model, but a {type(record).__name__}: name another directory"
        )
    return record


def stored_dtype(file: Path) -> torch.dtype:
    """Return the dtype of most floating tensors in a file of safetensors; fp32 if there are none."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        found = [tensors.get_slice(name).get_dtype() for name in tensors.keys()]  # noqa: SIM118  not a mapping
    floating = [dtype for dtype in found if dtype in DTYPES] or ["F32"]
    return DTYPES[max(set(floating), key=floating.count)]


def require_whole(directory: Path, info: Mapping[str, Any], *, ignored: Sequence[str] = ()) -> None:
    """Raise UserError unless the weights of a directory are those of its model: all, of its shapes, and no others.

    `info` is what `output_loading_info=True` adds in transformers and diffusers; `ignored` are patterns of names that
    old versions saved and that are no weights.
    """
    found = {
        "lacks": info.get("missing_keys", ()),
        "has, with no place in the model,": [
            name for name in info.get("unexpected_keys", ()) if not any(re.search(one, name) for one in ignored)
        ],
        "has in another shape": [name for name, *_ in info.get("mismatched_keys", ())],
    }
    wrong = [f"{verb} {_counted(sorted(names))}" for verb, names in found.items() if names]
    if wrong:
        raise UserError(f"{directory} {', and '.join(wrong)}: its files are not those of its config.json")


def _counted(names: Sequence[str]) -> str:
    weights = "1 weight" if len(names) == 1 else f"{len(names)} weights"
    return f"{weights} ({', '.join([*names[:3], *(['...'] if len(names) > 3 else [])])})"


@contextmanager
def library_errors(directory: Path) -> Iterator[None]:
    """Turn whatever a library raises over a directory into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any class: libraries raise their own over damaged files
        raise UserError(f"{directory} cannot be loaded: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    """Return the first sentence of an error; where it only announces what follows, that too, shortened."""
    text = str(error).strip() or type(error).__name__
    sentence: str = re.split(r"\n|(?<=[.!?]) ", text)[0]
    return textwrap.shorten(text, 240, placeholder=" ...") if sentence.endswith(":") else sentence


@contextmanager
def safetensors_errors(target: Path) -> Iterator[None]:
    """Raise as OSError what safetensors reports of the disk in an error of its own."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from error


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Silence a library's warnings about weights, which are refused here, and its progress bars in files and pipes."""
    logger = logging.getLogger(library.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    bars: Any = library.utils.logging if library.__name__ == "transformers" else None
    hide = bars is not None and bars.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hide:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hide:
            bars.enable_progress_bar()
