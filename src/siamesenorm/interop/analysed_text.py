"""Analyse a language model of another library, such as a rewired one, or an exported model, on a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.analysis.held_out import Analysis, HeldOut
from siamesenorm.errors import UserError
from siamesenorm.evaluation.evaluation import RAW, Record, evaluate_each
from siamesenorm.interop.language_models import open_language_model
from siamesenorm.interop.library_models import TransformersModel
from siamesenorm.interop.native_models import NativeModel
from siamesenorm.interop.stored import detect
from siamesenorm.interop.trained_model import TrainedModel
from siamesenorm.progress import Progress
from siamesenorm.training.execution import find_device

TOKEN_FILE = ".npy"


@dataclass(frozen=True, slots=True)
class TextModel:
    """A language model, and windows of the tokens of a text, [windows, context + 1], that it is analysed on."""

    model: nn.Module
    windows: Tensor
    step: int = 0
    """Step of the weights; 0 where none is recorded."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of weights there are."""
        return (RAW,)

    @classmethod
    def open(cls, path: Path, text: Path, *, context: int, device: str = "cpu") -> TextModel:
        """Return the model in a directory with a text, in windows of at most `context` tokens.

        A file .npy holds token ids; any other one is text in UTF-8 for the tokenizer beside the model. Raises UserError
        for other models, for a text that is too short, and for ids that the model does not have.
        """
        if context < 1:
            raise UserError(f"--context is {context}: write at least 1 token")
        place, stored = find_device(device), detect(path)
        if not isinstance(stored, NativeModel | TransformersModel):
            raise UserError(f"{path} holds a {stored.name}, which reads no text: name a language model")
        if not text.is_file():
            raise UserError(f"{text}: no such file: give a text, or token ids as {TOKEN_FILE}")
        if text.suffix == TOKEN_FILE:
            model, ids = stored.load().to(place), _read_ids(text)
        else:
            opened = open_language_model(str(path), device=place)
            model, ids = opened.model, torch.tensor(opened.encode([_read_text(text)])[0], dtype=torch.int64)
        length, vocabulary = _limits(model, context)
        unknown = ids[(ids < 0) | (ids >= vocabulary)]
        if len(unknown):
            raise UserError(f"{text} has token {int(unknown[0])}, the model has {vocabulary}: give its own tokens")
        count = (len(ids) - 1) // length
        if count < 1:
            raise UserError(f"{text} has {len(ids)} tokens, a sample needs {length + 1}: give more, or less --context")
        windows = torch.stack([ids[k * length : (k + 1) * length + 1] for k in range(count)])
        return cls(model.eval(), windows.to(place), stored.checkpoint.step if isinstance(stored, TrainedModel) else 0)

    def held_out(self, samples: int) -> HeldOut:
        """Return the model on the first windows."""
        windows = self.windows[:samples]

        def evaluate(model: nn.Module) -> Mapping[str, float]:
            total = 0.0
            for window in torch.split(windows, 1):
                logits = model(window[:, :-1]).logits.float()
                total += float(F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()))
            return {"loss": total / len(windows), "items": windows[:, 1:].numel()}

        return HeldOut(self.model, evaluate)

    def evaluate(self, analyses: Sequence[Analysis], on_progress: Progress = lambda done, what: None) -> list[Record]:
        """Return a record of each analysis; raises UserError before anything is computed where one does not fit."""
        for analysis in analyses:
            analysis.require_model(self.model)

        def results_of(analysis: Analysis, show: Progress) -> Mapping[str, Any]:
            with torch.no_grad():
                return analysis.results(self.held_out(analysis.samples))

        return evaluate_each(analyses, results_of, on_progress, step=self.step, weights=RAW)


def _limits(model: Any, context: int) -> tuple[int, int]:
    """Return the tokens of a window and the number of token ids; a model of transformers is set to keep no cache."""
    if hasattr(model, "get_input_embeddings"):
        model.config.use_cache = False
        longest = getattr(model.config, "max_position_embeddings", context)
        return min(context, longest), model.get_input_embeddings().weight.shape[0]
    return min(context, model.config.context), model.config.vocabulary


def _read_ids(file: Path) -> Tensor:
    """Return token ids of a .npy file, int64."""
    import numpy as np

    try:
        ids = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): save an array of token ids") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"{file} is {ids.dtype} {list(ids.shape)}: save whole numbers in one dimension")
    return torch.from_numpy(ids.astype(np.int64))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as UTF-8 ({error}): give a text file") from error
