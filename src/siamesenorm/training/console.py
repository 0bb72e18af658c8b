"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from siamesenorm.training.config import RunConfig
from siamesenorm.training.verdict import Verdict

LINE_SECONDS = 10.0


class ConsoleObserver:
    """Shows step, loss, tokens per second and time left on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        self.held_out = ""
        self.last_line = 0.0

    def started(self, config: RunConfig, step: int) -> None:
        """Show where the run begins or goes on."""
        self.steps, self.batch_tokens = config.steps, config.batch_tokens
        self.begin, self.first_step = time.monotonic(), step
        where = "starts" if step == 0 else f"goes on after step {step}"
        self._print(
            f"{config.model.label} @ {config.optimizer.learning_rate:g}, seed {config.seed}: "
            f"{config.steps} steps of {config.batch_tokens:,} tokens, {where}"
        )
        if self.console.is_terminal:
            self.progress = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
                console=self.console, transient=True,
            )  # fmt: skip
            self.progress.start()
            self.task = self.progress.add_task("", total=config.steps, completed=step)

    def recorded(self, record: dict[str, Any]) -> None:
        """Show the newest loss."""
        if record["kind"] == "validation":
            self.held_out = f", held-out {record['loss']:.3f}"
        if record["kind"] != "train":
            return
        now, step = time.monotonic(), record["step"]
        rate = (step - self.first_step) * self.batch_tokens / max(now - self.begin, 1e-9)
        text = f"loss {record['loss']:.3f}{self.held_out}, {rate:,.0f} tokens/s"
        if self.progress is not None:
            self.progress.update(self.task, completed=step, description=text)
        elif now - self.last_line >= LINE_SECONDS or step == self.steps:
            left = (self.steps - step) * self.batch_tokens / max(rate, 1e-9)
            self._print(f"step {step}/{self.steps}: {text}, {left:.0f} s left")
            self.last_line = now

    def told(self, line: str) -> None:
        """Show a line."""
        self._print(line)

    def ended(self, verdict: Verdict) -> None:
        """Show the verdict."""
        self.close()
        self._print(f"{verdict.sentence()}{self.held_out}")

    def close(self) -> None:
        """Take the live line away."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def _print(self, line: str) -> None:
        if self.progress is not None:
            self.progress.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
