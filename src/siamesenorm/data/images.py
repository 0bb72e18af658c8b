"""Labelled images: scikit-learn's digits, or those in a folder, a zip, idx or parquet files, or a saved dataset.

* train, and a part that is held out: `validation`, `val` or `test` of the data, the first that exists; where there is
  none, a fifth of the images, the first of a fixed order, whatever the seed of a run
* an image that cannot be decoded is refused when it is read, by the name of its file: to leave it out would change the
  order of all samples after it. `ImageData.verify` reads all of them before a long run.
* grey images have one channel where those of all classes are grey (the first of each is looked at), else all are RGB
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from siamesenorm.data.image_files import TRAIN, Listing, Stored, list_folder, list_zip
from siamesenorm.data.image_tables import IDX_IMAGES, list_dataset, list_idx, list_parquet
from siamesenorm.data.prepared import SampleOrder
from siamesenorm.errors import UserError

DIGITS = "digits"
HELD_OUT_FRACTION = 5
"""One in so many images is held out of data that have no held-out part, rounded up."""
KEPT_BYTES = 2**29
"""Decoded images that a split keeps in memory."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageSplit:
    """Images and their classes, `labels` int64 [n]; one is decoded when it is read, and kept while there is room."""

    def __init__(self, labels: Tensor, read: Callable[[int], Tensor], *, keeps: bool = True) -> None:
        self.labels, self._read = labels, read
        self._kept: dict[int, Tensor] = {}
        self._room = KEPT_BYTES if keeps else 0

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Tensor:
        """Return an image, uint8 [channels, height, width], which must not be changed.

        Raises UserError, with the name of its file, where it cannot be decoded. Threads may call it at the same time.
        """
        found = self._kept.get(index)
        if found is None:
            found = self._read(index)
            if found.numel() <= self._room:
                self._room -= found.numel()
                self._kept[index] = found
        return found

    def part(self, indices: Sequence[int]) -> ImageSplit:
        """Return some of the images, in the order of the indices."""
        return ImageSplit(self.labels[torch.as_tensor(indices)], lambda index: self.image(indices[index]), keeps=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageData:
    """Images to train on and images that are held out, of the same classes.

    `digest` identifies their content wherever they are stored: names (below the folder of a split), classes, sizes and
    CRC-32 of the encoded images. Of more than 1 GiB in a folder or a dataset the checksums are left out, because each
    process of each run would read all of it to begin: a change that keeps the size of every file goes unnoticed.
    """

    name: str
    digest: str
    classes: tuple[str, ...]
    train: ImageSplit
    held_out: ImageSplit
    channels: int
    largest: int = 255
    """The value of white."""
    mean: Tensor
    std: Tensor
    """Mean and standard deviation [channels, 1, 1], in units of the pixels, by which `normalised` shifts and scales."""

    def normalised(self, images: Tensor) -> Tensor:
        """Return images [..., channels, height, width] of any dtype as (image - mean) / std in fp32.

        ImageNet's mean and deviation for RGB, a half of white for grey images, those of all images for the digits.
        """
        return (images.to(torch.float32) - self.mean) / self.std

    def verify(self) -> None:
        """Decode every image; raises UserError for the first that cannot be."""
        for split in (self.train, self.held_out):
            for index in range(len(split)):
                split.image(index)


def open_images(data: str) -> ImageData:
    """Return the images that a name or a path stands for; raises UserError, in one line, for what cannot be used.

    * "digits": scikit-learn's 1,797 images of 8 x 8 grey pixels
    * a folder or a zip of `train/CLASS/NAME.jpg`, and maybe `validation/`, `val/` or `test/`; or of `CLASS/NAME.jpg`
    * a folder of idx files as MNIST's, gzipped or not, or the path of one with images; their labels are beside it
    * a parquet file or a folder of them, with a column of encoded images and one of labels
    * the folder of a Hugging Face dataset, written by `save_to_disk`
    """
    if data == DIGITS:
        return _read_digits()
    path = Path(data).expanduser()
    stored = _list_images(path)
    digest = hashlib.sha256("\n".join(stored.classes).encode())
    splits = {name: _split(path, stored.classes, listing, digest) for name, listing in stored.parts.items()}
    if len(stored.classes) < 2:
        raise UserError(f"{path}: one class, {stored.classes[0]}: give images of at least two, a folder for each")
    train, *others = splits.pop(TRAIN), *splits.values()
    _require_every_class(path, stored.classes, train)
    if others:
        held_out = others[0]
    else:
        train, held_out = _hold_out(train)
        _require_every_class(path, stored.classes, train)
    channels = len(train.image(0))
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    return ImageData(
        name=path.name,
        digest=digest.hexdigest(),
        classes=stored.classes,
        train=train,
        held_out=held_out,
        channels=channels,
        mean=255 * torch.tensor(mean).view(-1, 1, 1),
        std=255 * torch.tensor(std).view(-1, 1, 1),
    )


def _list_images(path: Path) -> Stored:
    """Return the images at a path, whose format is that of its files."""
    if not path.exists():
        raise UserError(f"no images at {str(path)!r}: give 'digits', or the path of a folder, a zip, idx or parquet")
    if not path.is_dir():
        if path.suffix == ".parquet":
            return list_parquet([path])
        return list_idx([path]) if IDX_IMAGES.fullmatch(path.name) else list_zip(path)
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return list_dataset(path)
    if files := [each for each in sorted(path.iterdir()) if IDX_IMAGES.fullmatch(each.name)]:
        return list_idx(files)
    if files := sorted(path.rglob("*.parquet")):
        return list_parquet(files)
    return list_folder(path)


def _split(path: Path, classes: Sequence[str], listing: Listing, digest: hashlib._Hash) -> ImageSplit:
    """Return the images of a listing, and add what identifies them to a digest."""
    number = {name: label for label, name in enumerate(classes)}
    if unknown := Counter(entry.label for entry in listing.entries if entry.label not in number):
        name = next(iter(unknown))
        raise UserError(f"{path}: the held-out class {name} is none of those to train on: give both the same classes")
    lines = [f"{number[each.label]} {each.name} {each.size} {each.checksum:08x}" for each in listing.entries]
    digest.update(f"\n{len(lines)}\n".encode() + "\n".join(lines).encode())
    labels = torch.tensor([number[entry.label] for entry in listing.entries], dtype=torch.int64)
    return ImageSplit(labels, listing.decode, keeps=not listing.in_memory)


def _require_every_class(path: Path, classes: Sequence[str], train: ImageSplit) -> None:
    missing = [name for label, name in enumerate(classes) if not (train.labels == label).any()]
    if missing:
        raise UserError(f"{path}: no images of the class {missing[0]} to train on: add some, or remove the class")


def _hold_out(split: ImageSplit) -> tuple[ImageSplit, ImageSplit]:
    """Return the images to train on, and those that are held out: the first of a fixed order."""
    order = SampleOrder(len(split), 0).indices(0, len(split)).tolist()
    count = -(-len(split) // HELD_OUT_FRACTION)
    return split.part(order[count:]), split.part(order[:count])


@cache
def _read_digits() -> ImageData:
    """Return scikit-learn's digits, read from its file without importing it: the import takes seconds."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError("scikit-learn, which has the digits, is not installed: pip install 'siamesenorm[lab]'")
    rows = np.loadtxt(Path(spec.origin).parent / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.uint8)
    images = torch.from_numpy(rows[:, :-1].copy()).view(-1, 1, 8, 8)
    pixels = images.to(torch.float32)
    labels = torch.from_numpy(rows[:, -1].astype(np.int64))
    train, held_out = _hold_out(ImageSplit(labels, images.__getitem__, keeps=False))
    return ImageData(
        name=DIGITS,
        digest=hashlib.sha256(rows.tobytes()).hexdigest(),
        classes=tuple(map(str, range(10))),
        train=train,
        held_out=held_out,
        channels=1,
        largest=16,
        mean=pixels.mean().view(1, 1, 1),
        std=pixels.std().view(1, 1, 1),
    )
