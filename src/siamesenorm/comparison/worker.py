"""Train one prepared run directory in a process of its own: `python -m siamesenorm.comparison.worker DIRECTORY`.

It ends when its standard input is closed, with a checkpoint, so that no worker outlives the experiment that started it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from siamesenorm.analysis.post_mortem import PostMortem
from siamesenorm.errors import UserError
from siamesenorm.training.console_and_trackers import WorkerLog, build_trackers
from siamesenorm.training.loop import train
from siamesenorm.training.run_directory import RunDirectory
from siamesenorm.training.stop_signals import Interrupted

SECONDS_TO_LEAVE = 60
"""For the step under way and its checkpoint."""


def main() -> int:
    """Train the run; returns 2 with one line on standard error for bad input, 128 and its number after a signal."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    directory = Path(sys.argv[1])
    try:
        config = RunDirectory(directory).read_config()
        train(config, directory, instruments=(WorkerLog(), *build_trackers(config, directory), PostMortem()))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except Interrupted as stopped:
        return stopped.exit_code
    return 0


def _follow_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_LEAVE)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
