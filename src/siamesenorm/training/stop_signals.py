"""Signals to stop while a run trains: it writes a checkpoint after the step under way, and leaves.

SIGTERM, SIGINT, and SIGUSR2, by which submitit has Slurm warn of the end of a job.
"""

from __future__ import annotations

import signal
import threading
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR2] if hasattr(signal, "SIGUSR2") else []))


class Interrupted(KeyboardInterrupt):
    """A run left because of signal `number`; its checkpoint is whole, and the same command resumes."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """As shells report a process that a signal ended: 143 for SIGTERM, 130 for SIGINT."""


class StopSignals:
    """While open in the main thread, notes the first signal instead of ending at once; a second SIGINT does that."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the signal; 0 for none."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Take over the signals; other threads cannot."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        """Restore what was done on these signals before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: object) -> None:
        if number == self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number
