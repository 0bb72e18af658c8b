"""Write a checkpoint; call a function at every stage, to look at the files or to end the process there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from siamesenorm.training import checkpoint, distributed_checkpoint

STAGES = (
    "begin",
    "partial-made",
    "model-half-written",
    "model-written",
    "optimizer-half-written",
    "optimizer-written",
    "state-written",
    "manifest-written",
    "renamed",
    "pruned",
)
STAGES_OF_OTHERS = tuple(stage for stage in STAGES if stage.startswith(("model", "optimizer")))
"""Of a process that is not the first."""


def save_checkpoint(
    root: Path, step: int, tensors: distributed_checkpoint.Groups, state: Mapping[str, Any], *, keep: int
) -> Path:
    """Write the checkpoint of a step, wait for it, and return its directory."""
    with distributed_checkpoint.CheckpointSaver(root, keep=keep) as saver:
        saver.save(step, tensors, state)
        saver.wait()
    return root / f"step-{step:08d}"


def watch_stages(announce: Callable[[str], None], replace: Callable[..., None] = setattr) -> None:
    """Replace the functions that write checkpoints by ones that announce the stages; `replace` as `setattr`."""
    begin, write, prune = checkpoint.begin_checkpoint, checkpoint.write_synced, checkpoint.prune

    def begin_announced(*arguments: Any) -> Path | None:
        announce("begin")
        unfinished = begin(*arguments)
        announce("partial-made")
        return unfinished

    def write_announced(path: Path, pieces: Iterable[Any]) -> dict[str, Any]:
        group = path.name.partition(".")[0].partition("-")[0]
        is_group = group in ("model", "optimizer")
        entry = write(path, halted(group, list(pieces)) if is_group else pieces)
        if is_group or group in ("state", "manifest"):
            announce(f"{group}-written")
        return entry

    def halted(group: str, pieces: list[Any]) -> Iterator[Any]:
        for number, piece in enumerate(pieces):
            if number == len(pieces) // 2:
                announce(f"{group}-half-written")
            yield piece

    def prune_announced(*arguments: Any) -> None:
        announce("renamed")
        prune(*arguments)
        announce("pruned")

    replace(checkpoint, "write_synced", write_announced)
    replace(distributed_checkpoint, "begin_checkpoint", begin_announced)
    replace(distributed_checkpoint, "write_synced", write_announced)
    replace(distributed_checkpoint, "prune", prune_announced)
