"""Call a function at every stage of writing a checkpoint, to look at the files or to end the process there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from siamesenorm.training import checkpoint

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


def watch_stages(announce: Callable[[str], None], replace: Callable[..., None] = setattr) -> None:
    """Replace the functions that write checkpoints by ones that announce the stages; `replace` as `setattr`."""
    remove_leftovers, write_contents = checkpoint._remove_leftovers, checkpoint._write_contents
    write_synced, prune = checkpoint._write_synced, checkpoint._prune

    def begin(*arguments: Any) -> bool:
        announce("begin")
        return remove_leftovers(*arguments)

    def write_all(*arguments: Any) -> None:
        announce("partial-made")
        write_contents(*arguments)
        announce("manifest-written")

    def write_file(path: Path, pieces: Iterable[Any]) -> dict[str, Any]:
        is_group = path.suffix == ".safetensors" and path.stem in ("model", "optimizer")
        entry = write_synced(path, halted(path.stem, list(pieces)) if is_group else pieces)
        if is_group or path.stem == "state":
            announce(f"{path.stem}-written")
        return entry

    def halted(group: str, pieces: list[Any]) -> Iterator[Any]:
        for number, piece in enumerate(pieces):
            if number == len(pieces) // 2:
                announce(f"{group}-half-written")
            yield piece

    def remove_old(*arguments: Any) -> None:
        announce("renamed")
        prune(*arguments)
        announce("pruned")

    for name, function in {
        "_remove_leftovers": begin,
        "_write_contents": write_all,
        "_write_synced": write_file,
        "_prune": remove_old,
    }.items():
        replace(checkpoint, name, function)
