"""`siamesenorm sample`: images of a run as a grid and as arrays, the same in any batch, and refusals of one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("diffusers")

from refusals import refusal
from siamesenorm.cli import main  # noqa: E402
from siamesenorm.cli.sample import grid, png  # noqa: E402

TINY = ["--model.depth", "1", "--model.dim", "16", "--model.heads", "2", "--model.hidden", "24", "--model.patch-size",
        "4", "--batch", "8", "--optimizer.warmup-steps", "1", "--execution.compile", "off",
        "--validation-images", "8"]  # fmt: skip
DRAW = ["--steps", "3", "--sampler", "ddim"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of two steps by the command line, then give it weights whose samples differ from noise."""
    run = tmp_path_factory.mktemp("runs") / "dit"
    assert main(["train", "digits-dit", *TINY, "--steps", "2", "--out", str(run)]) == 0
    return run


def arrays(run: Path, tmp_path: Path, *options: str) -> np.ndarray:
    tmp_path.mkdir(exist_ok=True)
    files = ["--out", str(tmp_path / "grid.png"), "--npz", str(tmp_path / "images.npz")]
    assert main(["sample", str(run), *DRAW, *files, *options]) == 0
    with np.load(tmp_path / "images.npz") as stored:
        assert stored.files == ["arr_0"]
        found: np.ndarray = stored["arr_0"]
    return found


def test_images_are_written_as_a_grid_and_as_arrays(trained: Path, tmp_path: Path) -> None:
    from PIL import Image

    found = arrays(trained, tmp_path, "--count", "12", "--batch", "5")
    assert found.shape == (12, 8, 8, 3) and found.dtype == np.uint8 and (found[..., 0] == found[..., 2]).all()
    with Image.open(tmp_path / "grid.png") as image:
        assert image.mode == "L" and image.size == (10 * 34 + 2, 2 * 34 + 2), "ten classes in a row, 8 pixels enlarged"
        assert image.getpixel((2 + 34, 2)) == found[1, 0, 0, 0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["grid.png", "images.npz"]


def test_they_follow_from_the_seed_whatever_the_batch(trained: Path, tmp_path: Path) -> None:
    first = arrays(trained, tmp_path, "--count", "6", "--classes", "3", "8")
    again = arrays(trained, tmp_path, "--count", "4", "--classes", "3", "8", "--batch", "1")
    assert np.abs(first[:4].astype(int) - again).max() <= 1
    assert (arrays(trained, tmp_path, "--count", "6", "--classes", "3", "8") == first).all()
    assert (arrays(trained, tmp_path, "--count", "6", "--seed", "1") != first).any()


def test_the_average_of_the_weights_is_used_where_there_is_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert main(["sample", str(run), *DRAW, "--count", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "images": 2, "step": 2, "weights": "ema", "out": str(run / "samples.png")
    }  # fmt: skip
    weights = [arrays(trained, tmp_path / name, "--count", "3", "--weights", name) for name in ("ema", "model")]
    assert (arrays(trained, tmp_path / "auto", "--count", "3") == weights[0]).all()
    (checkpoint,) = (trained / "checkpoints").glob("step-*")
    stored = [load_file(checkpoint / f"{name}.safetensors") for name in ("ema", "model")]
    assert any(not torch.equal(stored[0][name], stored[1][name]) for name in stored[0])


@pytest.mark.parametrize(
    "options",
    ["--classes 10", "--steps 0", "--steps 2000", "--sampler euler", "--guidance -1", "--count 0", "--batch 0",
     "--seed -1", "--device abacus", "--out nowhere/x.png", "--npz nowhere/x.npz"],
)  # fmt: skip
def test_bad_options_are_refused(
    trained: Path, tmp_path: Path, options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [] if "--out" in options else ["--out", "grid.png"]
    refusal(capsys, "sample", str(trained), "--steps", "2", *files, *options.split())
    assert not list(tmp_path.iterdir())


def test_runs_that_cannot_be_sampled_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["train", "digits", "--steps", "1", "--optimizer.warmup-steps", "0", "--out", str(tmp_path / "vit")]) == 0
    )
    assert "classification" in refusal(capsys, "sample", str(tmp_path / "vit"))
    refusal(capsys, "sample", str(tmp_path))
    run = tmp_path / "empty"
    run.mkdir()
    shutil.copy(trained / "config.json", run)
    assert "checkpoint" in refusal(capsys, "sample", str(run))
    config = json.loads((trained / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "ema": 0.0}))
    assert "--weights model" in refusal(capsys, "sample", str(run), "--weights", "ema")


def test_a_run_that_diverged_is_refused_and_nothing_is_written(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from siamesenorm.cli import sample

    opened = sample.open_weights

    def broken(*arguments: object) -> object:
        model, *rest = opened(*arguments)  # type: ignore[arg-type]
        model.head.bias.data.fill_(float("nan"))
        return model, *rest

    monkeypatch.setattr(sample, "open_weights", broken)
    files = ["--out", str(tmp_path / "grid.png"), "--npz", str(tmp_path / "images.npz")]
    refusal(capsys, "sample", str(trained), *DRAW, *files)
    assert not list(tmp_path.iterdir())


def test_a_grid_has_white_between_its_images() -> None:
    images = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    found = grid(images, 2)
    assert found.shape == (3, 2 * 34 + 2, 2 * 34 + 2)
    assert (found[:, :2] == 255).all() and (found[:, 36:68, 36:68] == 255).all() and not found[:, 2:34, 36:68].any()
    assert png(found).startswith(b"\x89PNG") and png(found[:1]).startswith(b"\x89PNG")
