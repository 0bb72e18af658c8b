"""Continue a text with a language model of transformers in a local directory, rewired or not, shown as it comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, TextStreamer

from siamesenorm.errors import UserError
from siamesenorm.interop.library import told_in_one_line
from siamesenorm.interop.local_directory import LocalModel
from siamesenorm.interop.stored_model import require_known

GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}


class Shown(TextStreamer):
    """Hands on every piece of text once it is whole, which for words is at their end, and keeps all of it."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show, self.text = show, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Show a piece of text."""
        self.text += text
        self.show(text)


class Continued:
    """A prompt before a language model of transformers, with the tokenizer that lies beside it.

    Raises UserError for a model that generates nothing or cannot read so many tokens, where there is no tokenizer, and
    for an empty prompt where nothing begins a text.
    """

    def __init__(self, source: LocalModel, prompt: str, *, tokens: int) -> None:
        self.directory, self.tokens = source.directory, tokens
        self.tokenizer = read_tokenizer(source.directory)
        self.model = cast(Any, source.load())
        kind = type(self.model).__name__
        if not self.model.can_generate():
            raise UserError(f"{self.directory} holds a {kind}, which generates no text: name a language model")
        if self.model.config.is_encoder_decoder:
            raise UserError(
                f"{self.directory} holds a {kind}, whose decoder answers a text and does not continue it: name a "
                "language model without an encoder"
            )
        self.ids = self.tokenizer(prompt).input_ids or [self.first_token()]
        require_known(self.ids, self.model.get_input_embeddings().weight.shape[0], self.directory)
        longest = getattr(self.model.config, "max_position_embeddings", math.inf)
        if len(self.ids) + tokens > longest:
            most = f"{self.directory} reads {longest} tokens, and the prompt has {len(self.ids)}"
            room = longest - len(self.ids)
            remedy = f"generate at most {room}" if room > 0 else "shorten the prompt"
            raise UserError(f"{tokens} tokens: {most}: {remedy}")

    def generate(self, show: Callable[[str], None], *, temperature: float, seed: int) -> dict[str, str | int | bool]:
        """Return the continuation, its number of tokens, and whether the model ended it; `show` gets every piece.

        Tokens are drawn from softmax(logits / temperature), and are the likeliest at temperature 0.
        """
        ids = torch.tensor([self.ids])
        ends = self.model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends} - {None}
        shown = Shown(self.tokenizer, show)
        torch.manual_seed(seed)
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.tokens,
            pad_token_id=min(ends, default=0),
            streamer=shown,
            **({"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else GREEDY),
        )[0, len(self.ids) :].tolist()
        ended = bool(found) and found[-1] in ends
        return {"text": shown.text, "tokens": len(found) - ended, "ended": ended}

    def first_token(self) -> int:
        """Return what a new document begins with; raises UserError where the tokenizer does not say."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise UserError(f"the tokenizer of {self.directory} has no token that begins a text: give a --prompt")


def read_tokenizer(directory: Path) -> Any:
    """Return the tokenizer beside a model; raises UserError without one."""
    if not any(directory.glob("tokenizer*")) and not any(directory.glob("vocab.*")):
        raise UserError(f"{directory} has no tokenizer: save it beside the model, tokenizer.save_pretrained(directory)")
    with told_in_one_line(directory):
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
