"""Continue a text with a stored language model, of this library or of transformers, one piece of text at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from siamesenorm.errors import UserError
from siamesenorm.interop.language_models import load_transformers, require_vocabulary
from siamesenorm.interop.library_models import TransformersModel
from siamesenorm.interop.native_models import NativeModel
from siamesenorm.interop.stored_model import StoredModel

GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The text, its number of tokens, and whether the model ended it."""

    text: str
    tokens: int
    ended: bool


class NativePrompt:
    """A prompt before a language model of this library; `notes` are for the user."""

    def __init__(self, stored: NativeModel, prompt: str, *, tokens: int) -> None:
        self.tokens = tokens
        self.model = stored.load()
        self.tokenizer = stored.tokenizer()
        self.notes = stored.notes
        (ids,) = self.tokenizer.encode_batch([prompt])
        self.ids = ids.tolist() or [self.tokenizer.end_of_text]
        config = self.model.config
        require_vocabulary(max(self.ids), config.vocabulary, stored.path)
        length = len(self.ids) + tokens
        if length > config.context:
            note = f"the model was trained on {config.context} tokens at a time, and this text may have {length}"
            self.notes = (*self.notes, note)

    def __call__(self, show: Show, *, temperature: float, seed: int) -> Continuation:
        """Return the continuation, likeliest tokens at temperature 0; `show` is called with every piece of text."""
        generator = torch.Generator().manual_seed(seed)
        drawn = self.model.continuation(torch.tensor([self.ids]), temperature=temperature, generator=generator)
        found: list[int] = []
        shown, ended = "", False
        while not ended and len(found) < self.tokens:
            token = int(next(drawn))
            ended = token == self.tokenizer.end_of_text
            found += [] if ended else [token]
            text = self.tokenizer.decode(found)
            # The bytes of one character may come in several tokens: nothing is shown until it is whole.
            if ended or len(found) == self.tokens or not text.endswith("\ufffd"):
                show(text[len(shown) :])
                shown = text
        return Continuation(text=shown, tokens=len(found), ended=ended)


class TransformersPrompt:
    """The same before a language model of transformers, converted or not, with the tokenizer beside it."""

    def __init__(self, stored: TransformersModel, prompt: str, *, tokens: int) -> None:
        self.path, self.tokens, self.notes = stored.path, tokens, stored.notes
        self.model, self.tokenizer = load_transformers(stored)
        first = [token for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id) if token is not None]
        self.ids = self.tokenizer(prompt).input_ids or first[:1]
        if not self.ids:
            raise UserError(f"the tokenizer of {self.path} has no token that begins a text: give a --prompt")
        require_vocabulary(max(self.ids), self.model.get_input_embeddings().weight.shape[0], self.path)
        longest = getattr(self.model.config, "max_position_embeddings", math.inf)
        if len(self.ids) + tokens > longest:
            room = longest - len(self.ids)
            remedy = f"generate at most {room}" if room > 0 else "shorten the prompt"
            raise UserError(f"{tokens} tokens: the model reads {longest}, and the prompt has {len(self.ids)}: {remedy}")

    def __call__(self, show: Show, *, temperature: float, seed: int) -> Continuation:
        """Return the continuation, as `NativePrompt`."""
        from transformers import TextStreamer

        class Streamer(TextStreamer):
            """Shows every piece of text once it is whole, a word at its end."""

            text = ""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                self.text += text
                show(text)

        streamer = Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        ends = self.model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends} - {None}
        ids = torch.tensor([self.ids])
        torch.manual_seed(seed)
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.tokens,
            pad_token_id=min(ends, default=0),
            streamer=streamer,
            **({"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else GREEDY),
        )[0, len(self.ids) :].tolist()
        ended = bool(found) and found[-1] in ends
        return Continuation(text=streamer.text, tokens=len(found) - ended, ended=ended)


def open_prompt(stored: StoredModel, prompt: str, *, tokens: int) -> NativePrompt | TransformersPrompt:
    """Return a prompt before a stored model, which continues it with `tokens` tokens at most.

    Raises UserError for a model that generates nothing or cannot read so many tokens, weights that are not finite, no
    tokenizer, and an empty prompt where no token begins a text.
    """
    if isinstance(stored, NativeModel):
        return NativePrompt(stored, prompt, tokens=tokens)
    if isinstance(stored, TransformersModel):
        return TransformersPrompt(stored, prompt, tokens=tokens)
    raise UserError(f"{stored.path} holds a {stored.name}, which generates no text: name a language model")
