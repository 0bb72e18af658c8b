"""siamesenorm generate: a text continued by a model that was trained here, or one of transformers, as it comes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro

from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import UserError
from siamesenorm.files import encode_json
from siamesenorm.interop.local_directory import LocalModel, imported, model_of_library
from siamesenorm.interop.model_directory import look_into
from siamesenorm.interop.native_model import read_stored
from siamesenorm.interop.stored_model import build, require_known
from siamesenorm.models.language import LanguageModel

COLDEST = 1e-6
"""The lowest temperature above 0."""
Show = Callable[[str], None]
Continuation = dict[str, str | int | bool]
"""The `text`, its number of `tokens`, and whether the model `ended` it."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Continue a text, until the model ends the document or the number of tokens is reached."""

    model: Annotated[Path, tyro.conf.Positional]
    """Directory of a run, of one of its checkpoints, of an exported model, or of a language model of transformers,
    rewired or not, with its tokenizer."""
    prompt: str = ""
    """Text to continue; without one, a new document."""
    tokens: int = 200
    """Most tokens to generate."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; above, tokens are drawn from softmax(logits / temperature)."""
    seed: int = 0
    """Seed of the draws."""
    data: Path | None = None
    """Prepared data of the run, where they were moved."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        """Refuse what cannot be generated."""
        if self.tokens < 1:
            raise UserError(f"--tokens {self.tokens}: choose at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature {self.temperature}: choose 0 or a positive number, such as 0.8")
        if 0 < self.temperature < COLDEST:  # logits divided by it would overflow
            raise UserError(
                f"--temperature {self.temperature}: choose at least {COLDEST}, or 0, which takes the likeliest token"
            )
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:  # bytes of the shell that are no text come as lone surrogates
            raise UserError(f"--prompt {self.prompt!r}: character {error.start + 1} is no text: give UTF-8") from error
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed}: choose a number from 0 to below 2^63")


def run(arguments: Arguments) -> None:
    """Generate, showing the text as it comes."""
    continued = open_source(arguments)
    if arguments.json:
        result = continued(lambda text: None)
        print(encode_json({"prompt": arguments.prompt, **result}))
        return
    print(arguments.prompt, end="", flush=True)
    continued(lambda text: print(text, end="", flush=True))
    print()


def open_source(arguments: Arguments) -> Callable[[Show], Continuation]:
    """Return what continues the text; raises UserError, with nothing shown yet, for a directory of no such model."""
    found = look_into(arguments.model)
    if found.library == "transformers":
        return _in_transformers(model_of_library(found), arguments)
    if found.kind == "library":
        raise UserError(
            f"{found.path} holds a {found.name} of {found.library}, which generates no text: name a language model"
        )
    stored = read_stored(found, data=arguments.data)
    model, tokenizer = build(stored), stored.tokenizer()
    (prompt,) = tokenizer.encode_batch([arguments.prompt])
    ids = prompt.tolist() or [tokenizer.end_of_text]
    require_known(ids, model.config.vocabulary, arguments.model)
    _note_length(len(ids) + arguments.tokens, model.config.context)
    return partial(generate, model, tokenizer, ids, arguments)


def _in_transformers(source: LocalModel, arguments: Arguments) -> Callable[[Show], Continuation]:
    imported(source)
    from siamesenorm.interop.huggingface.continuation import Continued

    continued = Continued(source, arguments.prompt, tokens=arguments.tokens)
    return partial(continued.generate, temperature=arguments.temperature, seed=arguments.seed)


def generate(
    model: LanguageModel, tokenizer: Tokenizer, ids: list[int], arguments: Arguments, show: Show
) -> Continuation:
    """Return what continues the ids and whether the model ended it; `show` is called with every piece of text."""
    generator = torch.Generator().manual_seed(arguments.seed)
    continuation = model.continuation(torch.tensor([ids]), temperature=arguments.temperature, generator=generator)
    found: list[int] = []
    shown, ended = "", False
    while not ended and len(found) < arguments.tokens:
        token = int(next(continuation))
        ended = token == tokenizer.end_of_text
        found += [] if ended else [token]
        text = tokenizer.decode(found)
        # The bytes of one character may come in several tokens: until then, it is shown by nothing.
        if ended or len(found) == arguments.tokens or not text.endswith("\ufffd"):
            show(text[len(shown) :])
            shown = text
    return {"text": shown, "tokens": len(found), "ended": ended}


def _note_length(tokens: int, context: int) -> None:
    if tokens > context:
        note = f"the model was trained on {context} tokens at a time, and this text may have {tokens}"
        print(f"siamesenorm: note: {note}", file=sys.stderr)
