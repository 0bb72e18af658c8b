"""A run's directory: configuration, environment, record, verdict, checkpoints; one process at a time.

All file names of a run are spelled here.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors, encode_json, exclusive, write_atomically
from siamesenorm.training.checkpoint import Checkpoint, load_checkpoint
from siamesenorm.training.config import RunConfig, described, first_difference
from siamesenorm.training.verdict import Verdict

LOCK_FILE = "lock"
LOG_FILE = "log.txt"
DIGEST_CHARACTERS = 12
"""Of a digest in a path."""
DECISIVE = ("device", "torch", "commit", "kernels", "operators", "compiled", "processes")
"""What changes the bits of the steps to come when it changes on resume."""


class RunDirectory:
    """The files of one run.

    Raises UserError when the directory holds a run of another configuration, or files that are no run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.environment_file = path / "environment.json"
        self.metrics_file = path / "metrics.jsonl"
        self.verdict_file = path / "verdict.json"
        self.post_mortem_file = path / "post-mortem.json"
        self.evaluations_file = path / "evaluations.jsonl"
        self.item_scores = path / "items"
        self.scores = path / "scores"
        self.log_file = path / LOG_FILE
        self.slurm_file = path / "slurm.json"
        self.slurm_logs = path / "slurm"
        self.checkpoints = path / "checkpoints"

    @property
    def is_run(self) -> bool:
        """Whether the directory has the configuration of a run; a file of that name may be of another model."""
        try:
            return "schema" in decode_json(self.config_file.read_bytes())
        except (OSError, ValueError, TypeError):
            return False

    def item_scores_of(self, step: int, weights: str, digest: str) -> Path:
        """Return the directory of what some weights at a step scored on items, a file for each task.

        `digest` is that of the items: each set has a directory, as it has a record in `evaluations.jsonl`.
        """
        return self.item_scores / f"step-{step:08d}-{weights}" / digest[:DIGEST_CHARACTERS]

    @contextmanager
    def claimed(self, config: RunConfig) -> Iterator[None]:
        """Make the directory this configuration's and keep other processes out while it is open."""
        self.prepare(config)
        with ExitStack() as held:
            with disk_errors(self.path):
                held.enter_context(exclusive(self.path / LOCK_FILE))
            yield

    def prepare(self, config: RunConfig) -> None:
        """Make the directory and write the configuration; raises UserError when it belongs to another one.

        That of a finished run stays as it is; an unfinished one continues with the new execution and path of its data.
        """
        with disk_errors(self.path):
            self._require_same(config)
            self.path.mkdir(parents=True, exist_ok=True)
        if not (self.config_file.is_file() and self.verdict_file.is_file()):
            self._write(self.config_file, config.resolved().to_json())

    def record_environment(self, environment: dict[str, Any]) -> str | None:
        """Write what this process trains on, with that of earlier ones under "earlier", the newest first.

        Returns a line when something that changes the bits is not that of the process before.
        """
        before = self.read_environments()
        if before and before[0] == environment:
            return None
        self._write(self.environment_file, {**environment, "earlier": before} if before else environment)
        changes = [
            f"{name} {environment[name]} (was {before[0].get(name)})"
            for name in DECISIVE
            if before and environment[name] != before[0].get(name)
        ]
        return f"resumes with {', '.join(changes)}: its bits may differ from here on" if changes else None

    def read_environments(self) -> list[dict[str, Any]]:
        """Return what the processes before trained on, the newest first; none where that cannot be read."""
        try:
            newest = decode_json(self.environment_file.read_bytes())
            return [newest, *newest.pop("earlier", [])]
        except (OSError, ValueError, AttributeError):
            return []

    def read_config(self) -> RunConfig:
        """Return the configuration; raises UserError when there is none that can be read."""
        try:
            return RunConfig.from_json(decode_json(self.config_file.read_bytes()))
        except (OSError, ValueError) as error:
            reason = "no config.json" if isinstance(error, FileNotFoundError) else f"config.json: {error}"
            raise UserError(f"{self.path} is not the directory of a run ({reason}): name one of a run") from error

    def read_verdict(self) -> Verdict | None:
        """Return the verdict of a finished run, or None; raises UserError when it is damaged."""
        if not self.verdict_file.is_file():
            return None
        try:
            return Verdict.from_json(decode_json(self.verdict_file.read_bytes()))
        except ValueError as error:
            raise UserError(f"{self.verdict_file} cannot be read ({error}): remove it and train again") from error

    def verdict_of(self, config: RunConfig) -> Verdict | None:
        """Return the verdict if the run of this configuration is finished; raises as `prepare`, and writes nothing."""
        with disk_errors(self.path):
            self._require_same(config)
        return self.read_verdict()

    def newest_checkpoint(self, groups: Container[str]) -> Checkpoint:
        """Return the newest whole checkpoint, with the tensors of some groups; raises UserError without one."""
        found = load_checkpoint(self.checkpoints, groups=groups)
        if found is None:
            remedy = (
                f"use the directory in which it was trained, or remove {self.verdict_file} and train it again"
                if self.verdict_file.is_file()
                else "let the run write one (--execution.checkpoint-every)"
            )
            raise UserError(f"{self.path} has no checkpoint: {remedy}")
        return found

    def write_verdict(self, verdict: Verdict) -> None:
        """Write the verdict, which marks the run as finished."""
        self._write(self.verdict_file, verdict.to_json())

    def read_post_mortem(self) -> dict[str, Any] | None:
        """Return the first abnormal quantities of a diverged run, or None; raises UserError for a damaged file."""
        if not self.post_mortem_file.is_file():
            return None
        try:
            record: dict[str, Any] = decode_json(self.post_mortem_file.read_bytes())
            return record
        except (OSError, ValueError) as error:
            raise UserError(f"{self.post_mortem_file} cannot be read ({error}): remove it") from error

    def write_post_mortem(self, record: dict[str, Any]) -> None:
        """Write what a run that diverges saw first."""
        self._write(self.post_mortem_file, record)

    def _require_same(self, config: RunConfig) -> None:
        if self.config_file.is_file():
            there = self.read_config()
            if there.identity != config.identity:
                name, old, new = first_difference(described(there.resolved()), described(config.resolved()))
                raise UserError(f"{self.path} belongs to a run with {name} {old}, not {new}: choose another directory")
        elif self.path.exists() and not self._is_fresh():
            raise UserError(f"{self.path} exists and is not the directory of a run: choose another directory")

    def _is_fresh(self) -> bool:
        """Whether the directory is empty, or a process was killed before it wrote the configuration."""
        return self.path.is_dir() and {each.name for each in self.path.iterdir()} <= {LOCK_FILE, ".config.json.tmp"}

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        with disk_errors(path):
            write_atomically(path, (encode_json(record, indent=1) + "\n").encode())
