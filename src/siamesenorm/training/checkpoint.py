"""Crash-safe checkpoints of one process: a directory is whole or does not count.

    root/step-00000100/    <group>.safetensors for every group of tensors, state.json, and manifest.json with the size
                           and SHA-256 of every file
    root/step-00000200.partial/    being written, or left by a killed process

Files, then the manifest, are written and synced under the partial name; one rename makes them count; only then are
older checkpoints pruned. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from siamesenorm.errors import UserError
from siamesenorm.files import decode_json, disk_errors, encode_json, sync_directory, write_atomically

SCHEMA = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"

_NAME = re.compile(r"step-(\d{8,})(\.partial)?")

# The names of the safetensors format, for the dtypes a training state is made of.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint: its groups of tensors (on the CPU), its JSON state, and why newer ones were skipped."""

    step: int
    path: Path
    tensors: Mapping[str, dict[str, Tensor]]
    state: dict[str, Any]
    skipped: tuple[str, ...]


def save_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, keep: int
) -> Path:
    """Write the checkpoint of a step, prune all but the newest `keep`, and return its directory.

    `tensors` are groups by name, such as "model" and "optimizer", on any device; `state` is what JSON can hold. A
    checkpoint of this step that is whole stays as it is. Raises `UserError` on a full disk, with everything earlier
    untouched, and when a later checkpoint is whole.
    """
    if keep < 1:
        raise UserError(f"keep is {keep}: at least one checkpoint must be kept")
    target = root / f"step-{step:08d}"
    unfinished = target.with_name(target.name + PARTIAL)
    with disk_errors(target):
        if not root.is_dir():
            root.mkdir(parents=True)
            sync_directory(root.parent)
        if _remove_leftovers(root, step):
            try:
                unfinished.mkdir()
                _write_contents(unfinished, step, tensors, state)
                unfinished.rename(target)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            sync_directory(root)
        _prune(root, keep)
    return target


def _remove_leftovers(root: Path, step: int) -> bool:
    """Remove leftovers, and broken checkpoints of this step or later; return whether this step is still to write."""
    for leftover in root.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(leftover)
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


def _write_contents(
    directory: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    contents: dict[str, Iterable[bytes | memoryview]]
    contents = {f"{group}.safetensors": _safetensors_pieces(named) for group, named in tensors.items()}
    contents["state.json"] = [encode_json(state, indent=1).encode()]
    files = {name: _write_synced(directory / name, pieces) for name, pieces in contents.items()}
    manifest = {"schema": SCHEMA, "step": step, "files": files}
    _write_synced(directory / MANIFEST, [encode_json(manifest, indent=1).encode()])
    sync_directory(directory)


def _safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file piece by piece.

    The library's writer needs all tensors in host memory at once, refuses tied ones, and reports a full disk as text.
    """
    # Wide elements first, as the library does: every tensor is then aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"tensor {name!r} is {tensor.dtype}: a checkpoint holds real numbers, integers and booleans"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, wait until it is on the disk, and return its entry in the manifest."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _prune(root: Path, keep: int) -> None:
    for _, path in _finished(root)[keep:]:
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a checkpoint under a partial name: a crash half-way must not leave something that looks whole."""
    doomed = path.with_name(path.name + PARTIAL)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _finished(root: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of everything with a final name, the newest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in (root.iterdir() if root.is_dir() else ()))
    return sorted(((int(name[1]), path) for name, path in found if name and not name[2]), reverse=True)


def load_checkpoint(root: Path, *, groups: Container[str] | None = None) -> Checkpoint | None:
    """Return the newest checkpoint under `root` whose files all match its manifest, or None without any.

    Of its tensors, only those of `groups` if given. What is newer and broken or unfinished is skipped, and `skipped`
    has the reasons. Raises `UserError` when there are checkpoints and all are broken; a first one that a killed process
    left unfinished does not count.
    """
    faults: list[str] = []
    for step, path in _finished(root):
        fault = _fault(path, step)
        if fault is None:
            return _read(step, path, faults, groups)
        faults.append(f"{path.name}: {fault}")
    if faults:
        raise UserError(
            f"no checkpoint in {root} is whole ({'; '.join(faults)}): remove {root} to train this run from its start"
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
    return _read(int(name[1]), path, [], groups)


def _read(step: int, path: Path, faults: Iterable[str], groups: Container[str] | None) -> Checkpoint:
    names = sorted(other.name for other in path.parent.glob(f"step-*{PARTIAL}"))
    unfinished = (name for name in names if (match := _NAME.fullmatch(name)) and int(match[1]) > step)
    files = sorted(path.glob("*.safetensors"))
    return Checkpoint(
        step=step,
        path=path,
        tensors={file.stem: load_file(file) for file in files if groups is None or file.stem in groups},
        state=decode_json((path / "state.json").read_bytes()),
        skipped=(*(f"{name}: never finished" for name in unfinished), *faults),
    )


def _fault(path: Path, step: int) -> str | None:
    """Return what is wrong with a checkpoint, or None if every file matches its manifest."""
    try:
        manifest = decode_json((path / MANIFEST).read_bytes())
        if (manifest["schema"], manifest["step"]) != (SCHEMA, step):
            return f"{MANIFEST} is of schema {manifest['schema']}, step {manifest['step']}"
        for name, entry in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
            with open(path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"the checksum of {name} does not match"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def keep_last_weights(root: Path) -> None:
    """Remove what a finished run does not need: older checkpoints, and optimizer and random states of the last.

    The manifest is exchanged before the files are removed, so that a crash leaves a whole checkpoint.
    """
    with disk_errors(root):
        _prune(root, 1)
        for _, path in _finished(root):
            manifest = decode_json((path / MANIFEST).read_bytes())
            dropped = {f"{group}.safetensors" for group in ("optimizer", "random")} & manifest["files"].keys()
            manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name not in dropped}
            write_atomically(path / MANIFEST, encode_json(manifest, indent=1).encode())
            for name in dropped:
                (path / name).unlink()


def capture_random_state() -> dict[str, Tensor]:
    """Return the state of the CPU's generator ("cpu") and of every visible GPU's ("cuda-0", ...), uint8 `[bytes]`."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state()} | {f"cuda-{index}": state for index, state in enumerate(gpus)}


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Restore the state of the generators; raises `UserError` when one of its GPUs is missing."""
    gpus = sorted(name for name in states if name != "cpu")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(gpus) > present:
        raise UserError(
            f"the checkpoint has the random state of {len(gpus)} GPUs, {present} are visible: resume on as many"
        )
    torch.set_rng_state(states["cpu"])
    for name in gpus:
        torch.cuda.set_rng_state(states[name], int(name.removeprefix("cuda-")))
