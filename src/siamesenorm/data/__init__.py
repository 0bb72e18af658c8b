"""Text to tokens to samples: preparing, checking, and reading data in a stateless order."""

from siamesenorm.data.config import PrepareConfig
from siamesenorm.data.manifest import Manifest, Split, TokenizerEntry
from siamesenorm.data.order import SampleOrder
from siamesenorm.data.preparation import prepare
from siamesenorm.data.progress import PrepareProgress, Report, show_progress
from siamesenorm.data.samples import TokenSamples, document_ids
from siamesenorm.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer
from siamesenorm.data.tokens import PreparedData
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
    "Tokenizer",
    "TokenizerEntry",
    "document_ids",
    "load_tokenizer",
    "prepare",
    "show_progress",
]
