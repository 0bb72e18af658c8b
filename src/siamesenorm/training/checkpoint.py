"""Crash-safe checkpoints: a directory is whole or does not count.

    root/step-00000100/    <group>.safetensors for every group of tensors, state.json, and manifest.json with the size
                           and SHA-256 of every file
    root/step-00000200.1f0c8a3e.partial/    being written, or left by a killed process

Of several processes each writes its part of a group, `<group>-2-of-4.safetensors`. Files, then the manifest, are
written and synced under the partial name; one rename makes them count; only then are older checkpoints pruned. The
partial name has a random part, so that a process that outlives its job writes nothing into the checkpoint of the next
one. Nothing is pickled. `distributed_checkpoint` writes them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors, encode_json, sync_directory, write_atomically
from siamesenorm.training.checkpoint_files import StoredTensor, encode_tensors, open_tensors, write_synced
from siamesenorm.world import World

SCHEMAS = WHOLE, IN_PARTS = 1, 2
"""Of a checkpoint that one process wrote, and of one of several."""
MANIFEST, STATE = "manifest.json", "state.json"
PARTIAL = ".partial"

_NAME = re.compile(r"step-(\d{8,})((?:\.\w+)?\.partial)?")
_PART = re.compile(r"(.+?)(?:-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint: its groups of tensors, its JSON state, and why newer ones were skipped."""

    step: int
    path: Path
    stored: Mapping[str, dict[str, StoredTensor]]
    state: dict[str, Any]
    skipped: tuple[str, ...]

    @cached_property
    def tensors(self) -> Mapping[str, dict[str, Tensor]]:
        """The whole tensors of every group, on the CPU."""
        return {group: {name: each.read() for name, each in named.items()} for group, named in self.stored.items()}


# --- writing


def begin_checkpoint(root: Path, step: int) -> Path | None:
    """Make the directory of an unfinished checkpoint; return None where a whole one of this step stays as it is.

    Leftovers, and broken checkpoints of this step or later, are removed. Raises UserError when a later one is whole.
    """
    if not root.is_dir():
        root.mkdir(parents=True)
        sync_directory(root.parent)
    if not _remove_leftovers(root, step):
        return None
    unfinished = root / f"step-{step:08d}.{secrets.token_hex(4)}{PARTIAL}"
    unfinished.mkdir()
    return unfinished


def _remove_leftovers(root: Path, step: int) -> bool:
    """Remove leftovers, and broken checkpoints of this step or later; return whether this step is still to write."""
    _remove_unfinished(root)
    for other, path in _finished(root):
        if other < step:
            break
        if _fault(path, other) is not None:
            _remove(path)
        elif other == step:
            return False
        else:
            raise UserError(
                f"{root} holds {path.name}, later than step {step}: resume from it or choose another directory"
            )
    return True


def _remove_unfinished(root: Path) -> None:
    for leftover in root.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(leftover)


def name_of_part(group: str, number: int, count: int) -> str:
    """Return the name of the file in which process `number` of `count`, from 1 on, writes its part of a group."""
    return f"{group}.safetensors" if count == 1 else f"{group}-{number}-of-{count}.safetensors"


def finish_checkpoint(
    unfinished: Path, step: int, files: Mapping[str, dict[str, Any]], state: Mapping[str, Any], *, schema: int
) -> None:
    """Write the state and the manifest, and give the directory its final name."""
    written = write_synced(unfinished / STATE, [encode_json(state, indent=1).encode()])
    manifest = {"schema": schema, "step": step, "files": {**files, STATE: written}}
    write_synced(unfinished / MANIFEST, [encode_json(manifest, indent=1).encode()])
    sync_directory(unfinished)
    unfinished.rename(unfinished.with_name(f"step-{step:08d}"))
    sync_directory(unfinished.parent)


def prune(root: Path, keep: int, every: int = 0) -> None:
    """Keep the newest `keep` checkpoints, and with `every` those whose step is a multiple of it; remove all else."""
    _remove_unfinished(root)
    for step, path in _finished(root)[keep:]:
        if not every or step % every:
            _remove(path)


def _remove(path: Path) -> None:
    """Delete a checkpoint under a partial name: a crash half-way must not leave something that looks whole."""
    doomed = path.with_name(path.name + PARTIAL)
    path.rename(doomed)
    shutil.rmtree(doomed)


def keep_last_weights(root: Path, every: int = 0) -> None:
    """Remove what a finished run does not need: checkpoints that do not stay, optimizer and random states of others.

    Weights in parts become one file each, written tensor by tensor. The manifest is exchanged before the files are
    removed, so that a crash leaves a whole checkpoint.
    """
    with disk_errors(root):
        prune(root, 1, every)
        for step, path in _finished(root):
            before = decode_json((path / MANIFEST).read_bytes())["files"]
            kept = {STATE: before[STATE]}
            for group, files in _groups(before).items():
                if group not in ("optimizer", "random"):
                    kept[f"{group}.safetensors"] = _consolidate(path, group, files) or before[files[0]]
            manifest = {"schema": WHOLE, "step": step, "files": kept}
            write_atomically(path / MANIFEST, encode_json(manifest, indent=1).encode())
            for name in before.keys() - kept.keys():
                (path / name).unlink()


