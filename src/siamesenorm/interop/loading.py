"""`siamesenorm.from_pretrained`: load whatever this package saved, by what the directory says it holds."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.library import (
    import_library,
    progress_on_terminals_alone,
    read_config,
    stored_dtype,
    told_in_one_line,
    weights_file,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How operated models of a library are known on disk, and which module loads them.

    `mark` is the field of config.json that its models have, and `prefix` how the value of an operated model begins.
    """

    library: str
    extra: str
    mark: str
    prefix: str
    adapter: str


FORMATS = (
    Format(
        library="transformers",
        extra="hf",
        mark="model_type",
        prefix="siamesenorm-",
        adapter="siamesenorm.interop.huggingface.operated",
    ),
    Format(
        library="diffusers",
        extra="diffusion",
        mark="_class_name",
        prefix="SiameseNorm",
        adapter="siamesenorm.interop.diffusers",
    ),
    Format(
        library="timm",
        extra="vision",
        mark="architecture",
        prefix="siamesenorm_",
        adapter="siamesenorm.interop.timm",
    ),
)
NATIVE_TYPE = "siamesenorm"
"""The `model_type` of a native model that was exported for transformers."""


def from_pretrained(path: str | Path, **options: Any) -> nn.Module:
    """Return the model at `path`, in evaluation mode: one that was rewired or had its norms swapped, or a native one.

    An operated model comes back as what it is in its library (transformers, diffusers, timm), in the dtype of its
    weights, in timm in fp32, with that library's `options` (`dtype`; `device_map` in transformers; ...). A native one,
    from a run, a checkpoint or an exported directory, comes back as a `LanguageModel`. Nothing is downloaded, and
    weights are safetensors. Raises UserError for a directory that holds none of these, or other weights than theirs.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"{path} is no directory here, and nothing is downloaded: name the directory of a model")
    record = read_config(directory)
    for kind in FORMATS:
        value = record.get(kind.mark)
        if isinstance(value, str) and value.startswith(kind.prefix):
            return _load(directory, kind, options)
        if isinstance(value, str) and value != NATIVE_TYPE:
            raise UserError(
                f"{path} holds a {value} of {kind.library}, to which nothing was done: load it with {kind.library}, "
                "and call siamesenorm.rewire or swap_norms"
            )
    if options:
        raise UserError(f"{next(iter(options))}: a native model takes no options, leave it out")
    native: nn.Module = importlib.import_module("siamesenorm.interop.native_model").load_native(directory)
    return native


def _load(directory: Path, kind: Format, options: dict[str, Any]) -> nn.Module:
    library = import_library(kind.library, kind.extra, directory)
    adapter = importlib.import_module(kind.adapter)
    if kind.library == "diffusers" and "torch_dtype" not in options:  # which loads in fp32 by default
        options = {**options, "torch_dtype": stored_dtype(weights_file(directory))}
    quiet = progress_on_terminals_alone(library) if kind.library == "transformers" else nullcontext()
    with told_in_one_line(directory), quiet:
        model: nn.Module = adapter.load(directory, **options)
    return model.eval()
