"""A native language model on disk, whatever wrote it: a run, one of its checkpoints, or an exported directory.

Exported directories need torch and safetensors alone. A model is read to be used, not to go on with its run: it
computes in the dtype of its weights, where a run in bfloat16 relied on autocast, and by the plain formulas.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.interop.remote_code import MODEL_TYPE, PREFIX
from siamesenorm.models.language import LanguageModel, LanguageModelConfig, build_language_model
from siamesenorm.topologies.topology import Reader

if TYPE_CHECKING:
    from siamesenorm.data.tokenizer import Tokenizer

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CARD_FILE = "config.json", "model.safetensors", "tokenizer.json", "README.md"
NATIVE_FORMAT = "siamesenorm"
"""The value of "format" in the configuration of a directory in the native format."""
KINDS = "name the directory of a run, of one of its checkpoints, or of an exported model"


class StoredModel(Protocol):
    """What can be read of a model on disk; everything raises UserError for files that are missing or damaged."""

    @property
    def path(self) -> Path:
        """Where it was found."""

    def config(self) -> LanguageModelConfig:
        """Return the configuration, for use."""

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their native names."""

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that goes with the model."""

    def seed(self) -> int:
        """Return the seed of the initial weights."""

    def card(self) -> str:
        """Return the model card."""


def open_stored(path: str | Path, *, data: Path | None = None) -> StoredModel:
    """Return the model at `path`; `data` is the prepared data of a run, where they were moved.

    Raises UserError unless it is the directory of a run, of a checkpoint of a run, or of an exported model.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such directory: {KINDS}")
    record = _read_config(path)
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


def build(stored: StoredModel) -> LanguageModel:
    """Return the model with its weights; raises as `load_native`."""
    weights = stored.weights()
    model = build_language_model(stored.config(), device="meta").to_empty(device="cpu")
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        name = wrong[0]
        raise UserError(
            f"{stored.path}: {len(wrong)} weights are not those of its configuration, such as {name}: "
            f"{found.get(name, 'none')} there, {expected.get(name, 'none')} needed"
        )
    wide = any(tensor.dtype == torch.float64 for tensor in weights.values())
    model = model.double() if wide else model
    model.load_state_dict(weights)
    if model.config.residual_dtype != "inherit":
        compute_in(model, model.embedding.weight.dtype)
    return model.eval()


def compute_in(model: LanguageModel, dtype: torch.dtype) -> None:
    """Let sublayers and head see this dtype, that of their weights, whatever the dtype of the streams."""
    for module in model.modules():
        if isinstance(module, Reader):
            module.compute_dtype = dtype


def for_use(config: LanguageModelConfig) -> LanguageModelConfig:
    """Return the configuration without what belongs to the way a run was carried out."""
    return dataclasses.replace(config, compute_dtype="inherit", kernels="plain")


class ExportedModel:
    """A directory that `siamesenorm export` wrote in either format, or transformers for one of our classes."""

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        self.path = path
        self.record = record
        self.is_native = record.get("format") == NATIVE_FORMAT

    def config(self) -> LanguageModelConfig:
        """Return the configuration, for use."""
        names = {field.name for field in dataclasses.fields(LanguageModelConfig)}
        fields = self.record.get("model") if self.is_native else self.record
        try:
            given = {name: value for name, value in dict(fields or {}).items() if name in names}
            return for_use(LanguageModelConfig.from_json(given))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{self.path / CONFIG_FILE}: not the configuration of a model: {error}") from error

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their native names, of one file or several."""
        files = sorted(self.path.glob("model*.safetensors"))
        if not files:
            raise UserError(f"{self.path}: no {WEIGHTS_FILE}: export the model again")
        try:
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path}: the weights cannot be read ({error}): export the model again") from error
        prefix = "" if self.is_native else PREFIX
        return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer beside the weights."""
        from siamesenorm.data.tokenizer import LibraryTokenizer

        file = self.path / TOKENIZER_FILE
        if not file.is_file():
            raise UserError(f"{file}: missing: save the tokenizer beside the model")
        end_of_text = self.record.get("end_of_text" if self.is_native else "eos_token_id")
        return LibraryTokenizer(self.path.name, file.read_bytes(), end_of_text if type(end_of_text) is int else None)

    def seed(self) -> int:
        """Return the seed of the initial weights."""
        seed = self.record.get("seed", 0)
        return seed if type(seed) is int else 0

    def card(self) -> str:
        """Return the model card; a line where there is none."""
        file = self.path / CARD_FILE
        return file.read_text() if file.is_file() else f"# {self.config().label}\n\nA language model of siamesenorm.\n"


def _read_config(path: Path) -> dict[str, Any]:
    """Return what config.json holds; nothing where there is none, as in a checkpoint."""
    file = path / CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): {KINDS}") from error
    if not isinstance(record, dict):
        raise UserError(f"{file} holds no configuration: {KINDS}")
    return record
