"""A sweep's directory: one template, the runs made from it, one process at a time.

`sweep.json` remembers what all runs have in common, so that another sweep is never mixed into this one, and every run
ever planned, so that a smaller command hides no result of a larger one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from siamesenorm.comparison.grid import Grid
from siamesenorm.data import PreparedData
from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors, encode_json, exclusive, write_atomically
from siamesenorm.training.config import RunConfig

SCHEMA = 1
LOCK_FILE = "lock"
METHOD_FIELDS = ("topology", "norm", "attention_norm")
"""The fields of a model that methods set."""


class SweepDirectory:
    """The files of one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_file = path / "sweep.json"

    @contextmanager
    def claimed(self, template: RunConfig) -> Iterator[None]:
        """Make the directory this template's and keep other processes out while it is open.

        Raises UserError when it holds another sweep or something else, and then leaves it as it is.
        """
        with ExitStack() as held:
            with disk_errors(self.path):
                self._require_sweep()
                self._require_same(template)
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(exclusive(self.path / LOCK_FILE))
                self._require_same(template)  # another process may have come first
            yield

    def run_directory(self, config: RunConfig) -> Path:
        """Return the directory of a run of this sweep."""
        return self.path / "runs" / config.identity[:12]

    def write_plan(self, template: RunConfig, grid: Grid, planned: Sequence[Path], command: str | None) -> None:
        """Write what is compared; runs listed before stay listed."""
        names = [path.relative_to(self.path).as_posix() for path in planned]
        plan: dict[str, Any] = {
            "schema": SCHEMA,
            "command": command,
            "data": _describe_data(template),
            "template": template_record(template),
            "grid": grid.to_json(),
        }
        with disk_errors(self.path):
            plan["runs"] = list(dict.fromkeys([*self._read_plan().get("runs", []), *names]))
            write_atomically(self.plan_file, (encode_json(plan, indent=1) + "\n").encode())

    def _require_sweep(self) -> None:
        """Refuse a directory of other things; one whose first sweep was killed before it wrote its plan is no such."""
        if not self.path.exists() or self.plan_file.is_file():
            return
        unplanned = {LOCK_FILE, f".{self.plan_file.name}.tmp"}
        if not self.path.is_dir() or {each.name for each in self.path.iterdir()} - unplanned:
            raise UserError(f"{self.path} exists and is not the directory of a sweep: choose another directory")

    def _require_same(self, template: RunConfig) -> None:
        plan = self._read_plan()
        record, digest = template_record(template), template.task.digest
        # A plan without a template is of an earlier version.
        if plan.get("template", record) != record or (plan.get("data") or {}).get("digest", digest) != digest:
            raise UserError(f"{self.path} holds another sweep: choose another --out")

    def _read_plan(self) -> dict[str, Any]:
        if not self.plan_file.is_file():
            return {}
        try:
            plan = decode_json(self.plan_file.read_bytes())
        except ValueError as error:
            raise UserError(f"{self.plan_file} is not JSON ({error}): choose another --out") from error
        if not isinstance(plan, dict):
            raise UserError(f"{self.plan_file} does not hold a JSON object: choose another --out")
        return plan


def template_record(template: RunConfig) -> dict[str, Any]:
    """Return what all runs made from a template have in common, as JSON values."""
    record: dict[str, Any] = decode_json(encode_json(template.resolved().to_json()))
    for name in METHOD_FIELDS:
        del record["task"]["model"][name]
    del record["optimizer"]["learning_rate"], record["seed"], record["execution"], record["task"]["data"]
    return record


def _describe_data(template: RunConfig) -> dict[str, Any]:
    manifest = PreparedData.open(template.task.data).manifest
    return {
        "digest": manifest.digest,
        "source": manifest.source,
        "tokenizer": dataclasses.asdict(manifest.tokenizer),
    }
