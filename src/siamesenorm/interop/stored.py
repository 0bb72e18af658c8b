"""Open a model by its path, whichever library wrote it: one table of libraries, each with its detection and loading."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.library_models import DiffusersModel, LibraryModel, TimmModel, TransformersModel
from siamesenorm.interop.native_models import ExportedModel, NativeModel
from siamesenorm.interop.stored_model import StoredModel, check_new, new_directory, read_config

LIBRARIES = (ExportedModel, TransformersModel, DiffusersModel, TimmModel)
"""The first that recognises a directory opens it; what none of them does may be a run."""
OTHERS = {
    "model_index.json": "holds a pipeline of diffusers: name the directory transformer in it",
    "adapter_config.json": "holds an adapter, and no model: merge it into its model first",
    "*.gguf": "holds GGUF files: name the safetensors model that they were made from",
}
"""What a directory without config.json holds by its files, with the remedy."""


def detect(path: str | Path, *, data: Path | None = None) -> StoredModel:
    """Return the model in a directory, not loaded yet; `data` is a run's prepared data, if moved; raises UserError."""
    path = Path(path)
    if not path.is_dir():
        what = " is a file, not a directory" if path.exists() else ": no such directory"
        of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists()
        fetch = f"; to fetch one from the Hub, run hf download {path} --local-dir {path.name} first" if of_hub else ""
        raise UserError(f"{path}{what}: name the directory of a model{fetch}")
    record = read_config(path)
    for library in LIBRARIES:
        if found := library.detect(path, record):
            return found
    # A checkpoint is found by the names of its path, links kept or resolved.
    paths = () if record else (Path(os.path.abspath(path)), path.resolve())
    named = (one for one in paths if one.name.startswith("step-") and one.parent.name == "checkpoints")
    checkpoint = next(named, None)
    if checkpoint or "schema" in record or isinstance(record.get("model"), dict):
        from siamesenorm.interop.trained_model import TrainedModel

        return TrainedModel(path=path, record=record, name="run", checkpoint_path=checkpoint, data=data)
    if not (path / "config.json").is_file():
        others = (text for pattern, text in OTHERS.items() if list(path.glob(pattern)))
        raise UserError(f"{path} {next(others, 'has no config.json: name the directory of a model')}")
    marks = ", ".join(f"{kind.mark} ({kind.library})" for kind in (TransformersModel, DiffusersModel, TimmModel))
    raise UserError(f"{path / 'config.json'} is not of a run, and has none of {marks}: name the directory of a model")


def open_native(path: str | Path, *, data: Path | None = None) -> NativeModel:
    """Return the native model in a directory; raises UserError for anything else; `data` as in `detect`."""
    found = detect(path, data=data)
    if isinstance(found, NativeModel):
        return found
    if found.converted:
        raise UserError(f"{path} is in the format of {found.library} already: load it with siamesenorm.from_pretrained")
    raise UserError(f"{path} holds a model of {found.library}, {found.name!r}: name a run, a checkpoint or an export")


def from_pretrained(path: str | Path, **options: Any) -> nn.Module:
    """Return the model at `path`, in evaluation mode: one that was rewired or had its norms swapped, or a native one.

    A converted model is returned as what it is in its library (transformers, diffusers, timm), in the dtype of its
    weights, in timm in fp32, with that library's `options` (`dtype`; `device_map` in transformers; ...). A native one,
    from a run, a checkpoint or an export, is returned as a `LanguageModel`. Nothing is downloaded, and weights are
    safetensors. Raises UserError for a directory that holds none of these, or other weights than theirs.
    """
    found = detect(path)
    if isinstance(found, LibraryModel) and not found.converted:
        raise UserError(f"{path} holds an unconverted {found.name}: load it with {found.library}, then rewire it")
    model = found.load(**options)
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return model


def export(source: str | Path, out: Path, *, data: Path | None = None) -> NativeModel:
    """Write the native model at `source` to the new directory `out`, which transformers loads; return what was read.

    `data` is the prepared data of a run, where they were moved: the tokenizer is there. Raises UserError for a source
    that holds no whole model, and for a directory that is not empty; nothing is left half-written.
    """
    check_new(out)
    stored = open_native(source, data=data)
    stored.load()  # weights that are not those of the configuration are refused before anything is written
    with new_directory(out) as directory:
        stored.write(directory, *stored.contents(), stored.card())
    return stored
