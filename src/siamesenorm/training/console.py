"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from siamesenorm.progress import ProgressDisplay
from siamesenorm.training.config import RunConfig
from siamesenorm.training.verdict import Verdict


class ConsoleObserver:
    """Shows step, loss, tokens per second and time left on standard error."""

    def __init__(self) -> None:
        self.display = ProgressDisplay(unit="tokens")
        self.held_out = ""

    def started(self, config: RunConfig, step: int) -> None:
        """Show where the run starts or resumes."""
        self.steps, self.batch_tokens = config.steps, config.batch_tokens
        where = "starts" if step == 0 else f"resumes after step {step}"
        self.display.line(
            f"{config.model.label} @ {config.optimizer.learning_rate:g}, seed {config.seed}: "
            f"{config.steps} steps of {config.batch_tokens:,} tokens, {where}"
        )
        self.display.start(config.steps * config.batch_tokens, step * config.batch_tokens)

    def recorded(self, record: dict[str, Any]) -> None:
        """Show the newest loss."""
        if record["kind"] == "validation":
            self.held_out = f", held-out {record['loss']:.3f}"
        if record["kind"] != "train":
            return
        step = record["step"]
        text = f"step {step}/{self.steps}: loss {record['loss']:.3f}{self.held_out}"
        self.display.update(step * self.batch_tokens, text)

    def told(self, line: str) -> None:
        """Show a line."""
        self.display.line(line)

    def ended(self, verdict: Verdict) -> None:
        """Show the verdict."""
        self.close()
        self.display.line(f"{verdict.sentence()}{self.held_out}")

    def close(self) -> None:
        """Remove the live line."""
        self.display.close()
