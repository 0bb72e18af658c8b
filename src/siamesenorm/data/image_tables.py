"""Images in arrays and tables: idx files (those of MNIST), parquet files, and saved Hugging Face datasets."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from siamesenorm.data.image_files import (
    CHECKSUM_BYTES,
    HELD_OUT,
    TRAIN,
    ImageEntry,
    Listing,
    Stored,
    channels_of,
    decode_image,
    first_of_classes,
)
from siamesenorm.errors import UserError, optional, reason

PARQUET_BYTES = 2**34
"""The most that is read of parquet files, which stay in memory."""
IDX_IMAGES = re.compile(r"(.*)images([-.])idx([34])-ubyte(\.gz)?", re.IGNORECASE)

# --- idx files


def list_idx(files: Sequence[Path]) -> Stored:
    """Return the images of idx files (of MNIST's form), as many pairs of them as are there: at most two."""
    parts: dict[str, Listing] = {}
    for file in files:
        part = TRAIN if len(files) == 1 or "train" in file.name.lower() else HELD_OUT[-1]
        if part in parts:
            raise UserError(f"{file.parent}: several files of idx images for {part}: give the path of one")
        name = re.sub("(?i)images([-.])idx[34]", r"labels\1idx1", file.name)
        pixels, labels = _read_idx(file), _read_idx(file.with_name(name))
        if pixels.ndim not in (3, 4) or labels.shape != pixels.shape[:1]:
            raise UserError(f"{file}: {list(pixels.shape)} images and {list(labels.shape)} labels: give files that fit")
        images = torch.from_numpy(pixels.reshape(*pixels.shape[:3], -1).transpose(0, 3, 1, 2).copy())
        entries = [
            ImageEntry("", str(label), image.size, zlib.crc32(image))
            for label, image in zip(labels, pixels, strict=True)
        ]
        parts[part] = Listing(entries, images.__getitem__, in_memory=True)
    if TRAIN not in parts:
        raise UserError(f"{files[0].parent}: no idx images for training among {len(files)}: give the path of one")
    classes = sorted({int(entry.label) for entry in parts[TRAIN].entries})
    return Stored(tuple(map(str, classes)), parts)


def _read_idx(file: Path) -> NDArray[np.uint8]:
    """Return the array of a file: 0, 0, type 8 (bytes), number of axes, big-endian lengths, values."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read ({reason(error)}): fetch it again") from error
    axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    values = content[4 + 4 * axes :]
    shape = [int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes)]
    if not axes or len(values) != math.prod(shape):
        raise UserError(f"{file}: no whole idx file of bytes: fetch it again")
    return np.frombuffer(values, np.uint8).reshape(shape)


# --- parquet files and Hugging Face datasets


def list_parquet(files: Sequence[Path]) -> Stored:
    """Return the images of parquet files, which are of the part that their names begin with, or all for training."""
    pyarrow, parquet = (optional(name, "data", str(files[0])) for name in ("pyarrow", "pyarrow.parquet"))
    total = sum(file.stat().st_size for file in files)
    if total > PARQUET_BYTES:
        raise UserError(f"{files[0].parent}: {total:,} bytes of parquet do not stay in memory: give a saved dataset")
    of_part = {
        part: [file for file in files if re.match(rf"{part}(?![a-z])", file.name) or file.parent.name == part]
        for part in (TRAIN, *HELD_OUT)
    }
    parts = {part: each for part, each in of_part.items() if each} if of_part[TRAIN] else {TRAIN: list(files)}
    try:
        tables = {
            part: pyarrow.concat_tables([parquet.read_table(file) for file in each]) for part, each in parts.items()
        }
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{files[0].parent}: damaged parquet ({reason(error)}): fetch or write it again") from error
    metadata = json.loads((tables[TRAIN].schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    return _list_tables(str(files[0].parent), tables, {name: each.get("names") for name, each in features.items()})


def list_dataset(path: Path) -> Stored:
    """Return the images of a dataset that `save_to_disk` of Hugging Face's datasets wrote."""
    datasets = optional("datasets", "data", str(path))
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # the package raises anything
        raise UserError(f"{path}: no dataset that can be read ({reason(error)}): save it again") from error
    parts = found if isinstance(found, datasets.DatasetDict) else {TRAIN: found}
    if TRAIN not in parts:
        raise UserError(f"{path}: the dataset has no split train, only {', '.join(parts)}: save one, or one split")
    names = {name: getattr(feature, "names", None) for name, feature in parts[TRAIN].features.items()}
    tables = {name: part.with_format("arrow")[:] for name, part in parts.items() if name in (TRAIN, *HELD_OUT)}
    return _list_tables(str(path), tables, names)


def _list_tables(where: str, tables: Mapping[str, Any], names: Mapping[str, Sequence[str] | None]) -> Stored:
    """Return the images in tables: of the first column of images, and the first of labels.

    An image is bytes, or a struct with `bytes`; a label is a text, or a number, with the names of the classes or not.
    """
    import pyarrow

    kinds = {field.name: field.type for field in tables[TRAIN].schema}
    structs = [
        name for name, kind in kinds.items() if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    ]
    images = structs or [name for name, kind in kinds.items() if pyarrow.types.is_binary(kind)]
    labels = [name for name in kinds if names.get(name)] or [name for name in ("label", "labels") if name in kinds]
    if not (images and labels):
        raise UserError(
            f"{where}: has the columns {', '.join(kinds)}: a column of images (bytes) and `label` are needed"
        )
    parts = (TRAIN, *[part for part in HELD_OUT if part in tables][:1])
    columns = {part: _column(tables[part][images[0]], structs) for part in parts}
    entries = {
        part: _entries(f"{where}: {part}", columns[part], tables[part][labels[0]].to_pylist(), names.get(labels[0]))
        for part in parts
    }
    first = first_of_classes(entries[TRAIN])
    channels = channels_of([(columns[TRAIN][row].as_py(), f"{where}: row {row} of {TRAIN}") for row in first])

    def listing(part: str) -> Listing:
        def decode(row: int) -> Tensor:
            return decode_image(columns[part][row].as_py(), f"{where}: row {row} of {part}", channels)

        return Listing(entries[part], decode)

    found = {entry.label for entry in entries[TRAIN]}
    classes = names.get(labels[0]) or sorted(found, key=lambda name: (int(name) if name.isdecimal() else -1, name))
    return Stored(tuple(classes), {part: listing(part) for part in parts})


def _column(column: Any, structs: Sequence[str]) -> Any:
    """Return the bytes of images."""
    from pyarrow import compute

    return compute.struct_field(column, "bytes") if structs else column


def _entries(where: str, column: Any, labels: Sequence[Any], names: Sequence[str] | None) -> list[ImageEntry]:
    """Return the entries of the rows of a part, which have no names."""
    from pyarrow import compute

    sizes = compute.binary_length(column).to_pylist()
    counts = sum(size or 0 for size in sizes) <= CHECKSUM_BYTES
    entries = []
    for row, (label, size) in enumerate(zip(labels, sizes, strict=True)):
        if size is None:
            raise UserError(f"{where}: row {row} has no bytes of an image: write the images into the data")
        if label is None or (isinstance(label, int) and not 0 <= label < (len(names) if names else label + 1)):
            raise UserError(f"{where}: row {row} has the label {label}: choose data whose rows all have a class")
        name = names[label] if names and isinstance(label, int) else str(label)
        entries.append(ImageEntry("", name, size, zlib.crc32(column[row].as_py()) if counts else 0))
    return entries
