"""A model of this library in a local directory: a run, one of its checkpoints, or an exported model, to be rewired.

What is written is the exported form, for Hugging Face; the model card of a run stays behind, for it tells of another
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from siamesenorm.interop.exported_tokenizer import generation_config
from siamesenorm.interop.library import import_library, progress_on_terminals_alone
from siamesenorm.interop.local_directory import Source, model_of_library
from siamesenorm.interop.model_directory import look_into
from siamesenorm.interop.native_model import open_stored
from siamesenorm.interop.stored_model import build
from siamesenorm.interop.surgery import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeModel:
    """A model that `open_stored` reads, as a `Source`; `data` is the prepared data of a run, where they were moved."""

    directory: Path
    data: Path | None = None

    @property
    def steps(self) -> list[Step]:
        """Nothing: its configuration says what it is, whatever was done to it."""
        return []

    def load(self) -> nn.Module:
        """Return the model in evaluation mode, in fp32 or fp64; raises UserError for a directory that is not whole."""
        return build(open_stored(self.directory, data=self.data))

    def start(self, seed: int) -> nn.Module:
        """Return the model with its weights: without them a directory is no model of this library."""
        return self.load()

    def save(self, model: Any, target: Path) -> None:
        """Write the model and its tokenizer for Hugging Face."""
        library = import_library("transformers", "hf", self.directory)
        from siamesenorm.interop.huggingface import SiameseNormForCausalLM
        from siamesenorm.interop.huggingface.tokenizer import tokenizer_for

        stored = open_stored(self.directory, data=self.data)
        tokenizer = tokenizer_for(stored.tokenizer(), model.config.context)
        options = {"eos_token_id": tokenizer.eos_token_id, "seed": stored.seed()}
        causal = SiameseNormForCausalLM.from_native(model, **options)
        causal.generation_config.update(**generation_config(tokenizer.eos_token_id))
        with progress_on_terminals_alone(library):
            causal.save_pretrained(target)
        tokenizer.save_pretrained(target)


def open_model(directory: Path, *, data: Path | None = None) -> Source:
    """Return the model that a directory holds, this library's or another's; raises UserError for everything else.

    `data` is the prepared data of a run, where they were moved.
    """
    found = look_into(directory)
    return model_of_library(found) if found.kind == "library" else NativeModel(directory=directory, data=data)