def _consolidate(path: Path, group: str, files: list[str]) -> dict[str, Any] | None:
    """Write the parts of a group as the file of one process and return its entry; return None where it is that."""
    target = path / f"{group}.safetensors"
    if files == [target.name]:
        return None
    target.unlink(missing_ok=True)  # of a process that was killed here
    stored = open_tensors(path / name for name in files)
    layout = {name: (each.dtype, each.shape) for name, each in stored.items()}
    return write_synced(target, encode_tensors(layout, lambda name: stored[name].read()))


# --- reading


def _finished(root: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of everything with a final name, the newest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in (root.iterdir() if root.is_dir() else ()))
    return sorted(((int(name[1]), path) for name, path in found if name and not name[2]), reverse=True)


def load_checkpoint(
    root: Path, *, groups: Container[str] | None = None, world: World | None = None
) -> Checkpoint | None:
    """Return the newest checkpoint under `root` whose files all match its manifest, or None without any.

    Of its tensors, only those of `groups` if given. The processes of a `world` share the work and find the same. What
    is newer and broken or unfinished is skipped, and `skipped` has the reasons. Raises `UserError` when there are
    checkpoints and all are broken; a first one that a killed process left unfinished does not count.
    """
    world = world or World()
    while True:
        faults: list[str] = []
        finished = world.on_first(lambda: _finished(root))
        for step, path in finished:
            mine = _fault(path, step, world.rank, world.size)
            fault = next((each for each in world.gather(mine) if each is not None), None)
            if fault is None:
                with suppress(FileNotFoundError):  # the run that is being read has just removed it
                    return _open(step, path, faults, groups)
            faults.append(f"{path.name}: {fault}")
        if world.on_first(lambda: _finished(root)) == finished:
            break
    if faults:
        raise UserError(
            f"no checkpoint in {root} is whole ({'; '.join(faults)}): restore the files or their permissions, or "
            f"remove {root.parent} to train this run from its start"
        )
    return None


def read_checkpoint(path: Path, *, groups: Container[str] | None = None) -> Checkpoint:
    """Return the checkpoint of one directory; raises `UserError` unless it is whole. `groups` as `load_checkpoint`."""
    name = _NAME.fullmatch(path.name)
    if name is None or name[2] or not path.is_dir():
        raise UserError(f"{path} is no checkpoint: name a directory such as checkpoints/step-00000100")
    fault = _fault(path, int(name[1]))
    if fault is not None:
        raise UserError(f"{path} is not whole ({fault}): choose another checkpoint of the run")
    return _open(int(name[1]), path, [], groups)


def _open(step: int, path: Path, faults: Iterable[str], groups: Container[str] | None) -> Checkpoint:
    names = sorted(other.name for other in path.parent.glob(f"step-*{PARTIAL}"))
    unfinished = (name for name in names if (match := _NAME.fullmatch(name)) and int(match[1]) > step)
    files = _groups(decode_json((path / MANIFEST).read_bytes())["files"])
    return Checkpoint(
        step=step,
        path=path,
        stored={
            group: open_tensors(path / name for name in names)
            for group, names in files.items()
            if groups is None or group in groups
        },
        state=decode_json((path / STATE).read_bytes()),
        skipped=(*(f"{name}: never finished" for name in unfinished), *faults),
    )


def _groups(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of every group of tensors."""
    groups: dict[str, list[str]] = {}
    for name in sorted(files):
        if match := _PART.fullmatch(name):
            groups.setdefault(match[1], []).append(name)
    return groups


def _fault(path: Path, step: int, rank: int = 0, size: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, or None if every file of this process's share matches its manifest.

    Raises `UserError` for one of a schema that this version does not have: it may be whole.
    """
    try:
        manifest = decode_json((path / MANIFEST).read_bytes())
        schema = manifest["schema"]
        if isinstance(schema, int) and schema > max(SCHEMAS):
            raise UserError(f"{path} is of schema {schema}, of a later version: update siamesenorm to read it")
        if schema not in SCHEMAS or manifest["step"] != step:
            return f"{MANIFEST} is of schema {schema}, step {manifest['step']}"
        for name, entry in islice(manifest["files"].items(), rank, None, size):
            found = (path / name).stat().st_size
            if found != entry["bytes"]:
                return f"{name} has {found} bytes instead of {entry['bytes']}"
            with open(path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"the checksum of {name} does not match"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    except UserError:  # a ValueError
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


# --- random state


def capture_random_state(rank: int = 0) -> dict[str, Tensor]:
    """Return the state of the CPU's generator ("cpu") and of every visible GPU's ("cuda-0", ...), uint8 `[bytes]`.

    The names of a process that is not the first end with its rank: "cpu@1".
    """
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = {"cpu": torch.get_rng_state()} | {f"cuda-{index}": state for index, state in enumerate(gpus)}
    return {f"{name}@{rank}" if rank else name: state for name, state in states.items()}


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Restore what one process captured; raises `UserError` when one of its GPUs is missing."""
    named = {name.partition("@")[0]: state for name, state in states.items()}
    gpus = sorted(name for name in named if name != "cpu")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(gpus) > present:
        raise UserError(
            f"the checkpoint has the random state of {len(gpus)} GPUs, {present} are visible: resume on as many"
        )
    torch.set_rng_state(named["cpu"])
    for name in gpus:
        torch.cuda.set_rng_state(named[name], int(name.removeprefix("cuda-")))
