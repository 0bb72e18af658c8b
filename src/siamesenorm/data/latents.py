"""What a diffusion model is trained on: pixels scaled to [-1, 1], or latents of an autoencoder of diffusers.

The autoencoder is read from a local directory. Images are encoded once, to means and deviations of their latents, in a
file of the user's cache that is found by what the images, the autoencoder and the size are. Mirrored images, which have
other latents, are encoded for the first run that trains on them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from siamesenorm.data.images import ImageData, ImageSplit
from siamesenorm.errors import UserError, optional, reason
from siamesenorm.files import StoppedError, disk_errors, exclusive, move_durably
from siamesenorm.progress import ProgressDisplay

CONFIG_FILE, WEIGHTS_FILE = "config.json", "diffusion_pytorch_model.safetensors"
ENCODED_AT_ONCE = 8
WAIT_SECONDS = 0.5


class PixelSplit:
    """Images as fp32 [channels, size, size] in [-1, 1], and their `labels`; larger ones are reduced and cropped."""

    def __init__(self, images: ImageSplit, size: int, largest: int, flip: float = 0.0) -> None:
        self.labels, self._images = images.labels, images
        self._size, self._largest, self._flip = size, largest, flip
        scaled_pixels(images.image(0), size, largest)  # refuses images that are too small

    def __len__(self) -> int:
        return len(self.labels)

    def draw(self, index: int, generator: torch.Generator) -> Tensor:
        """Return an image, mirrored with probability `flip`."""
        pixels = scaled_pixels(self._images.image(index), self._size, self._largest)
        return pixels.flip(-1) if _bernoulli(self._flip, generator) else pixels


class LatentSplit:
    """Latents fp32 [channels, size, size] drawn from the autoencoder's distributions, and `labels` of the images."""

    def __init__(self, labels: Tensor, autoencoder: Autoencoder, moments: Any, mirrored: Any, flip: float) -> None:
        self.labels, self._moments, self._mirrored, self._flip = labels, moments, mirrored, flip
        self._shift, self._scale = autoencoder.shift, autoencoder.scale

    def __len__(self) -> int:
        return len(self.labels)

    def draw(self, index: int, generator: torch.Generator) -> Tensor:
        """Return (mean + deviation e - shift) scale of an image, e from N(0, 1), mirrored with probability `flip`."""
        moments = self._mirrored if _bernoulli(self._flip, generator) else self._moments
        mean, deviation = torch.from_numpy(np.array(moments[index])).chunk(2)
        drawn = mean + deviation * torch.randn(mean.shape, generator=generator)
        return (drawn - self._shift) * self._scale


Split = PixelSplit | LatentSplit


def _bernoulli(probability: float, generator: torch.Generator) -> bool:
    """Return True with a probability; at 0 no number is drawn."""
    return probability > 0 and float(torch.rand((), generator=generator)) < probability


def scaled_pixels(image: Tensor, size: int, largest: int) -> Tensor:
    """Return an image uint8 [channels, height, width] as fp32 [channels, size, size], from black -1 to white 1.

    A larger one is reduced to the size on its shorter side, and its middle is cut out. Raises UserError for a smaller
    one.
    """
    height, width = image.shape[1:]
    if min(height, width) < size:
        raise UserError(f"an image has {height} x {width} pixels, the model reads {size} x {size}: give larger images")
    pixels = image.to(torch.float32)
    if (height, width) != (size, size):
        ratio = size / min(height, width)
        reduced = (max(size, round(height * ratio)), max(size, round(width * ratio)))
        pixels = F.interpolate(pixels[None], reduced, mode="bicubic", antialias=True)[0].clamp(0, largest)
        top, left = (reduced[0] - size) // 2, (reduced[1] - size) // 2
        pixels = pixels[:, top : top + size, left : left + size]
    return pixels * (2 / largest) - 1


