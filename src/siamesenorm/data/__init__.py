"""Text to tokens to samples: preparing, checking, and reading data in a stateless order."""

from siamesenorm.data.preparation import PrepareConfig, PrepareProgress, prepare
from siamesenorm.data.prepared import PreparedData, SampleOrder, TokenSamples, TokenSequence, document_ids
from siamesenorm.data.randomness import generator_at
from siamesenorm.data.storage import Manifest, Split, TokenizerEntry
from siamesenorm.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer
from siamesenorm.files import StoppedError

__all__ = [
    "ByteTokenizer",
    "LibraryTokenizer",
    "Manifest",
    "PrepareConfig",
    "PreparedData",
    "PrepareProgress",
    "SampleOrder",
    "Split",
    "StoppedError",
    "TokenSamples",
    "TokenSequence",
    "Tokenizer",
    "TokenizerEntry",
    "document_ids",
    "generator_at",
    "load_tokenizer",
    "prepare",
]
