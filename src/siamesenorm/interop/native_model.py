"""A native language model by its path: the directory of a run, one of its checkpoints, or an exported directory.

Exported directories need torch and safetensors alone.
"""

from __future__ import annotations

from pathlib import Path

from siamesenorm.errors import UserError
from siamesenorm.interop.exported_model import ExportedModel
from siamesenorm.interop.model_directory import ModelDirectory, look_into
from siamesenorm.interop.stored_model import KINDS, StoredModel, build
from siamesenorm.models.language import LanguageModel


def open_stored(path: str | Path, *, data: Path | None = None) -> StoredModel:
    """Return the model at `path`; `data` is the prepared data of a run, where they were moved.

    Raises UserError unless it is the directory of a run, of a checkpoint of a run, or of an exported model.
    """
    return read_stored(look_into(Path(path), KINDS), data=data)


def read_stored(found: ModelDirectory, *, data: Path | None = None) -> StoredModel:
    """Return the model that was found; otherwise as `open_stored`."""
    if found.operated:
        raise UserError(
            f"{found.path} holds a {found.name}, which was rewired or had its norms swapped and is in the format of "
            f"{found.library} already: siamesenorm.from_pretrained({str(found.path)!r}) loads it"
        )
    if found.kind == "library":
        raise UserError(
            f"{found.path} holds a model of {found.library}, {found.name!r}, which is none of ours: {KINDS}"
        )
    if found.kind == "export":
        return ExportedModel(found.path, found.config)
    from siamesenorm.interop.trained_model import TrainedModel

    return TrainedModel.of(found, data)


def load_native(path: str | Path) -> LanguageModel:
    """Return the model at `path` (a run, a checkpoint, an exported directory) in evaluation mode, in fp32 or fp64.

    Weights of fewer bits are widened, which is exact. Raises UserError for everything else, and for weights that are
    not those of the configuration.
    """
    return build(open_stored(path))
