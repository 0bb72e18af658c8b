"""A native language model by its path: the directory of a run, one of its checkpoints, or an exported directory.

Exported directories need torch and safetensors alone.
"""

from __future__ import annotations

from pathlib import Path

from siamesenorm.errors import UserError
from siamesenorm.interop.exported_model import ExportedModel
from siamesenorm.interop.library import read_config
from siamesenorm.interop.remote_code import MODEL_TYPE
from siamesenorm.interop.stored_model import KINDS, NATIVE_FORMAT, StoredModel, build
from siamesenorm.models.language import LanguageModel


def open_stored(path: str | Path, *, data: Path | None = None) -> StoredModel:
    """Return the model at `path`; `data` is the prepared data of a run, where they were moved.

    Raises UserError unless it is the directory of a run, of a checkpoint of a run, or of an exported model.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such directory: {KINDS}")
    record = read_config(path)
    if record.get("model_type") == MODEL_TYPE or record.get("format") == NATIVE_FORMAT:
        return ExportedModel(path, record)
    if "model_type" in record:
        raise UserError(f"{path} holds a model of type {record['model_type']!r}, which is none of ours: {KINDS}")
    from siamesenorm.interop.trained_model import TrainedModel

    return TrainedModel.of(path, data)


def load_native(path: str | Path) -> LanguageModel:
    """Return the model at `path` (a run, a checkpoint, an exported directory) in evaluation mode, in fp32 or fp64.

    Weights of fewer bits are widened, which is exact. Raises UserError for everything else, and for weights that are
    not those of the configuration.
    """
    return build(open_stored(path))
