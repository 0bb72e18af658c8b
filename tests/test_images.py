"""Labelled images of every source: what is read, what is held out, what identifies them, and what is refused."""

from __future__ import annotations

import gzip
import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from siamesenorm.data.image_files import CHECKSUM_BYTES
from siamesenorm.data.images import ImageData, ImageSplit, open_images
from siamesenorm.errors import UserError

CLASSES = ("cat", "dog")


def png(seed: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> bytes:
    """Return an image of random pixels as PNG, which loses nothing."""
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(file, "png")
    return file.getvalue()


def pixels(content: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


FILES = {
    f"{part}/{name}/{number}.png": png(seed := 10 * (part == "test") + 5 * label + number)
    for part, count in (("train", 4), ("test", 2))
    for label, name in enumerate(CLASSES)
    for number in range(count)
}


def write_folder(path: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def write_zip(path: Path, files: dict[str, bytes] = FILES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in reversed(sorted(files)):
            archive.writestr(name, files[name])
    return path


def rows() -> list[tuple[bytes, int]]:
    return [(FILES[f"train/{name}/{number}.png"], label) for label, name in enumerate(CLASSES) for number in range(4)]


def write_parquet(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.mkdir(parents=True)
    images = [{"bytes": content, "path": None} for content, _ in rows()]
    table = pyarrow.table({"image": images, "label": [label for _, label in rows()]})
    parquet.write_table(table, path / "train-00000-of-00001.parquet")
    parquet.write_table(table.slice(2, 3), path / "test-00000-of-00001.parquet")
    return path


def write_dataset(path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    images = [{"bytes": content, "path": None} for content, _ in rows()]
    whole = datasets.Dataset.from_dict({"image": images, "label": [label for _, label in rows()]}, features=features)
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": whole, "test": whole.select([2, 3, 4])}).save_to_disk(path)
    return path


def idx(values: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, values.ndim)) + b"".join(length.to_bytes(4, "big") for length in values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_idx(path: Path, *parts: str) -> Path:
    path.mkdir(parents=True)
    for seed, part in enumerate(parts):
        images = np.random.default_rng(seed).integers(0, 256, (10, 5, 7))
        (path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (path / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(10) % 3))
        (path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(10) % 3)))
    return path


def same(a: ImageSplit, b: ImageSplit) -> bool:
    return torch.equal(a.labels, b.labels) and all(torch.equal(a.image(i), b.image(i)) for i in range(len(a)))


# --- what is read


@pytest.mark.parametrize("write", [write_folder, write_zip, write_parquet, write_dataset])
def test_images_are_those_of_the_source(write: Callable[[Path], Path], tmp_path: Path) -> None:
    data = open_images(str(write(tmp_path / "data")))
    assert (data.classes == CLASSES) or data.classes == ("0", "1")
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 and data.channels == 3
    for index, (content, _) in enumerate(rows()):
        assert torch.equal(data.train.image(index), pixels(content)) and data.train.image(index).dtype == torch.uint8
    assert 0 < len(data.held_out) < len(data.train)


def test_the_digest_is_that_of_the_content_wherever_it_is_stored(tmp_path: Path) -> None:
    folder = open_images(str(write_folder(tmp_path / "a/images")))
    archive = open_images(str(write_zip(tmp_path / "b.zip")))
    wrapped = open_images(str(write_zip(tmp_path / "c.zip", {f"my images/{name}": c for name, c in FILES.items()})))
    assert folder.digest == archive.digest == wrapped.digest
    assert same(folder.train, archive.train) and same(folder.held_out, wrapped.held_out)
    changed = {**FILES, "train/cat/0.png": FILES["train/cat/1.png"]}
    moved = {("train/dog/9.png" if name == "train/cat/0.png" else name): c for name, c in FILES.items()}
    for number, files in enumerate((changed, moved)):
        assert open_images(str(write_zip(tmp_path / f"{number}.zip", files))).digest != folder.digest
    assert open_images(str(write_parquet(tmp_path / "p"))).digest != folder.digest


def test_much_in_a_folder_is_identified_by_names_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECKSUM_BYTES == 2**30
    monkeypatch.setattr("siamesenorm.data.image_files.CHECKSUM_BYTES", 100)
    folder = write_folder(tmp_path / "a")
    digest = open_images(str(folder)).digest
    content = bytearray(FILES["train/cat/1.png"])
    content[-5] ^= 1
    (folder / "train/cat/1.png").write_bytes(content)
    assert open_images(str(folder)).digest == digest
    (folder / "train/cat/1.png").write_bytes(content + b"\0")
    assert open_images(str(folder)).digest != digest


@pytest.mark.parametrize("name", ["validation", "val", "test"])
def test_the_held_out_part_has_one_of_three_names(name: str, tmp_path: Path) -> None:
    files = {path.replace("test/", f"{name}/"): content for path, content in FILES.items()}
    data = open_images(str(write_folder(tmp_path, {**files, "README.txt": b"text", "train/.DS_Store": b""})))
    assert len(data.train) == 8 and data.held_out.labels.tolist() == [0, 0, 1, 1]


def test_validation_is_preferred_to_test(tmp_path: Path) -> None:
    files = {**FILES, "val/cat/only.png": png(99)}
    data = open_images(str(write_folder(tmp_path, files)))
    assert len(data.held_out) == 1 and torch.equal(data.held_out.image(0), pixels(png(99)))


def test_without_a_held_out_part_a_fifth_is_held_out(tmp_path: Path) -> None:
    files = {
        f"{name}/{number}.png": png(20 * label + number) for label, name in enumerate(CLASSES) for number in range(6)
    }
    data = open_images(str(write_folder(tmp_path, files)))
    assert (len(data.train), len(data.held_out)) == (9, 3)
    images = {data.train.image(i).numpy().tobytes() for i in range(9)}
    images |= {data.held_out.image(i).numpy().tobytes() for i in range(3)}
    assert images == {pixels(content).numpy().tobytes() for content in files.values()}
    assert same(data.train, open_images(str(tmp_path)).train)


def test_grey_images_have_one_channel_where_all_classes_are_grey(tmp_path: Path) -> None:
    grey = {f"{name}/{number}.png": png(number, mode="L") for name in CLASSES for number in range(3)}
    data = open_images(str(write_folder(tmp_path / "grey", grey)))
    assert data.channels == 1 and data.train.image(0).shape == (1, 4, 6)
    assert float(data.normalised(torch.tensor([[[[255]]]], dtype=torch.uint8))) == 1.0
    mixed = open_images(str(write_folder(tmp_path / "mixed", {**grey, "dog/0.png": png(0)})))
    assert {mixed.train.image(i).shape[0] for i in range(len(mixed.train))} == {3}


def test_idx_files_are_read_with_their_labels(tmp_path: Path) -> None:
    data = open_images(str(write_idx(tmp_path / "both", "train", "t10k")))
    assert (len(data.train), len(data.held_out), data.classes, data.channels) == (10, 10, ("0", "1", "2"), 1)
    assert data.train.image(4).shape == (1, 5, 7) and data.train.labels.tolist() == [i % 3 for i in range(10)]
    expected = np.random.default_rng(0).integers(0, 256, (10, 5, 7))
    assert torch.equal(data.train.image(4)[0], torch.from_numpy(expected[4]).to(torch.uint8))
    alone = open_images(str(write_idx(tmp_path / "one", "t10k")))
    assert (len(alone.train), len(alone.held_out)) == (8, 2)
    assert open_images(str(tmp_path / "one/t10k-images-idx3-ubyte.gz")).digest == alone.digest


def test_names_of_classes_come_with_a_dataset(tmp_path: Path) -> None:
    data = open_images(str(write_dataset(tmp_path / "data")))
    assert data.classes == CLASSES and data.held_out.labels.tolist() == [0, 0, 1]
    assert data.digest != open_images(str(write_parquet(tmp_path / "p"))).digest, "their classes have other names"


def test_normalised_pixels_of_rgb_have_imagenets_mean(tmp_path: Path) -> None:
    data = open_images(str(write_folder(tmp_path)))
    image = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255
    assert torch.allclose(data.normalised(image), torch.zeros(3, 1, 1), atol=1e-6)
    assert torch.allclose(
        data.normalised(image + 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)), torch.ones(1)
    )


def test_decoded_images_are_kept_while_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("siamesenorm.data.images.KEPT_BYTES", 6 * 4 * 3 * 2)
    data = open_images(str(write_folder(tmp_path)))  # reads image 0
    assert data.train.image(0) is data.train.image(0) and data.train.image(1) is data.train.image(1)
    assert data.train.image(2) is not data.train.image(2) and torch.equal(data.train.image(2), data.train.image(2))


# --- what is refused, in one line that names it


def without(prefix: str) -> dict[str, bytes]:
    return {name: content for name, content in FILES.items() if not name.startswith(prefix)}


def refuses(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as raised:
        data = open_images(str(path))
        data.verify()
    message = str(raised.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("write", [write_folder, write_zip])
@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"README.txt": b"nothing"}, "train/CLASS/NAME"),
        ({name: content for name, content in FILES.items() if "/dog/" in name}, "dog"),
        ({**FILES, "train/lonely.png": png(1)}, "lonely.png"),
        ({**FILES, "test/bird/0.png": png(1)}, "bird"),
        (without("train"), "train"),
        ({**FILES, "train/cat/0.png": b"no image"}, "train/cat/0.png"),
        ({**FILES, "train/dog/3.png": FILES["train/dog/3.png"][:60]}, "train/dog/3.png"),
    ],
    ids=["none", "one class", "no class folder", "unknown class", "no train", "first unreadable", "last cut short"],
)
def test_bad_images_are_refused(
    write: Callable[[Path, dict[str, bytes]], Path], files: dict[str, bytes], word: str, tmp_path: Path
) -> None:
    refuses(write(tmp_path / "data", files), word)


def test_an_unreadable_image_is_refused_when_it_is_read(tmp_path: Path) -> None:
    data = open_images(str(write_folder(tmp_path, {**FILES, "train/dog/3.png": b"no image"})))
    data.train.image(6)
    with pytest.raises(UserError, match=r"train/dog/3\.png"):
        data.train.image(7)


def test_classes_that_the_split_leaves_without_training_images_are_refused(tmp_path: Path) -> None:
    """Of two images one is held out; of three of each class all but two."""
    names = [f"{name}/{number}.png" for number in range(3) for name in CLASSES]
    refuses(write_folder(tmp_path / "few", {name: png(5) for name in names[:2]}), "cat")
    data = open_images(str(write_folder(tmp_path / "enough", {name: png(5) for name in names})))
    assert set(data.train.labels.tolist()) == {0, 1}


def test_an_empty_class_folder_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / "train/bird").mkdir()
    refuses(folder, "train/bird")
    archive = write_zip(tmp_path / "b.zip")
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr("train/bird/", b"")
    refuses(archive, "train/bird")


