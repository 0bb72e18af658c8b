"""What lies at a path: a run, a checkpoint, an exported model, or a model of a library; looked up once, here.

Nothing is loaded, and no library is imported.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from siamesenorm.errors import UserError
from siamesenorm.interop.library import read_config
from siamesenorm.interop.loading import FORMATS, NATIVE_TYPE

Kind = Literal["run", "checkpoint", "export", "library"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """A directory that holds a model, as it was named, and the content of its config.json; a checkpoint has none.

    `library` and `name` say whose model it is and what it is called there, and `operated` whether it was rewired or had
    its norms swapped; for models of this library they are empty.
    """

    path: Path
    kind: Kind
    config: dict[str, Any]
    library: str = ""
    name: str = ""
    operated: bool = False

    @property
    def full_path(self) -> Path:
        """The path by which a checkpoint was known, with the names of its own directory and the one above."""
        return _full_path(self.path)


def look_into(path: Path, wanted: str = "name the directory of a model") -> ModelDirectory:
    """Return what a directory holds; raises UserError, ending in what is `wanted`, where that is no model."""
    if not path.is_dir():
        raise UserError(_absent(path, wanted))
    if not (path / "config.json").is_file():
        if _is_checkpoint(_full_path(path)):
            return ModelDirectory(path=path, kind="checkpoint", config={})
        raise UserError(_no_configuration(path, wanted))
    config = read_config(path)
    if NATIVE_TYPE in (config.get("model_type"), config.get("format")):
        return ModelDirectory(path=path, kind="export", config=config)
    for format in FORMATS:
        name = config.get(format.mark)
        if isinstance(name, str):
            operated = name.startswith(format.prefix)
            return ModelDirectory(
                path=path, kind="library", config=config, library=format.library, name=name, operated=operated
            )
    if "schema" in config or isinstance(config.get("model"), dict):
        return ModelDirectory(path=path, kind="run", config=config)
    marks = ", ".join(f"{format.mark} ({format.library})" for format in FORMATS)
    raise UserError(f"{path} holds no model: its config.json is not of a run, and has none of {marks}: {wanted}")


def _full_path(path: Path) -> Path:
    """Return a path with all its names: with links as they are, or where they lead if that is a checkpoint."""
    named, led_to = Path(os.path.abspath(path)), path.resolve()
    return led_to if _is_checkpoint(led_to) and not _is_checkpoint(named) else named


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step-") and path.parent.name == "checkpoints"


def _absent(path: Path, wanted: str) -> str:
    if path.exists():
        return f"{path} is a file, no directory: {wanted}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists():
        return (
            f"{path} is no directory here, and nothing is downloaded: if it is a model of the Hub, run "
            f"hf download {path} --local-dir {path.name} first"
        )
    return f"{path}: no such directory: {wanted}"


def _no_configuration(path: Path, wanted: str) -> str:
    if (path / "model_index.json").is_file():
        return f"{path} holds a pipeline of diffusers: name its model, {path / 'transformer'}"
    if (path / "adapter_config.json").is_file():
        return f"{path} holds an adapter, and no model: merge it into its model first"
    if list(path.glob("*.gguf")):
        return f"{path} holds GGUF files: name the safetensors model that they were made from"
    return f"{path} has no config.json: {wanted}"
