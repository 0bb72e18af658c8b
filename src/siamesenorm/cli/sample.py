"""siamesenorm sample: draw images from a run of a generative task, as a grid and for evaluators of samples."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal
from zipfile import ZipFile

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.files import disk_errors, encode_json, move_durably, write_atomically
from siamesenorm.progress import ProgressDisplay
from siamesenorm.tasks.task import ImageSampler
from siamesenorm.training.config import RunConfig
from siamesenorm.training.execution import autocast, find_device
from siamesenorm.training.run_directory import RunDirectory

WIDEST_ROW = 16
"""The most columns of a grid that has one for every class."""
MOST_IN_GRID = 256
LEAST_SIZE, GAP = 32, 2
"""Pixels: smaller images are enlarged by a whole factor; between two images."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Draw images from a run, and write them as a PNG grid.

    The i-th image depends on the seed and i, not on the number of images or the batch, up to rounding.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run."""
    classes: tuple[int, ...] = ()
    """Classes of the images, in turn; all if not given."""
    count: int = 40
    """Images to draw."""
    guidance: float = 1.5
    """Factor of classifier-free guidance; 1 is none."""
    steps: int = 50
    """Steps of the sampler, at most those of the training."""
    sampler: str = "ddpm"
    """Sampler of diffusers: ddpm, ddim or dpm-solver."""
    seed: int = 0
    """Seed of the noise."""
    batch: int = 40
    """Images at once."""
    weights: Literal["auto", "ema", "model"] = "auto"
    """The average of the weights, or the last ones; auto is the average where the run has one."""
    device: str = "cpu"
    """Device, such as cpu or cuda."""
    out: Path | None = None
    """PNG file of the first 256 images; samples.png in the run's directory if not given."""
    npz: Path | None = None
    """File of all images for the evaluator of ADM: uint8 [count, height, width, 3] as arr_0; grey is written as RGB."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        for name in ("count", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: choose at least 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed}: choose a number from 0 to below 2^63")


def run(arguments: Arguments) -> None:
    """Draw the images and write them; nothing is left behind where that fails."""
    directory = RunDirectory(arguments.run)
    config = directory.read_config()
    sampler = config.task.build_sampler()
    device = find_device(arguments.device)
    model, which, step = open_weights(directory, config, sampler, arguments.weights, device)
    classes = arguments.classes or tuple(range(sampler.classes))
    out = arguments.out or arguments.run / "samples.png"
    for file in filter(None, (out, arguments.npz)):
        if not file.parent.is_dir():
            raise UserError(f"{file}: no such directory {file.parent}: make it, or choose another path")
        if file.is_dir():
            raise UserError(f"{file} is a directory: name a file")
    if out.suffix.lower() != ".png":
        raise UserError(f"{out}: images are written as PNG: name a file that ends in .png")
    shown: list[Tensor] = []
    with disk_errors(out.parent), npz_file(arguments.npz, arguments.count) as written:
        with autocast(config.precision, device):
            for images in draw(arguments, sampler, model, classes):
                written(images)
                shown += images[: MOST_IN_GRID - len(shown)]
        columns = len(classes) if 1 < len(classes) <= WIDEST_ROW else math.isqrt(len(shown) - 1) + 1
        write_atomically(out, png(grid(torch.stack(shown), columns)))
    if arguments.json:
        facts = {"images": arguments.count, "step": step, "weights": which, "out": str(out)}
        print(encode_json(facts | ({"npz": str(arguments.npz)} if arguments.npz else {})))
    else:
        files = f"{out}{f' and {arguments.npz}' if arguments.npz else ''}"
        print(f"{files}: {arguments.count} images by the weights of step {step} ({which})")


def open_weights(
    directory: RunDirectory, config: RunConfig, sampler: ImageSampler, weights: str, device: torch.device
) -> tuple[nn.Module, str, int]:
    """Return the model, which weights it has, and their step; raises UserError for a run without them."""
    which = ("ema" if config.ema else "model") if weights == "auto" else weights
    if which == "ema" and not config.ema:
        raise UserError(f"{directory.path} has no average of its weights: use --weights model, or train with --ema")
    checkpoint = directory.newest_checkpoint(("model", which))
    model = sampler.build_model(device)
    model.load_state_dict({**checkpoint.tensors["model"], **checkpoint.tensors[which]})
    return model.eval(), which, checkpoint.step


def draw(arguments: Arguments, sampler: ImageSampler, model: nn.Module, classes: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the images in batches, uint8 [batch, channels, height, width], with their progress on the console."""
    done, total = 0, math.ceil(arguments.count / arguments.batch) * arguments.steps

    def advance() -> None:
        nonlocal done
        done += 1
        progress.update(done, f"{min(arguments.count, done // arguments.steps * arguments.batch)} images")

    with ProgressDisplay(total) as progress:
        for first in range(0, arguments.count, arguments.batch):
            indices = range(first, min(first + arguments.batch, arguments.count))
            yield sampler.sample(
                model,
                [classes[index % len(classes)] for index in indices],
                guidance=arguments.guidance,
                seed=arguments.seed,
                first=first,
                steps=arguments.steps,
                sampler=arguments.sampler,
                progress=advance,
            )


def grid(images: Tensor, columns: int) -> Tensor:
    """Return images [count, channels, height, width] in rows, with white between them: [channels, height, width]."""
    factor = max(1, math.ceil(LEAST_SIZE / images.shape[-1]))
    images = images.repeat_interleave(factor, dim=-1).repeat_interleave(factor, dim=-2)
    count, channels, height, width = images.shape
    rows = math.ceil(count / columns)
    canvas = images.new_full((channels, rows * (height + GAP) + GAP, columns * (width + GAP) + GAP), 255)
    for index, image in enumerate(images):
        top, left = (GAP + (index // columns) * (height + GAP)), (GAP + (index % columns) * (width + GAP))
        canvas[:, top : top + height, left : left + width] = image
    return canvas


def png(image: Tensor) -> bytes:
    """Return an image uint8 [channels, height, width] of 1 or 3 channels as a PNG file."""
    from siamesenorm.data.augmentation import to_pil

    file = io.BytesIO()
    to_pil(image).save(file, "png")
    return file.getvalue()


@contextmanager
def npz_file(path: Path | None, count: int) -> Iterator[NpzImages]:
    """Give a function that appends images to a file; the file has its name once all are there."""
    if path is None:
        yield NpzImages(None, count)
        return
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with ZipFile(partial, "w") as archive, archive.open("arr_0.npy", "w", force_zip64=True) as entry:
            yield NpzImages(entry, count)
        move_durably(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class NpzImages:
    """Appends images to the array of an .npz file, uint8 [count, height, width, 3], as it is drawn."""

    def __init__(self, entry: IO[bytes] | None, count: int) -> None:
        self.entry, self.count, self.begun = entry, count, False

    def __call__(self, images: Tensor) -> None:
        """Append images uint8 [batch, channels, height, width]; grey ones as RGB."""
        if self.entry is None:
            return
        pixels = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
        if not self.begun:
            shape = (self.count, *pixels.shape[1:])
            header = {"descr": np.lib.format.dtype_to_descr(pixels.dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self.entry, header)
            self.begun = True
        self.entry.write(pixels.tobytes())
