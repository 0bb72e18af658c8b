"""What to prepare, as one frozen dataclass: the options of the command line and of Python alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from siamesenorm.data.formats import Cut
from siamesenorm.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """What to prepare, and where to."""

    source: str
    """Text: `builtin`, a .txt, .jsonl or .parquet file (.gz too), a directory or a glob of them, or a dataset on the
    Hugging Face Hub as `hf:OWNER/NAME?name=CONFIG&split=train`."""

    out: Path
    """Directory to write."""

    tokenizer: str = "bytes"
    """`bytes`, `bpe:4096` (trained on the text), a tokenizer JSON file, or a name on the Hugging Face Hub."""

    validation: str | None = None
    """Source of the validation split; without it, a fraction of the documents."""

    validation_fraction: float | None = None
    """Fraction of the documents that become the validation split, chosen by their hash: 0.01 if not given (0.04 of the
    small builtin corpus)."""

    text_field: str = "text"
    """Field (or column) that holds the text."""

    documents: Cut = "passages"
    """Documents of a plain text file: passages of about 30,000 characters, or its paragraphs."""

    end_of_text: str | None = None
    """Token that closes a document; found by its usual names if not given."""

    max_documents: int | None = None
    """Read at most so many documents of the source."""

    workers: int | None = None
    """Processes that encode; chosen by the size of the source if not given."""

    restart: bool = False
    """Start anew: discard an unfinished preparation; finished data are replaced once the new ones are whole."""

    def __post_init__(self) -> None:
        """Raise `UserError` for settings that make no sense, before anything is read or written."""
        fraction = self.validation_fraction
        if fraction is not None and not 0 < fraction < 1:
            raise UserError(f"validation fraction {fraction}: must lie between 0 and 1, as in 0.01")
        if fraction is not None and self.validation is not None:
            raise UserError(f"validation fraction {fraction} and validation {self.validation!r}: give one of the two")
        for what, number in (("workers", self.workers), ("max documents", self.max_documents)):
            if number is not None and number < 1:
                raise UserError(f"{what} {number}: must be at least 1")
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"{self.out}: is a file: give a directory to write to")
