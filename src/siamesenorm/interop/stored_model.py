"""A native language model as it lies on disk, whatever wrote it, and the model in memory that is built from it.

A model is read to be used, not to go on with its run: it computes in the dtype of its weights, where a run in bfloat16
relied on autocast, and by the plain formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from siamesenorm.errors import UserError
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


def build(stored: StoredModel) -> LanguageModel:
    """Return the model with its weights; raises UserError if they are not those of its configuration.

    Weights of fewer bits than fp32 are widened, which is exact.
    """
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


def require_known(ids: Sequence[int], tokens: int, directory: Path) -> None:
    """Raise UserError for the id of a token that a model of so many tokens does not know."""
    if max(ids) >= tokens:
        raise UserError(
            f"{directory}: its tokenizer gives token {max(ids)}, and the model knows {tokens}, from 0: save the "
            "model's own tokenizer beside it"
        )


def compute_in(model: LanguageModel, dtype: torch.dtype) -> None:
    """Let sublayers and head see this dtype, that of their weights, whatever the dtype of the streams."""
    for module in model.modules():
        if isinstance(module, Reader):
            module.compute_dtype = dtype


def for_use(config: LanguageModelConfig) -> LanguageModelConfig:
    """Return the configuration without what belongs to the way a run was carried out."""
    return dataclasses.replace(config, compute_dtype="inherit")
