"""Train one prepared run directory in a process of its own: `python -m siamesenorm.training.worker DIRECTORY`.

It ends when its standard input is closed, so that no worker outlives the sweep that started it.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError
from siamesenorm.training.config import RunConfig
from siamesenorm.training.loop import train
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.trackers import build_trackers
from siamesenorm.training.verdict import Verdict


class LogObserver:
    """Prints what a person should know to standard output, which the sweep keeps as the run's log."""

    def started(self, config: RunConfig, step: int) -> None:
        """Nothing to say."""

    def recorded(self, record: dict[str, Any]) -> None:
        """Nothing to say: the record itself is in the directory."""

    def told(self, line: str) -> None:
        """Print the line at once: what is on standard error comes after it."""
        print(line, flush=True)

    def ended(self, verdict: Verdict) -> None:
        """Nothing to say: the verdict is in the directory."""


def main() -> int:
    """Train the run; returns 2 with one line on standard error for bad input."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    directory = Path(sys.argv[1])
    try:
        config = RunDirectory(directory).read_config()
        train(config, directory, observers=(LogObserver(), *build_trackers(config, directory)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _follow_parent() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
