"""Write a native model as a directory: for Hugging Face, or in the native format (names as they are, no code).

Both hold safetensors, JSON and a tokenizer, and both are read by `load_native`, `siamesenorm generate` and this module
itself: exporting an exported directory in the native format is the way back.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.files import disk_errors, sync_directory
from siamesenorm.interop.exported_tokenizer import generation_config, tokenizer_config, tokenizer_file
from siamesenorm.interop.native_model import load_native, open_stored
from siamesenorm.interop.remote_code import ARCHITECTURE, AUTO_MAP, MODEL_TYPE, PREFIX, REMOTE_CODE, REMOTE_CODE_FILE
from siamesenorm.interop.stored_model import (
    CARD_FILE,
    CONFIG_FILE,
    NATIVE_FORMAT,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    StoredModel,
    build,
)

__all__ = ["Format", "export", "load_native", "open_stored"]

Format = Literal["huggingface", "native"]


def export(source: str | Path, out: Path, *, format: Format = "huggingface", data: Path | None = None) -> StoredModel:
    """Write the model at `source` (a run, a checkpoint, an exported directory) to the new directory `out`.

    `data` is the prepared data of a run, where they were moved: the tokenizer is there. Returns what was read. Raises
    UserError for a source that holds no whole model, and for a directory that is there and not empty; nothing is left
    half-written.
    """
    check_new(out)
    stored = open_stored(source, data=data)
    build(stored)  # weights that are not those of the configuration are refused before anything is written
    write = _write_native if format == "native" else _write_huggingface
    with new_directory(out) as directory:
        write(stored, directory)
    return stored


def _write_huggingface(stored: StoredModel, directory: Path) -> None:
    weights, config, tokenizer = stored.weights(), stored.config(), stored.tokenizer()
    file, end_of_text = tokenizer_file(tokenizer), tokenizer.end_of_text
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    record = {name: value for name, value in config.to_json().items() if name != "family"}
    record |= {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "auto_map": AUTO_MAP, "dtype": dtype}
    record |= {"eos_token_id": end_of_text, "seed": stored.seed()}
    _write_json(directory / CONFIG_FILE, record)
    _save_weights({PREFIX + name: tensor for name, tensor in weights.items()}, directory)
    _write_json(directory / "generation_config.json", generation_config(end_of_text))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(file, end_of_text, config.context))
    (directory / TOKENIZER_FILE).write_bytes(file)
    (directory / REMOTE_CODE_FILE).write_text(REMOTE_CODE)
    (directory / CARD_FILE).write_text(stored.card(), encoding="utf-8")


def _write_native(stored: StoredModel, directory: Path) -> None:
    tokenizer = stored.tokenizer()
    record = {"format": NATIVE_FORMAT, "end_of_text": tokenizer.end_of_text, "seed": stored.seed()}
    _write_json(directory / CONFIG_FILE, {**record, "model": stored.config().to_json()})
    _save_weights(stored.weights(), directory)
    (directory / TOKENIZER_FILE).write_bytes(tokenizer_file(tokenizer))
    (directory / CARD_FILE).write_text(stored.card(), encoding="utf-8")


def _save_weights(weights: Mapping[str, Tensor], directory: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    try:
        save_file(contiguous, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # that is what a full disk is told by
        raise UserError(f"{directory.parent}: the weights cannot be written: {error}") from error
    # safetensors writes for its owner alone.
    shutil.copymode(directory / CONFIG_FILE, directory / WEIGHTS_FILE)


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def check_new(out: Path) -> None:
    """Raise UserError unless `out` can become a new directory: it is not there, or empty, and its place is writable."""
    with disk_errors(out):
        if out.is_symlink():
            raise UserError(f"{out} is a link: choose another directory, or name {out.readlink()} itself")
        if out.is_dir() and any(out.iterdir()):
            raise UserError(f"{out} is not empty: choose another directory")
        place = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not place.is_dir():
            raise UserError(f"{out} cannot be made, {place} is a file: choose another directory")
        place = next(path for path in out.absolute().parents if path.exists())
        if not os.access(place, os.W_OK | os.X_OK):
            raise UserError(f"{out} cannot be made in {place}: choose another directory, or permissions")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Give a directory beside `out` to write into, which becomes `out` at the end; on an error nothing is left.

    Raises UserError as `check_new`.
    """
    check_new(out)
    out = out.absolute()
    with disk_errors(out):
        missing = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f".{out.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            yield unfinished
            for file in unfinished.iterdir():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            sync_directory(unfinished)
            if out.exists():
                out.rmdir()
            unfinished.rename(out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            with suppress(OSError):  # where somebody else has put something
                for parent in missing:
                    parent.rmdir()
            raise
        sync_directory(out.parent)
