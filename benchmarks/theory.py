"""Every experiment on theory with its claims and the numbers that decide them.

python benchmarks/theory.py    # about a minute; writes theory.json and fills the table of docs/theory.md from it
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pages import fill_tables
from siamesenorm.recipes.items import THEORY
from siamesenorm.training.execution import describe_environment

HERE = Path(__file__).parent
FILE, PAGE = HERE / "theory.json", HERE.parent / "docs/theory.md"


def main() -> None:
    """Run the experiments, write the file, and fill the table."""
    torch.set_num_threads(1)
    rows = [
        {"experiment": name, "claim": claim.text, "outcome": claim.outcome, "measured": claim.measured}
        for name, (experiment, _, _) in THEORY.items()
        for claim in experiment().claims
    ]
    record = {"benchmark": "theory", "environment": describe_environment("cpu"), "rows": rows}
    FILE.write_text(f"{json.dumps(record, indent=1)}\n")
    PAGE.write_text(fill_tables(PAGE.read_text(), PAGE.parent))


if __name__ == "__main__":
    main()
