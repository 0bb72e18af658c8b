"""siamesenorm generate: a text continued by a trained or exported model, shown as it comes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import UserError
from siamesenorm.interop.stored_model import build, open_stored
from siamesenorm.models.language import LanguageModel
from siamesenorm.training.exact_json import encode_json


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Continue a text, until the model ends the document or the number of tokens is reached."""

    model: Annotated[Path, tyro.conf.Positional]
    """Directory of a run, of one of its checkpoints, or of an exported model."""
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
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed}: choose a number from 0 to below 2^63")


def run(arguments: Arguments) -> None:
    """Generate, showing the text as it comes."""
    stored = open_stored(arguments.model, data=arguments.data)
    tokenizer, model = stored.tokenizer(), build(stored)
    if arguments.json:
        result = generate(model, tokenizer, arguments, show=lambda text: None)
        print(encode_json({"prompt": arguments.prompt, **result}))
        return
    print(arguments.prompt, end="", flush=True)
    generate(model, tokenizer, arguments, show=lambda text: print(text, end="", flush=True))
    print()


def generate(
    model: LanguageModel, tokenizer: Tokenizer, arguments: Arguments, show: Callable[[str], None]
) -> dict[str, str | int | bool]:
    """Return the continuation and whether the model ended it; `show` is called with every piece of text."""
    (prompt,) = tokenizer.encode_batch([arguments.prompt])
    ids = prompt.tolist() or [tokenizer.end_of_text]
    _note_length(len(ids) + arguments.tokens, model.config.context)
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
