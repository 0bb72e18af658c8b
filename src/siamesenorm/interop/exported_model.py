"""An exported native model: a directory in either format, which torch and safetensors alone can read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.interop.remote_code import PREFIX
from siamesenorm.interop.stored_model import (
    CARD_FILE,
    CONFIG_FILE,
    NATIVE_FORMAT,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    for_use,
)
from siamesenorm.models.language import LanguageModelConfig

if TYPE_CHECKING:
    from siamesenorm.data.tokenizer import Tokenizer


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
        if not file.is_file():
            return f"# {self.config().label}\n\nA language model of siamesenorm.\n"
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read ({error}): save it as UTF-8, or remove it") from error
