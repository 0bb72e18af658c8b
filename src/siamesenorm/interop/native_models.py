"""Language models of this library on disk: an export, or (`trained_model`) a run, and the model that is built from it.

A model is read for use, not to continue its run: it computes in the dtype of its weights, where a run in bfloat16
relied on autocast, and by the plain formulas. Reading an export needs torch and safetensors alone.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.interop.export import (
    CARD_FILE,
    CONFIG_FILE,
    DIGEST,
    MODEL_TYPE,
    PREFIX,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    digest,
    write_export,
)
from siamesenorm.interop.stored_model import StoredModel
from siamesenorm.models.language import LanguageModel, LanguageModelConfig, build_language_model
from siamesenorm.topologies.topology import Reader

if TYPE_CHECKING:
    from siamesenorm.data.tokenizer import Tokenizer


class NativeModel(StoredModel):
    """A language model of this library."""

    library = "siamesenorm"

    @abstractmethod
    def config(self) -> LanguageModelConfig:
        """Return the configuration, for use."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their native names."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model."""

    @abstractmethod
    def seed(self) -> int:
        """Return the seed of the initial weights."""

    @abstractmethod
    def card(self) -> str:
        """Return the model card."""

    def load(self, **options: Any) -> LanguageModel:
        """Return the model in evaluation mode; weights of fewer bits than fp32 are widened, which is exact.

        Raises UserError for weights that are not those of the configuration, or not finite.
        """
        if options:
            raise UserError(f"{next(iter(options))}: a native model takes no options, leave it out")
        weights = self.weights()
        model = build_language_model(self.config(), device="meta").to_empty(device="cpu")
        self._require(model.state_dict(), weights)
        wide = any(tensor.dtype == torch.float64 for tensor in weights.values())
        model = model.double() if wide else model
        model.load_state_dict(weights)
        if model.config.residual_dtype != "inherit":
            compute_in(model, model.embedding.weight.dtype)
        return model.eval()

    def save(self, model: LanguageModel, target: Path) -> None:
        """Write the model as an export; the model card stays behind, since it describes another model."""
        write_export(
            target,
            config=for_use(model.config),
            weights=model.state_dict(),
            tokenizer=self.tokenizer(),
            seed=self.seed(),
            card=default_card(model.config),
        )

    def _require(self, state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if found != expected:
            wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            name = wrong[0]
            raise UserError(
                f"{self.path}: {len(wrong)} weights are not those of its configuration, such as {name}: "
                f"{found.get(name, 'none')} there, {expected.get(name, 'none')} needed"
            )
        require_finite(self.path, weights)


class ExportedModel(NativeModel):
    """A directory that `siamesenorm export` wrote, or transformers for one of our classes."""

    @classmethod
    def detect(cls, path: Path, record: dict[str, Any], data: Path | None) -> Self | None:
        """Return the export whose configuration has our `model_type`."""
        if record.get("model_type") != MODEL_TYPE:
            return None
        return cls(path=path, record=record, name=MODEL_TYPE)

    def config(self) -> LanguageModelConfig:
        """Return the configuration, for use."""
        names = {field.name for field in dataclasses.fields(LanguageModelConfig)}
        try:
            given = {name: value for name, value in self.record.items() if name in names}
            return for_use(LanguageModelConfig.from_json(given))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{self.path / CONFIG_FILE}: not the configuration of a model: {error}") from error

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their native names, of one file or several."""
        files = sorted(self.path.glob("model*.safetensors"))
        if not files:
            raise UserError(f"{self.path}: no {WEIGHTS_FILE}: export the model again")
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path}: the weights cannot be read ({error}): export the model again") from error
        if self.record.get(DIGEST) not in (None, digest(weights)):
            raise UserError(f"{self.path}: the weights have changed since they were written: copy or export them again")
        return {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer beside the weights."""
        from siamesenorm.data.tokenizer import LibraryTokenizer

        file = self.path / TOKENIZER_FILE
        if not file.is_file():
            raise UserError(f"{file}: missing: save the tokenizer beside the model")
        end_of_text = self.record.get("eos_token_id")
        return LibraryTokenizer(self.path.name, file.read_bytes(), end_of_text if type(end_of_text) is int else None)

    def seed(self) -> int:
        """Return the seed of the initial weights."""
        seed = self.record.get("seed", 0)
        return seed if type(seed) is int else 0

    def card(self) -> str:
        """Return the model card; a line where there is none."""
        file = self.path / CARD_FILE
        if not file.is_file():
            return default_card(self.config())
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read ({error}): save it as UTF-8, or remove it") from error


def default_card(config: LanguageModelConfig) -> str:
    """Return the card of a model without a record of its training."""
    return f"# {config.label}\n\nA language model of siamesenorm.\n"


def require_known(ids: Sequence[int], tokens: int, directory: Path) -> None:
    """Raise UserError for a token id beyond the vocabulary of a model."""
    if max(ids) >= tokens:
        raise UserError(
            f"{directory}: its tokenizer gives token {max(ids)}, and the model has {tokens}, from 0: save the model's "
            "own tokenizer beside it"
        )


def require_finite(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise UserError for weights that are NaN or infinite."""
    wrong = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if wrong:
        raise UserError(
            f"{directory}: {len(wrong)} of {len(weights)} weights are not finite, such as {wrong[0]}: the training "
            "diverged or the file is damaged; name an earlier checkpoint"
        )


def compute_in(model: LanguageModel, dtype: torch.dtype) -> None:
    """Set the dtype that sublayers and head compute in, whatever the dtype of the streams."""
    for module in model.modules():
        if isinstance(module, Reader):
            module.compute_dtype = dtype


def for_use(config: LanguageModelConfig) -> LanguageModelConfig:
    """Return the configuration without what belongs to the execution of a run."""
    return dataclasses.replace(config, compute_dtype="inherit")
