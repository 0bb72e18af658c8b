"""Text to tokens to samples: preparing, checking, and reading data in a stateless order."""

from siamesenorm.data.manifest import Manifest, Split, TokenizerEntry
from siamesenorm.data.order import SampleOrder
from siamesenorm.data.preparation import PrepareConfig, prepare
from siamesenorm.data.prepared import PreparedData, TokenSamples, TokenSequence, document_ids
from siamesenorm.data.progress import PrepareProgress, Report, show_progress
from siamesenorm.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer
from siamesenorm.files import StoppedError

__all__ = [
    "ByteTokenizer",
    "LibraryTokenizer",
    "Manifest",
    "PrepareConfig",
    "PreparedData",
    "PrepareProgress",
    "Report",
    "SampleOrder",
    "Split",
    "StoppedError",
    "TokenSamples",
    "TokenSequence",
    "Tokenizer",
    "TokenizerEntry",
    "document_ids",
    "load_tokenizer",
    "prepare",
    "show_progress",
]
