"""Images in files, a folder for each class, in a folder or a zip; and what every format gives: a list of its images.

An entry of the list holds what the digest of the data is made of; an image is decoded when it is read.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from siamesenorm.errors import UserError, reason

TRAIN = "train"
HELD_OUT = ("validation", "val", "test")
"""Names of the part that is held out; the first that exists is used."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
CHECKSUM_BYTES = 2**30
"""Up to this size, the content of files counts for their digest; of more, only names and sizes do."""
WIDE_MODES = ("I", "I;16", "I;16B", "I;16L", "F")


class ImageEntry(NamedTuple):
    """What is known of an image without decoding it; name and checksum may be empty."""

    name: str
    label: str
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The images of one part of the data, and how the one at an index is decoded."""

    entries: Sequence[ImageEntry]
    decode: Callable[[int], Tensor]
    in_memory: bool = False
    """Whether the images are decoded already."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The parts of the data by name (`train`, and maybe one of `HELD_OUT`), and the names of the classes."""

    classes: tuple[str, ...]
    parts: Mapping[str, Listing]


def decode_image(content: bytes, where: str, channels: int) -> Tensor:
    """Return an image as uint8 [channels, height, width], grey (1) or RGB (3).

    Raises UserError, which names the file, for one that cannot be decoded or has more than 8 bits a channel.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            mode = image.mode
            pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # decoders raise anything
        raise _unreadable(where, error) from error
    if mode in WIDE_MODES:
        raise UserError(f"{where}: has pixels of mode {mode}: write it with 8 bits a channel")
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1).copy())


def _unreadable(where: str, error: Exception) -> UserError:
    from PIL import UnidentifiedImageError

    what = "of no known format" if isinstance(error, UnidentifiedImageError) else reason(error)
    return UserError(f"{where}: not a readable image ({what}): write it again, or remove it")


def channels_of(contents: Sequence[tuple[bytes, str]]) -> int:
    """Return 1 if all of some images are grey, else 3."""
    from PIL import Image

    for content, where in contents:
        try:
            with Image.open(io.BytesIO(content)) as image:
                grey = image.mode in ("L", "1")
        except Exception as error:  # decoders raise anything
            raise _unreadable(where, error) from error
        if not grey:
            return 3
    return 1


def first_of_classes(entries: Sequence[ImageEntry]) -> list[int]:
    """Return the index of the first image of every class."""
    first: dict[str, int] = {}
    for index, entry in enumerate(entries):
        first.setdefault(entry.label, index)
    return list(first.values())


def list_folder(path: Path) -> Stored:
    """Return the images in class folders below a path; raises UserError for an empty class folder."""
    return _list_classes(_read_folder(path))


def list_zip(path: Path) -> Stored:
    """Return the images in class folders inside a zip; raises UserError for an empty class folder."""
    return _list_classes(_read_zip(path))


@dataclass(frozen=True, slots=True)
class _Tree:
    """The files and folders below a path, by their names with slashes: sizes and checksums of images, and contents."""

    path: Path
    images: Mapping[str, tuple[int, int]]
    folders: Sequence[str]
    read: Callable[[str], bytes]

    def content(self, name: str) -> tuple[bytes, str]:
        """Return what a file holds, and its name in messages; raises UserError where it cannot be read."""
        where = f"{self.path}: {name}"
        try:
            return self.read(name), where
        except (OSError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
            raise UserError(f"{where}: cannot be read ({reason(error)}): write it again, or remove it") from error


def _read_folder(path: Path) -> _Tree:
    files: list[Path] = []
    folders: list[str] = []
    for directory, names, found in os.walk(path, followlinks=True):
        folders += [(Path(directory, name).relative_to(path)).as_posix() for name in sorted(names)]
        files += [Path(directory, name) for name in found]
    sizes = {name: file for file in files if _is_shown(name := file.relative_to(path).as_posix(), SUFFIXES)}
    total = sum(file.stat().st_size for file in sizes.values())
    images = {
        name: (file.stat().st_size, zlib.crc32(file.read_bytes()) if total <= CHECKSUM_BYTES else 0)
        for name, file in sizes.items()
    }
    return _Tree(path, images, folders, lambda name: (path / name).read_bytes())


def _read_zip(path: Path) -> _Tree:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{path}: no folder, and no whole zip, idx or parquet file ({reason(error)})") from error
    images = {
        each.filename: (each.file_size, each.CRC) for each in archive.infolist() if _is_shown(each.filename, SUFFIXES)
    }
    folders = [each.filename.rstrip("/") for each in archive.infolist() if each.is_dir()]
    return _Tree(path, images, folders, archive.read)


def _is_shown(name: str, suffixes: tuple[str, ...] = ("",)) -> bool:
    """Whether a name has a suffix, and nothing in it is hidden."""
    return name.lower().endswith(suffixes) and not f"/{name}".count("/.") and not name.startswith("__MACOSX")


def _list_classes(tree: _Tree) -> Stored:
    """Return the images of `PART/CLASS/NAME`, or of `CLASS/NAME`, in the order of their names.

    Folders around all of them are ignored.
    """
    if not tree.images:
        raise UserError(f"{tree.path}: no images in it: give train/CLASS/NAME with names in {' '.join(SUFFIXES)}")
    top = ""
    while True:
        inside = {name.partition("/")[0] for name in _below(tree.images, top)}
        if (
            len(inside) > 1
            or inside <= {TRAIN, *HELD_OUT}
            or all(name.count("/") < 2 for name in _below(tree.images, top))
        ):
            break
        top += f"{inside.pop()}/"
    if inside <= set(HELD_OUT):
        raise UserError(f"{tree.path}: no images to train on, only {top}{min(inside)}: add the folder {top}{TRAIN}")
    chosen = (TRAIN, *[part for part in HELD_OUT if part in inside][:1]) if TRAIN in inside else (TRAIN,)
    prefixes = {part: f"{top}{part}/" if TRAIN in inside else top for part in chosen}
    found = {part: _list_part(tree, prefix) for part, prefix in prefixes.items()}
    entries = {part: list(each.values()) for part, each in found.items()}
    names = list(found[TRAIN])
    channels = channels_of([tree.content(names[index]) for index in first_of_classes(entries[TRAIN])])

    def listing(part: str) -> Listing:
        names = list(found[part])
        return Listing(entries[part], lambda index: decode_image(*tree.content(names[index]), channels))

    return Stored(tuple(sorted({entry.label for entry in entries[TRAIN]})), {part: listing(part) for part in chosen})


def _list_part(tree: _Tree, prefix: str) -> dict[str, ImageEntry]:
    """Return the images of the class folders below a prefix, by their whole names."""
    found: dict[str, ImageEntry] = {}
    for name in _below(tree.images, prefix):
        label, slash, inner = name.partition("/")
        if not slash:
            raise UserError(f"{tree.path}: {prefix}{name} is in no class folder: move it into one, or remove it")
        found[prefix + name] = ImageEntry(inner, label, *tree.images[prefix + name])
    filled = {entry.label for entry in found.values()}
    for folder in _below(tree.folders, prefix):
        if "/" not in folder and _is_shown(folder) and folder not in filled:
            raise UserError(f"{tree.path}: the class folder {prefix}{folder} has no images: add some, or remove it")
    return found


def _below(names: Collection[str], prefix: str) -> list[str]:
    """Return the names that begin with a prefix, without it, sorted."""
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))