def test_images_of_sixteen_bits_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.zeros((4, 6), dtype=np.uint16)).save(file, "png")
    refuses(write_folder(tmp_path, {**FILES, "train/cat/0.png": file.getvalue()}), "train/cat/0.png")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    refuses(tmp_path / "nowhere", "nowhere", "digits")
    archive = write_zip(tmp_path / "cut.zip")
    archive.write_bytes(archive.read_bytes()[:-30])
    refuses(archive, "cut.zip")
    flipped = write_zip(tmp_path / "flipped.zip")
    content = bytearray(flipped.read_bytes())
    content[content.index(FILES["train/cat/2.png"]) + 50] ^= 255
    flipped.write_bytes(content)
    refuses(flipped, "train/cat/2.png")
    folder = write_idx(tmp_path / "idx", "train")
    images = folder / "train-images-idx3-ubyte.gz"
    images.write_bytes(gzip.compress(gzip.decompress(images.read_bytes())[:-1]))
    refuses(folder, images.name)
    images.write_bytes(b"no gzip")
    refuses(folder, images.name)
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    images.write_bytes(gzip.compress(idx(np.zeros((3, 2, 2)))))
    refuses(folder, "train-labels-idx1-ubyte.gz")


def test_tables_without_images_or_labels_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    contents = [content for content, _ in rows()]
    for number, columns in enumerate(
        (
            {"image": contents},
            {"label": [0, 1]},
            {"image": [contents[0], None], "label": [0, 1]},
            {"image": contents[:2], "label": [0, -1]},
            {"image": [contents[0], b"no image"], "label": [0, 1]},
        )
    ):
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{number}.parquet")
        refuses(tmp_path / f"{number}.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "0.parquet").read_bytes()[:-9])
    refuses(tmp_path / "cut.parquet")


def test_the_digits_are_of_seventeen_greys() -> None:
    data = open_images("digits")
    assert isinstance(data, ImageData) and (len(data.train), len(data.held_out), data.largest) == (1437, 360, 16)
    assert max(int(data.train.image(i).max()) for i in range(100)) == 16


def test_opening_images_gives_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_images(str(write_zip(tmp_path / "a.zip"))).verify()
