"""siamesenorm generate: continue a text with a model that was trained here, or one of transformers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.cli.output import print_notes
from siamesenorm.errors import UserError
from siamesenorm.files import encode_json
from siamesenorm.interop.generation import open_prompt
from siamesenorm.interop.stored import detect

COLDEST = 1e-6
"""The lowest temperature above 0."""


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
        if self.tokens < 1:
            raise UserError(f"--tokens {self.tokens}: choose at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature {self.temperature}: choose 0 or a positive number, such as 0.8")
        if 0 < self.temperature < COLDEST:  # logits divided by it would overflow
            raise UserError(f"--temperature {self.temperature}: choose at least {COLDEST}, or 0")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:  # bytes that are no UTF-8 arrive as lone surrogates
            raise UserError(f"--prompt {self.prompt!r}: character {error.start + 1} is no text: give UTF-8") from error
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed}: choose a number from 0 to below 2^63")


def run(arguments: Arguments) -> None:
    """Generate, showing the text as it comes."""
    stored = detect(arguments.model, data=arguments.data)
    prompt = open_prompt(stored, arguments.prompt, tokens=arguments.tokens)
    print_notes(prompt.notes)
    generate = partial(prompt, temperature=arguments.temperature, seed=arguments.seed)
    if arguments.json:
        print(encode_json({"prompt": arguments.prompt, **dataclasses.asdict(generate(lambda text: None))}))
        return
    print(arguments.prompt, end="", flush=True)
    generate(lambda text: print(text, end="", flush=True))
    print()
