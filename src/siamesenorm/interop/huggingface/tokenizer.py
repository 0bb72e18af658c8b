"""Our tokenizers as those of transformers."""

from __future__ import annotations

import tokenizers
from transformers import PreTrainedTokenizerFast

from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.interop.exported_tokenizer import tokenizer_config, tokenizer_file


def tokenizer_for(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `AutoTokenizer` would load from an export; `context` is the model's, in tokens."""
    file = tokenizer_file(tokenizer)
    options = tokenizer_config(file, tokenizer.end_of_text, context)
    del options["tokenizer_class"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(file.decode()), **options)
