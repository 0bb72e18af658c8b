"""Any causal language model by its path or its name on the Hub, with its tokenizer, to be scored or continued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from siamesenorm.errors import UserError, optional, reason
from siamesenorm.interop.library_models import TransformersModel, library_errors
from siamesenorm.interop.native_models import NativeModel, require_finite
from siamesenorm.interop.stored import detect


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A causal language model in evaluation mode: one of this library, or of transformers.

    `encode` returns the token ids of texts without special tokens, and `start` is the token before a text, if any.
    """

    name: str
    model: nn.Module
    encode: Callable[[Sequence[str]], list[list[int]]]
    start: int | None
    notes: tuple[str, ...] = ()


def open_language_model(path: str, *, device: torch.device, data: Path | None = None) -> OpenedModel:
    """Return the language model in a directory, or, where there is none, of that name on the Hugging Face Hub.

    `data` is the prepared data of a run, where they were moved. Raises UserError for anything else, for a model without
    a tokenizer, and for weights that are not finite.
    """
    if path.count("/") == 1 and not Path(path).parent.exists():
        return _of_transformers(path, *_from_hub(path), device)
    stored = detect(path, data=data)
    if isinstance(stored, TransformersModel):
        opened = _of_transformers(Path(path).resolve().name, *load_transformers(stored), device)
    elif isinstance(stored, NativeModel):
        model, tokenizer = stored.load(), stored.tokenizer()
        require_vocabulary(tokenizer.vocabulary - 1, model.config.vocabulary, path)
        opened = OpenedModel(
            name=Path(path).resolve().name,
            model=model.to(device),
            encode=lambda texts: [ids.tolist() for ids in tokenizer.encode_batch(texts)],
            start=tokenizer.end_of_text,
            notes=stored.notes,
        )
    else:
        raise UserError(f"{path} holds a {stored.name}, which is no language model: name one")
    return opened


def load_transformers(stored: TransformersModel) -> tuple[Any, Any]:
    """Return the causal language model of a directory and its tokenizer; raises UserError for any other model."""
    library = stored.import_library()
    if not any(stored.path.glob("tokenizer*")) and not any(stored.path.glob("vocab.*")):
        raise UserError(f"{stored.path} has no tokenizer: save it beside the model (tokenizer.save_pretrained)")
    with library_errors(stored.path):
        tokenizer: Any = library.AutoTokenizer.from_pretrained(stored.path, local_files_only=True)
    model = cast(Any, stored.load())
    kind = type(model).__name__
    if not model.can_generate():
        raise UserError(f"{stored.path} holds a {kind}, which generates no text: name a language model")
    if model.config.is_encoder_decoder:
        raise UserError(f"{stored.path} holds a {kind}, which has an encoder: name a language model without one")
    require_finite(stored.path, model.state_dict())
    return model, tokenizer


def require_vocabulary(highest: int, tokens: int, name: str | Path) -> None:
    """Raise UserError for a token id beyond the vocabulary of a model."""
    if highest >= tokens:
        raise UserError(f"{name}: its tokenizer gives token {highest}, and the model has {tokens}: save its own")


def _from_hub(name: str) -> tuple[Any, Any]:
    library = optional("transformers", "hf", name)
    try:
        model = library.AutoModelForCausalLM.from_pretrained(name, use_safetensors=True).eval()
        return model, library.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the network and the Hub raise anything
        raise UserError(
            f"{name}: no such directory, nor a language model that the Hugging Face Hub could give ({reason(error)}): "
            "name the directory of one"
        ) from error


def _of_transformers(name: str, model: Any, tokenizer: Any, device: torch.device) -> OpenedModel:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False).input_ids
        require_vocabulary(max((max(ids, default=0) for ids in found), default=0), size, name)
        return found

    size = model.get_input_embeddings().weight.shape[0]
    start = next((each for each in (tokenizer.bos_token_id, tokenizer.eos_token_id) if each is not None), None)
    return OpenedModel(name=name, model=model.to(device), encode=encode, start=start)