@dataclass(frozen=True)
class Autoencoder:
    """An AutoencoderKL of diffusers in a local directory; raises UserError for any other directory."""

    path: Path

    def __post_init__(self) -> None:
        missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (self.path / name).is_file()]
        if missing:
            raise UserError(f"{self.path} has no {missing[0]}: name the directory of an AutoencoderKL of diffusers")
        if self.config.get("_class_name") != "AutoencoderKL":
            found = self.config.get("_class_name", "no class")
            raise UserError(f"{self.path} holds {found}: name the directory of an AutoencoderKL of diffusers")

    @cached_property
    def config(self) -> dict[str, Any]:
        """What its config.json says."""
        try:
            config = json.loads((self.path / CONFIG_FILE).read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / CONFIG_FILE} cannot be read ({reason(error)}): restore it") from error
        return config if isinstance(config, dict) else {}

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return int(self.config.get("latent_channels", 4))

    @property
    def image_channels(self) -> int:
        """Channels of the images."""
        return int(self.config.get("in_channels", 3))

    @property
    def factor(self) -> int:
        """Width of an image, divided by that of its latents."""
        return int(2 ** (len(self.config.get("block_out_channels", (64,))) - 1))

    @property
    def scale(self) -> float:
        """Factor that gives latents a variance near 1."""
        return float(self.config.get("scaling_factor") or 1.0)

    @property
    def shift(self) -> float:
        """Mean of the latents."""
        return float(self.config.get("shift_factor") or 0.0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of configuration and weights."""
        digest = hashlib.sha256((self.path / CONFIG_FILE).read_bytes())
        with open(self.path / WEIGHTS_FILE, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def model(self) -> Any:
        """The autoencoder in evaluation mode; raises UserError without diffusers, and for other weights."""
        kind = optional("diffusers", "diffusion", str(self.path)).AutoencoderKL
        try:
            return kind.from_pretrained(self.path, local_files_only=True).eval().requires_grad_(False)
        except Exception as error:  # the library raises anything
            raise UserError(f"{self.path}: not an AutoencoderKL that can be loaded ({reason(error)})") from error

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Return mean and deviation of the latents of images [batch, ...] in [-1, 1]: [batch, 2 channels, ...]."""
        if images.shape[1] == 1 and self.image_channels == 3:
            images = images.expand(-1, 3, -1, -1)
        found = self.model.encode(images).latent_dist
        return torch.cat((found.mean, found.std), dim=1)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images [batch, image channels, height, width], about in [-1, 1], of scaled latents."""
        self.model.to(latents.device)
        images: Tensor = self.model.decode(latents / self.scale + self.shift).sample
        return images


def open_pixels(images: ImageData, size: int, flip: float = 0.0) -> tuple[PixelSplit, PixelSplit]:
    """Return the images to train on, mirrored with probability `flip`, and those that are held out."""
    return (
        PixelSplit(images.train, size, images.largest, flip),
        PixelSplit(images.held_out, size, images.largest),
    )


def open_latents(
    images: ImageData, autoencoder: Autoencoder, size: int, flip: float = 0.0
) -> tuple[LatentSplit, LatentSplit]:
    """Return latents of `size` x `size` of the images to train on, and of those held out; encode them the first time.

    Images to train on are mirrored with probability `flip`. Another process that encodes the same images is waited for.
    Raises UserError for images that the autoencoder does not read, and where nothing can be written.
    """
    if autoencoder.image_channels not in (3, images.channels):
        raise UserError(
            f"{autoencoder.path} encodes images of {autoencoder.image_channels} channels, those of {images.name} have "
            f"{images.channels}: choose another autoencoder"
        )
    encoder = _Encoder(images, autoencoder, size)
    moments = encoder.moments({"train": images.train, "held_out": images.held_out})
    mirrored = encoder.moments({"train": images.train}, mirrored=True) if flip else moments
    return (
        LatentSplit(images.train.labels, autoencoder, moments["train"], mirrored["train"], flip),
        LatentSplit(images.held_out.labels, autoencoder, moments["held_out"], None, 0.0),
    )


def latents_cache() -> Path:
    """Return the directory of encoded images: siamesenorm/latents in $XDG_CACHE_HOME, which is ~/.cache by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "siamesenorm" / "latents"


def _write_once(directory: Path, write: Callable[[Path], None]) -> None:
    """Make a directory by `write` into a temporary one, unless it is there; one process writes, the others wait."""
    partial = directory.with_name(f".{directory.name}.tmp")
    while not directory.is_dir():
        with ExitStack() as held:
            try:
                held.enter_context(exclusive(directory.with_name(f".{directory.name}.lock")))
            except StoppedError:
                time.sleep(WAIT_SECONDS)
                continue
            if not directory.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                write(partial)
                move_durably(partial, directory)


@dataclass(frozen=True)
class _Encoder:
    """What encodes images, and keeps the latents in the cache."""

    images: ImageData
    autoencoder: Autoencoder
    size: int

    def moments(self, splits: dict[str, ImageSplit], *, mirrored: bool = False) -> dict[str, Any]:
        """Return mean and deviation of the latents of splits: of each, fp32 [images, 2 channels, size, size]."""
        parts = [self.images.digest, self.autoencoder.digest, str(self.size)]
        if mirrored:
            parts.append("mirrored")
        directory = latents_cache() / hashlib.sha256(":".join(parts).encode()).hexdigest()[:20]
        with disk_errors(directory.parent):
            directory.parent.mkdir(parents=True, exist_ok=True)
            _write_once(directory, lambda target: self._write(splits, target, mirrored))
        return {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in splits}

    def _write(self, splits: dict[str, ImageSplit], target: Path, mirrored: bool) -> None:
        """Write a file of moments for each split."""
        pixels, largest, done = self.size * self.autoencoder.factor, self.images.largest, 0
        label = f"encoding {self.images.name}" + (", mirrored" if mirrored else "")
        with ProgressDisplay(sum(map(len, splits.values())), unit="images") as progress:
            for name, split in splits.items():
                shape = (len(split), 2 * self.autoencoder.channels, self.size, self.size)
                moments = np.lib.format.open_memmap(target / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape)
                for start in range(0, len(split), ENCODED_AT_ONCE):
                    indices = range(start, min(start + ENCODED_AT_ONCE, len(split)))
                    batch = torch.stack([scaled_pixels(split.image(each), pixels, largest) for each in indices])
                    found = self.autoencoder.encode(batch.flip(-1) if mirrored else batch)
                    moments[start : start + len(found)] = found.numpy()
                    done += len(found)
                    progress.update(done, label)
                moments.flush()
