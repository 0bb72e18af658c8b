"""siamesenorm export: a trained model as a directory that Hugging Face loads, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.interop.export import Format, export


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write the model of a run, at its newest checkpoint or a given one, or an exported model, to a new directory.

    Weights, configuration, tokenizer, and a model card from the run's record. An exported or fine-tuned model comes
    back with --format native.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Directory of a run, of one of its checkpoints, or of an exported model."""
    out: Path
    """New directory."""
    format: Format = "huggingface"
    """huggingface: for transformers, with the short file of code that trust_remote_code runs; native: names of weights
    and fields as they are here."""
    data: Path | None = None
    """Prepared data of the run, where they were moved."""


def run(arguments: Arguments) -> None:
    """Write the directory and say how to load it."""
    export(arguments.model, arguments.out, format=arguments.format, data=arguments.data)
    if arguments.format == "native":
        print(f"{arguments.out}: siamesenorm.interop.export.load_native({str(arguments.out)!r}) loads it")
    else:
        print(
            f"{arguments.out}: after `import siamesenorm.interop.huggingface`, "
            f"AutoModelForCausalLM.from_pretrained({str(arguments.out)!r}) loads it"
        )
