"""Tensors in safetensors files, whole or in parts: written piece by piece, read as a whole or by slices.

A file that a single process writes holds whole tensors. One of several processes holds parts, and gives their offsets
in the metadata that `torch.distributed.checkpoint` uses for this format, so that its own reader finds them, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

SHARDING = "DCP_SHARDING_INFO"

# The names of the safetensors format, for the dtypes a training state is made of.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor: its first element is at `offset` of the tensor; `file` is an open safetensors file."""

    file: Any
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the elements from `start` on, by the piece's own indices, on the CPU."""
        tensor: Tensor
        if shape == self.shape:  # the only case without dimensions, which have no slices
            tensor = self.file.get_tensor(self.name)
        else:
            place = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
            tensor = self.file.get_slice(self.name)[place]
        return tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in one or several files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        if len(self.pieces) == 1:
            return self.pieces[0].read((), self.shape)
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for piece in self.pieces:
            place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            tensor[place] = piece.read((), piece.shape)
        return tensor


def open_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors in files by name; the files stay open, and nothing is read but their headers."""
    pieces: dict[str, list[Piece]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in files:
        file: Any = safe_open(path, framework="pt")
        sharding = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
        for name in file.keys():  # noqa: SIM118
            header = file.get_slice(name)
            shape = tuple(header.get_shape())
            offset = tuple(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(shape)
            pieces.setdefault(name, []).append(Piece(file, name, offset, shape))
            dtypes[name] = _BY_NAME[header.get_dtype()]
    return {name: StoredTensor(dtypes[name], _shape(found), tuple(found)) for name, found in pieces.items()}


def _shape(pieces: Iterable[Piece]) -> tuple[int, ...]:
    ends = ([o + n for o, n in zip(piece.offset, piece.shape, strict=True)] for piece in pieces)
    return tuple(map(max, zip(*ends, strict=True)))


def encode_tensors(
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    offsets: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file piece by piece, for which `read` returns one tensor at a time.

    `layout` has dtypes and shapes; `offsets` are those of tensors that are parts of others. The library's writer needs
    all tensors in host memory at once, refuses tied ones, and reports a full disk as text.
    """
    for name, (dtype, _) in layout.items():
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} is {dtype}: a checkpoint holds real numbers, integers and booleans")
    # Wide elements first, as the library does: every tensor is then aligned.
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    header: dict[str, Any] = {}
    if offsets is not None:
        sharding = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
        header["__metadata__"] = {SHARDING: json.dumps(sharding)}
    end = 0
    for name in names:
        dtype, shape = layout[name]
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield read(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, wait until it is on the disk, and return its size in bytes and its SHA-256."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}
