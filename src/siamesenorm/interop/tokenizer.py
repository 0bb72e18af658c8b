"""Our tokenizers as files that `AutoTokenizer` loads: the same ids for every text, and the same text for all ids."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from siamesenorm.data.tokenizer import END_OF_TEXT_NAMES, Tokenizer


def tokenizer_file(tokenizer: Tokenizer) -> bytes:
    """Return the content of tokenizer.json; it adds no special tokens, cuts nothing and pads nothing, as ours."""
    content = tokenizer.content
    backend = byte_level_backend() if content is None else tokenizers.Tokenizer.from_str(content.decode())
    backend.no_truncation()
    backend.no_padding()
    if backend.encode("a").ids != backend.encode("a", add_special_tokens=False).ids:
        backend.post_processor = None
    text: str = backend.to_str()
    return text.encode()


def tokenizer_config(file: bytes, end_of_text: int, context: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizers.Tokenizer.from_str(file.decode()).id_to_token(end_of_text),
        "model_max_length": context,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        # A text that spells a special token is ordinary text, as it was in training.
        "split_special_tokens": True,
    }


def generation_config(end_of_text: int) -> dict[str, int]:
    """Return the special tokens of `generate`: a text ends, and a new one begins, as documents did in training."""
    return {f"{role}_token_id": end_of_text for role in ("bos", "eos", "pad")}


def byte_level_backend() -> Any:
    """Return bytes as a tokenizer of the library: ids 0..255 are the bytes, 256 is the end of text."""
    # The library writes a byte as a printable character: itself where it is one, else one from 256 upwards, in order.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(character for character in alphabet if ord(character) > 255))
    vocabulary = {chr(byte) if chr(byte) in alphabet else next(others): byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT_NAMES[0], special=True, normalized=False)])
    return backend


def tokenizer_for(tokenizer: Tokenizer, context: int) -> Any:
    """Return the tokenizer that `AutoTokenizer` would load from an export; `context` is the model's, in tokens."""
    from transformers import PreTrainedTokenizerFast

    file = tokenizer_file(tokenizer)
    options = tokenizer_config(file, tokenizer.end_of_text, context)
    del options["tokenizer_class"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(file.decode()), **options)
