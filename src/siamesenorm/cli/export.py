"""siamesenorm export: a trained model as a directory that Hugging Face loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from siamesenorm.cli.output import print_notes
from siamesenorm.interop.stored import export


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write the model of a run, at its newest checkpoint or a given one, or an exported model, to a new directory.

    Weights, configuration, tokenizer, and a model card from the run's record, for transformers or torch alone.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Directory of a run, of one of its checkpoints, or of an exported model."""
    out: Path
    """New directory."""
    data: Path | None = None
    """Prepared data of the run, where they were moved."""


def run(arguments: Arguments) -> None:
    """Write the directory and print how to load it."""
    stored = export(arguments.model, arguments.out, data=arguments.data)
    print_notes(stored.notes)
    print(
        f"{arguments.out}: after `import siamesenorm.interop.huggingface`, "
        f"AutoModelForCausalLM.from_pretrained({str(arguments.out)!r}) loads it"
    )
